"""Equality of an expected value and a hostile answer, case by case."""

import pytest

from rl_posttrain.sandbox.codec import decode, encode
from rl_posttrain.sandbox.compare import canonical, normalise, same


def equal(expected, answer, tolerance=0.0):
    data = encode(answer)
    return same(normalise(expected, "expected"), decode(data, len(data)), tolerance)


NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (1, 1),
        (1, 1.0),
        (0.0, -0.0),
        (NAN, NAN),
        (INF, INF),
        (True, True),
        (None, None),
        ("a", "a"),
        (b"a", bytearray(b"a")),
        ([1, [2.0]], [1.0, [2]]),
        ((1, 2), (1, 2)),
        ({1: "x", 2: "y"}, {2: "y", 1: "x"}),
        ({1: "x"}, {1.0: "x"}),
        ({(1, 2): [3]}, {(1, 2): [3]}),
        ({1, 2}, frozenset([2, 1])),
        ({frozenset([1]), (2,)}, {(2,), frozenset([1])}),
        (1 + 2j, 1 + 2j),
        (1 + 0j, 1),
        (2**70, 2**70),
        (float(2**70), 2**70),
        ([], []),
        ({}, {}),
        (set(), set()),
    ],
)
def test_equal(expected, answer):
    assert equal(expected, answer)


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (1, True),
        (True, 1),
        (0, False),
        (False, 0),
        (False, None),
        ([1], [True]),
        ({1: 1}, {True: 1}),
        ({1}, {True}),
        ({"a": 1}, {"a": True}),
        (1, "1"),
        (1, None),
        (0, ""),
        ([], ()),
        ([1], (1,)),
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ({1, 2}, {1, 3}),
        ({1}, [1]),
        ({1: 2}, {1: 3}),
        ({1: 2}, {1: 2, 3: 4}),
        ({}, set()),
        ("a", b"a"),
        (1.0, NAN),
        (NAN, 1.0),
        (INF, -INF),
        (1e308, INF),
        (2**53, 2**53 + 1),
        (float(2**53), 2**53 + 1),
        (1, 1 + 1j),
        (0.1 + 0.2, 0.3),
        (range(3), None) if False else ([0, 1, 2], range(3)),
    ],
)
def test_not_equal(expected, answer):
    assert not equal(expected, answer)


def test_tolerance_is_absolute_and_relative():
    assert equal(0.1 + 0.2, 0.3, 1e-9)
    assert equal(0.0, 1e-7, 1e-6)
    assert not equal(0.0, 1e-5, 1e-6)
    assert equal(1e9, 1e9 + 100, 1e-6)
    assert not equal(1e9, 1e9 + 10_000, 1e-6)
    assert equal(1, 1.0000001, 1e-6)
    assert equal({"a": [1.0]}, {"a": [1.0000001]}, 1e-6)
    assert equal(1 + 1j, 1 + 1.0000001j, 1e-6)


def test_tolerance_is_for_fractions_alone():
    assert not equal(1_000_000, 1_000_001, 1e-3)
    assert not equal({1.0}, {1.0000001}, 1e-6)
    assert not equal(1.0, True, 1e-3)
    assert not equal(1.0, 10**400, 1e-3)
    assert not equal(1.0, NAN, 1e-3)
    assert not equal(1.0, INF, 1e-3)


def test_colliding_integers_do_not_keep_the_judge_busy():
    # Every key hashes to the same number in CPython, so that a dict of them takes quadratic time.
    modulus = (1 << 61) - 1
    keys = [index * modulus for index in range(1, 30_000)]
    body = ",".join(f'[{{"i":"{key:#x}"}},0]' for key in keys)
    answer = decode(f'{{"d":[{body}]}}'.encode(), 1 << 20)
    assert same(answer, answer)  # one lookup each; minutes if it hashed the integers


def test_duplicate_keys_do_not_stand_for_missing_ones():
    assert not same(normalise({1: 0, 2: 0}, "x"), decode(b'{"d":[[1,0],[1,0]]}', 100))
    assert not same(normalise({1, 2}, "x"), decode(b'{"s":[1,1]}', 100))


def test_canonical_separates_what_python_could_confuse():
    texts = [canonical(value) for value in (1, True, "1", b"1", (1,), [1], None, "None", 1.5, 1j, NAN)]
    assert len(set(texts)) == len(texts)
    assert canonical(1) == canonical(1.0) == canonical(1 + 0j)


def test_expected_values_must_be_plain():
    with pytest.raises(ValueError, match="calls.*object.*not plain data"):
        normalise([1, object()], "calls")
