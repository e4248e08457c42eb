"""The codec: what goes in comes out, and hostile bytes raise Malformed and nothing else."""

import collections
import enum
import json
import math
import random

import pytest

from rl_posttrain.sandbox.codec import Malformed, Members, Opaque, Pairs, decode, encode, real_value
from rl_posttrain.sandbox.compare import normalise, same

CAP = 1 << 20


def random_value(rng: random.Random, depth: int = 0):
    atoms = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.randrange(-(9**30), 9**30),
        lambda: rng.random() * 10.0 ** rng.randrange(-300, 300),
        lambda: 'é\ud800x\0[{"\\'[: rng.randrange(9)],
        lambda: b"\x00\xff[" * rng.randrange(4),
        lambda: complex(rng.random(), 1),
        lambda: float("inf"),
    ]
    many = lambda: [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    containers = [
        many,
        lambda: tuple(many()),
        lambda: {rng.randrange(99): value for value in many()},
        lambda: {rng.randrange(99) for _ in range(3)},
    ]
    return rng.choice(atoms + (containers if depth < 4 else []))()


def round_trips(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        value = random_value(rng)
        data = encode(value)
        decoded = decode(data, CAP)
        assert real_value(decoded) == value, data
        assert same(normalise(value, "value"), decoded), data
        mutant = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        try:
            same(normalise(value, "value"), decode(bytes(mutant), CAP))
        except Malformed:
            pass


def test_round_trips_and_mutants():
    round_trips(1500, seed=0)


@pytest.mark.slow
def test_many_round_trips_and_mutants():
    round_trips(20_000, seed=1)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 10**6,
        b"[]" * 10**5,
        b'{"i":"0x' + b"f" * 500_000 + b'"}',
        b'{"i":"zz"}',
        b'{"d":[[1]]}',
        b'{"d":[1]}',
        b'{"t":1}',
        b'{"c":[1,"x"]}',
        b'{"b":"*"}',
        b'{"f":"NaN"}',
        b'{"q":[1]}',
        b'{"i":"0x1","f":"nan"}',
        b"1" * 5000,
        b"-" + b"1" * 30,
        b"0." + b"1" * 5000,
        b"NaN",
        b"-Infinity",
        b"\xff\xfe",
        b"",
        b'"' + b"x" * (CAP + 1) + b'"',
        b'{"t":[' * 200 + b"1" + b"]}" * 200,
    ],
    ids=lambda data: data[:16].decode("latin-1"),
)
def test_hostile_bytes_are_malformed(data):
    with pytest.raises(Malformed):
        decode(data, CAP)


def test_brackets_within_strings_are_not_depth():
    assert decode(encode("[" * 1000 + '"\\'), CAP) == "[" * 1000 + '"\\'


def test_integers_beyond_double_precision_are_exact():
    for value in (2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 10**400):
        assert decode(encode(value), CAP) == value


def test_dicts_and_sets_stay_lists():
    assert type(decode(encode({1: 2}), CAP)) is Pairs
    assert type(decode(encode({1, 2}), CAP)) is Members


def test_subclasses_are_seen_through_their_plain_base():
    class Everything(int):
        __eq__ = lambda self, other: True
        __hash__ = int.__hash__
        __int__ = lambda self: 7
        __repr__ = lambda self: "7"

    class Colour(enum.IntEnum):
        RED = 3

    Point = collections.namedtuple("Point", "x y")
    assert encode(Everything(-1)) == b"-1"
    assert encode(Colour.RED) == b"3"
    assert encode(Point(1, 2)) == b'{"t":[1,2]}'
    assert encode(collections.Counter("aab")) == b'{"d":[["a",2],["b",1]]}'


def test_other_objects_are_opaque_and_equal_nothing():
    class Anything:
        __eq__ = lambda self, other: True

    value = decode(encode(Anything()), CAP)
    assert type(value) is Opaque
    assert value != value
    assert not same(1, value)
    assert not same(normalise([1], "x"), [value])


def test_self_reference_ends():
    loop: list = []
    loop.append(loop)
    value = json.loads(encode(loop))
    depth = 0
    while isinstance(value, list):
        value, depth = value[0], depth + 1
    assert value == {"o": "too deeply nested"} and depth == 61


def test_decoding_is_independent_of_the_recursion_limit():
    import sys

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        with pytest.raises(Malformed, match="nested"):
            decode(b"[" * 400_000 + b"]" * 400_000, CAP)
    finally:
        sys.setrecursionlimit(before)


def test_nan_survives():
    assert math.isnan(decode(encode(float("nan")), CAP))
