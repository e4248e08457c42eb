"""The final answer in a text, and whether two answers are the same number. Exact, and no text is ever evaluated."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

BOX = "\\boxed{"
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,60})"
_IN_TEXT = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.\d{{1,60}})?|\.\d{{1,60}})(?:/\d{{1,60}})?")
_NUMBER = re.compile(rf"([-+]?)({_DIGITS})?(\.\d{{1,60}})?(?:[eE]([-+]?\d{{1,3}}))?")
_FRACTION = re.compile(
    r"([-+]?)(?:(\d{1,20})\s+)?(?:\\[dt]?frac\s*\{(\d{1,60})\}\s*\{(\d{1,60})\}|(\d{1,60})\s*/\s*(\d{1,60}))"
)


def final_answer(text: str) -> str | None:
    """What a completion gives as its answer: the last box, else the last answer tag, else what follows the last
    "####", else the last number. A box inside a tag counts as the box. None where there is none.

    A box that is never closed, the last one, is no answer: the text was cut in the middle of it.
    """
    if BOX in text:
        return _last_box(text)
    tagged = TAGGED.findall(text)
    if tagged:
        return tagged[-1].strip()
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip() or None
    return last_number(text)


def last_number(text: str) -> str | None:
    """The last number of a sentence: "costs $1,234.50." gives "1,234.50". None where there is none."""
    found = _IN_TEXT.findall(text)
    return found[-1] if found else None


def _last_box(text: str) -> str | None:
    start = text.rindex(BOX) + len(BOX)
    depth = 1
    for at, character in enumerate(text[start:], start):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:at].strip()
    return None


def number(text: str) -> Fraction | None:
    """The exact value of a number: with sign, thousands, decimals, exponent, as a fraction or mixed number, with a
    currency sign or spaces around it. None for anything else."""
    plain = unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("\\$", "").replace("{,}", ",")
    plain = plain.strip().rstrip(".").strip("$ \t\n")
    match = _NUMBER.fullmatch(plain)
    if match and (match[2] or match[3]):
        sign, whole, decimals, exponent = match.groups()
        value = Fraction((whole or "0").replace(",", "") + (decimals or "")) * Fraction(10) ** int(exponent or 0)
        return -value if sign == "-" else value
    match = _FRACTION.fullmatch(plain)
    if not match:
        return None
    sign, whole, *parts = match.groups()
    numerator, denominator = (int(part) for part in parts if part is not None)
    if denominator == 0:
        return None
    value = Fraction(numerator, denominator) + int(whole or 0)
    return -value if sign == "-" else value


def same(answer: str, expected: str) -> bool:
    """Equal as numbers, where both are; else equal as text but for case and spacing."""
    ours, theirs = number(answer), number(expected)
    if ours is not None and theirs is not None:
        return ours == theirs
    words = lambda text: unicodedata.normalize("NFKC", text).casefold().split()
    return words(answer) == words(expected)
