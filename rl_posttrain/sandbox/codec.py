"""Plain Python values as tagged JSON: the only thing that crosses the sandbox's border.

No pickle, no marshal, no eval. `encode` also runs inside the sandbox, `decode` assumes hostile bytes: it
bounds size, depth and the length of numbers, never hashes what it decodes (dicts and sets come back as
lists, which `compare` matches), and raises nothing but `Malformed`. Standard library only, Python 3.9 or
newer: this file is also loaded by the sandbox's own interpreter.

    None, bool, str           themselves            bytes, bytearray   {"b": base64}
    int                       itself, or {"i": hex} complex            {"c": [real, imag]}
    float                     itself, or {"f": nan} dict               {"d": [[key, value], ...]}
    list                      [...]                 set, frozenset     {"s": [...]}
    tuple                     {"t": [...]}          anything else      {"o": type name}, equal to nothing
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from typing import Any

MAXIMUM_DEPTH = 60  # of the value; a tagged level is two or three levels of JSON
MAXIMUM_HEX = 400_000  # digits of an integer
EXACT = 1 << 53  # integers up to here survive every JSON parser
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
STEP = [0] * 256
for _opening, _closing in (b"[]", b"{}"):
    STEP[_opening], STEP[_closing] = 1, -1


class Malformed(ValueError):
    """Bytes that are not an encoded value, or exceed a bound."""


class Opaque:
    """Stands for a value that is not plain data, by the name of its type. Equal to nothing."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self):
        return f"<{self.name} object>"


class Pairs(list):
    """A decoded dict: its (key, value) pairs, in order."""


class Members(list):
    """A decoded set: its members, in no particular order."""


def encode(value) -> bytes:
    """`value` in the notation above. Values of other types become opaque; so does what lies too deep."""
    return json.dumps(to_json(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def to_json(value, depth=0):
    """`value` as what `json` can write. Subclasses of plain types are seen through their plain base."""
    if depth > MAXIMUM_DEPTH:
        return {"o": "too deeply nested"}
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -EXACT < value < EXACT else {"i": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if kind is list:
        return [to_json(item, depth + 1) for item in value]
    if kind is tuple:
        return {"t": [to_json(item, depth + 1) for item in value]}
    if kind is dict:
        return {"d": [[to_json(key, depth + 1), to_json(item, depth + 1)] for key, item in value.items()]}
    if kind is set or kind is frozenset:
        return {"s": [to_json(item, depth + 1) for item in value]}
    if kind is bytes or kind is bytearray:
        return {"b": base64.b64encode(bytes(value)).decode()}
    if kind is complex:
        return {"c": [to_json(value.real), to_json(value.imag)]}
    return _subclass_to_json(value, depth)


def _subclass_to_json(value, depth):
    # The plain type's own methods, not the subclass's: what the data is, not what it says that it is.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return to_json(int.__int__(value), depth)
    if isinstance(value, float):
        return to_json(float.__float__(value), depth)
    if isinstance(value, (list, tuple)):
        plain: Any = list if isinstance(value, list) else tuple
        return to_json(plain(plain.__iter__(value)), depth)
    if isinstance(value, dict):
        return to_json(dict(dict.items(value)), depth)
    if isinstance(value, (set, frozenset)):
        plain = set if isinstance(value, set) else frozenset
        return to_json(plain(plain.__iter__(value)), depth)
    return {"o": type(value).__module__ + "." + type(value).__qualname__}


def decode(data: bytes, maximum_bytes: int) -> Any:
    """The value that hostile `data` describes; dicts as `Pairs`, sets as `Members`, the rest as itself.

    Raises:
      Malformed: and nothing else, whatever the bytes are.
    """
    if len(data) > maximum_bytes:
        raise Malformed(f"{len(data)} bytes; at most {maximum_bytes} are read")
    brackets = STRING.sub(b"", data).translate(None, NOT_BRACKETS)
    # Before parsing: the parser's recursion is only as safe as the process's recursion limit.
    if max(itertools.accumulate(map(STEP.__getitem__, brackets)), default=0) > 3 * MAXIMUM_DEPTH + 3:
        raise Malformed("nested too deeply")
    try:
        # json would take UTF-16 and UTF-32 too, whose bytes the count above does not see through.
        text = data.decode("utf-8")
        return from_json(json.loads(text, parse_constant=_refuse, parse_int=_integer, parse_float=_float))
    except Malformed:
        raise
    except (ValueError, RecursionError, TypeError, OverflowError, MemoryError) as error:
        raise Malformed(f"not an encoded value ({type(error).__name__})") from None


def _refuse(token):
    raise Malformed(f"the constant {token}")


def _integer(token):
    if len(token) > 20:  # reading decimal digits takes quadratic time
        raise Malformed("a long decimal integer")
    return int(token)


def _float(token):
    if len(token) > 40:
        raise Malformed("a long decimal fraction")
    return float(token)


def from_json(node, depth=0) -> Any:
    """The inverse of `to_json`, with `Pairs` and `Members`. Raises Malformed for an unknown tag."""
    if depth > 2 * MAXIMUM_DEPTH + 8:
        raise Malformed("nested too deeply")
    if node is None or type(node) in (bool, int, float, str):
        return node
    if type(node) is list:
        return [from_json(item, depth + 1) for item in node]
    if type(node) is not dict or len(node) != 1:
        raise Malformed("an object without exactly one tag")
    ((tag, body),) = node.items()
    if type(body) is str:
        return _from_string(tag, body)
    if type(body) is list:
        if tag == "t":
            return tuple(from_json(item, depth + 1) for item in body)
        if tag == "s":
            return Members(from_json(item, depth + 1) for item in body)
        if tag == "d" and all(type(pair) is list and len(pair) == 2 for pair in body):
            return Pairs((from_json(key, depth + 1), from_json(item, depth + 1)) for key, item in body)
        if tag == "c" and len(body) == 2:
            real, imaginary = (from_json(part, depth + 1) for part in body)
            if type(real) is float and type(imaginary) is float:
                return complex(real, imaginary)
    raise Malformed("an unknown tag")


def _from_string(tag, body):
    if tag == "i" and len(body) <= MAXIMUM_HEX:
        return int(body, 16)
    if tag == "f" and body in ("nan", "inf", "-inf"):
        return float(body)
    if tag == "b":
        return base64.b64decode(body, validate=True)
    if tag == "o":
        return Opaque(body[:200])
    raise Malformed("an unknown tag")


def real_value(value) -> Any:
    """Inside the sandbox, where the sender is trusted: a decoded value with dicts and sets made real."""
    if type(value) is Pairs:
        return {real_value(key): real_value(item) for key, item in value}
    if type(value) is Members:
        return {real_value(item) for item in value}
    if type(value) is list:
        return [real_value(item) for item in value]
    if type(value) is tuple:
        return tuple(real_value(item) for item in value)
    return value
