"""Is an answer the expected one? The answer comes from candidate code: no method of its making runs here.

Equality is Python's own between plain values, with two differences. A bool equals only a bool, so that
`True` is no answer to a question about a number (`True == 1` in Python). And nan equals nan, so that a
test can expect it. Otherwise as in Python: 1 equals 1.0, 0.0 equals -0.0, a list never equals a tuple, a
set equals a frozenset, the order of dicts and sets does not matter.
"""

from __future__ import annotations

import math
from typing import Any

from rl_posttrain.sandbox.codec import MAXIMUM_DEPTH, Members, Opaque, Pairs, decode, encode

NUMBERS = (int, float)


def normalise(value: Any, what: str) -> Any:
    """A trusted value in the decoded form that `same` takes.

    Raises:
      ValueError: it is not plain data (None, bool, int, float, complex, str, bytes, list, tuple, dict, set).
    """
    data = encode(value)
    decoded = decode(data, len(data))
    foreign = _find_opaque(decoded)
    if foreign is not None:
        raise ValueError(
            f"{what} holds {foreign!r}, which is not plain data: use None, bool, int, float, complex, str, "
            f"bytes, list, tuple, dict or set, at most {MAXIMUM_DEPTH} levels deep"
        )
    return decoded


def _find_opaque(value: Any) -> Opaque | None:
    if type(value) is Opaque:
        return value
    if isinstance(value, (list, tuple)):
        return next((found for item in value if (found := _find_opaque(item)) is not None), None)
    return None


def same(expected: Any, answer: Any, tolerance: float = 0.0) -> bool:
    """Whether `answer` equals `expected`; both as `decode` returns them.

    Args:
      tolerance: numbers, where one of the two is a float or complex, may differ by this much, absolutely or
        relative to the larger. Keys of dicts and members of sets are always compared exactly.
    """
    kind = type(expected)
    if kind in NUMBERS and type(answer) in NUMBERS:
        return _same_number(expected, answer, tolerance)
    if kind is complex:
        if type(answer) not in (complex, *NUMBERS):
            return False
        parts = (answer.real, answer.imag)
        return all(
            _same_number(want, got, tolerance) for want, got in zip((expected.real, expected.imag), parts, strict=True)
        )
    if kind is not type(answer):
        return False
    if kind in (list, tuple):
        return len(expected) == len(answer) and all(
            same(want, got, tolerance) for want, got in zip(expected, answer, strict=True)
        )
    if kind is Pairs:
        return _same_pairs(expected, answer, tolerance)
    if kind is Members:
        return len(expected) == len(answer) and {canonical(v) for v in expected} == {canonical(v) for v in answer}
    return kind in (type(None), bool, str, bytes) and expected == answer


def _same_number(expected: Any, answer: Any, tolerance: float) -> bool:
    if expected == answer:
        return True
    if type(expected) is int and type(answer) is int:
        return False
    if expected != expected:  # nan
        return answer != answer
    try:
        return tolerance > 0 and math.isclose(expected, answer, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an int beyond the range of floats
        return False


def _same_pairs(expected: Pairs, answer: Pairs, tolerance: float) -> bool:
    if len(expected) != len(answer):
        return False
    want = {canonical(key): value for key, value in expected}
    got = {canonical(key): value for key, value in answer}
    return want.keys() == got.keys() and all(same(want[key], got[key], tolerance) for key in want)


def canonical(value: Any) -> str:
    """One text for all values that `same` holds equal, different texts for others.

    A dict of texts stands in for a dict of answers: the hash of a string is keyed, that of an integer is
    not, and a hundred thousand integers chosen to collide would keep the judge busy for minutes.
    """
    kind = type(value)
    if kind is float and value.is_integer():
        return canonical(int(value))
    if kind is int:
        return f"n{value:x}"
    if kind is complex:
        if value.imag == 0:
            return canonical(value.real)
        return f"c({canonical(value.real)},{canonical(value.imag)})"
    if kind in (tuple, list):
        return f"{kind.__name__}({','.join(map(canonical, value))})"
    if kind is Members:
        return f"set({','.join(sorted(map(canonical, value)))})"
    if kind is Pairs:
        pairs = sorted(f"{canonical(key)}:{canonical(item)}" for key, item in value)
        return f"dict({','.join(pairs)})"
    if kind is Opaque:
        return f"opaque{id(value)}"
    return f"{kind.__name__}{value!r}"
