"""Short procedural questions about text, for character models. One answer each, compared exactly.

A prompt is a tag and its operands ("rev abcdef"). Prompts and answers use lower-case letters, digits, spaces.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random
from typing import Any

from rl_posttrain.config import build
from rl_posttrain.tasks.registry import Domain, Tools, register, require_member
from rl_posttrain.tasks.splits import Item, procedural
from rl_posttrain.types import Task, Verdict


@dataclass(frozen=True)
class Words:
    """Operands: words of min_length..max_length over the first `letters` letters of the alphabet."""

    min_length: int = 5
    max_length: int = 8
    letters: int = 26

    def __post_init__(self) -> None:
        _check_range("length", self.min_length, self.max_length, 2, 64)
        if not 2 <= self.letters <= 26:
            raise ValueError(f"letters={self.letters}: must be between 2 and 26")

    @property
    def alphabet(self) -> str:
        return string.ascii_lowercase[: self.letters]

    def word(self, rng: Random) -> str:
        return "".join(rng.choices(self.alphabet, k=rng.randint(self.min_length, self.max_length)))


@dataclass(frozen=True)
class Digits:
    """Operands: numbers of min_length..max_length digits, leading zeros allowed."""

    min_length: int = 5
    max_length: int = 8

    def __post_init__(self) -> None:
        _check_range("length", self.min_length, self.max_length, 2, 64)

    def number(self, rng: Random) -> str:
        return "".join(rng.choices(string.digits, k=rng.randint(self.min_length, self.max_length)))


@dataclass(frozen=True)
class Interleave(Words):
    """Two words of equal length."""

    min_length: int = 3
    max_length: int = 5


@dataclass(frozen=True)
class Rotate(Words):
    """Left rotation by 1..max_amount places, fewer than the word has letters."""

    max_amount: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_amount <= 9:
            raise ValueError(f"max_amount={self.max_amount}: must be between 1 and 9")


@dataclass(frozen=True)
class Caesar(Words):
    """Each letter 1..max_shift places on, cyclic in the first `letters` letters."""

    max_shift: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_shift < min(self.letters, 10):
            raise ValueError(f"max_shift={self.max_shift}: must be at least 1 and below 10 and letters={self.letters}")


@dataclass(frozen=True)
class Runs:
    """min_runs..max_runs runs of equal letters, each 1..max_repeat long; neighbours differ."""

    min_runs: int = 4
    max_runs: int = 5
    max_repeat: int = 3
    letters: int = 26

    def __post_init__(self) -> None:
        _check_range("runs", self.min_runs, self.max_runs, 1, 32)
        if not 2 <= self.max_repeat <= 9:
            raise ValueError(f"max_repeat={self.max_repeat}: must be between 2 and 9")
        if not 2 <= self.letters <= 26:
            raise ValueError(f"letters={self.letters}: must be between 2 and 26")

    def runs(self, rng: Random) -> list[tuple[str, int]]:
        alphabet, runs, last = string.ascii_lowercase[: self.letters], [], ""
        for _ in range(rng.randint(self.min_runs, self.max_runs)):
            last = rng.choice(alphabet.replace(last, ""))
            runs.append((last, rng.randint(1, self.max_repeat)))
        return runs


def _check_range(what: str, low: int, high: int, least: int, most: int) -> None:
    if not least <= low <= high <= most:
        raise ValueError(
            f"min_{what}={low}, max_{what}={high}: must satisfy {least} <= min_{what} <= max_{what} <= {most}"
        )


def _reverse(options: Words, rng: Random) -> tuple[str, str]:
    word = options.word(rng)
    return f"rev {word}", word[::-1]


def _sort(options: Words, rng: Random) -> tuple[str, str]:
    word = options.word(rng)
    return f"sort {word}", "".join(sorted(word))


def _sort_digits(options: Digits, rng: Random) -> tuple[str, str]:
    number = options.number(rng)
    return f"sort {number}", "".join(sorted(number))


def _interleave(options: Interleave, rng: Random) -> tuple[str, str]:
    length = rng.randint(options.min_length, options.max_length)
    first, second = ("".join(rng.choices(options.alphabet, k=length)) for _ in range(2))
    return f"zip {first} {second}", "".join(a + b for a, b in zip(first, second, strict=True))


def _rotate(options: Rotate, rng: Random) -> tuple[str, str]:
    word = options.word(rng)
    amount = rng.randint(1, min(options.max_amount, len(word) - 1))
    return f"rot {amount} {word}", word[amount:] + word[:amount]


def _caesar(options: Caesar, rng: Random) -> tuple[str, str]:
    word, shift, alphabet = options.word(rng), rng.randint(1, options.max_shift), options.alphabet
    return f"shift {shift} {word}", word.translate(str.maketrans(alphabet, alphabet[shift:] + alphabet[:shift]))


def _dedupe(options: Runs, rng: Random) -> tuple[str, str]:
    word = "".join(letter * count for letter, count in options.runs(rng))
    return f"dd {word}", "".join(letter for letter, _ in groupby(word))


def _run_length(options: Runs, rng: Random) -> tuple[str, str]:
    runs = options.runs(rng)
    return f"rle {''.join(letter * n for letter, n in runs)}", "".join(f"{letter}{n}" for letter, n in runs)


def _expand(options: Runs, rng: Random) -> tuple[str, str]:
    prompt, answer = _run_length(options, rng)
    return f"exp {answer}", prompt.removeprefix("rle ")


def _remove(options: Words, rng: Random) -> tuple[str, str]:
    word = options.word(rng)
    while len(set(word)) == 1:  # nothing would be left
        word = options.word(rng)
    letter = rng.choice(word)
    return f"del {letter} {word}", word.replace(letter, "")


_DOMAINS: dict[str, tuple[type, Callable[[Any, Random], tuple[str, str]]]] = {
    "reverse": (Words, _reverse),
    "sort": (Words, _sort),
    "sort_digits": (Digits, _sort_digits),
    "interleave": (Interleave, _interleave),
    "rotate": (Rotate, _rotate),
    "caesar": (Caesar, _caesar),
    "dedupe": (Runs, _dedupe),
    "run_length": (Runs, _run_length),
    "expand": (Runs, _expand),
    "remove": (Words, _remove),
}


@register("strings", _DOMAINS)
def load(name: str, options: dict[str, Any], tools: Tools) -> Domain:
    """See `registry.load`. Strings need no tools."""
    section, question = _DOMAINS[require_member(name, _DOMAINS)]
    settings = build(section, options, name)

    def generate(rng: Random) -> Item:
        prompt, answer = question(settings, rng)
        return Item(prompt, answer, {"answer": answer})

    return Domain(name, procedural(name, generate), score_exactly)


def score_exactly(tasks: Sequence[Task], texts: Sequence[str]) -> list[Verdict]:
    """Pass when the completion, without surrounding white space, is the reference answer."""
    return [_compare(task.reference["answer"], text.strip()) for task, text in zip(tasks, texts, strict=True)]


def _compare(answer: str, text: str) -> Verdict:
    if text == answer:
        return Verdict("pass")
    return Verdict("wrong", detail=f"expected {answer!r}, got {text[:80]!r}")
