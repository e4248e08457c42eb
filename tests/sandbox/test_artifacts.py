"""What compilers made, kept in memory: bounded in bytes and entries, every descriptor closed once."""

import os
import random
import threading

import pytest

from rl_posttrain.sandbox import artifacts as module
from rl_posttrain.sandbox.artifacts import Artifacts
from rl_posttrain.types import Execution

REFUSED = Execution("compile_error", stderr="main.c:1: error", exit_code=1)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def put(artifacts, key, content):
    """Keeps `content` the way the compiler's driver does, which closes its own descriptor later."""
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    artifacts.put(key, descriptor)
    os.close(descriptor)


def content(artifacts, key):
    """What is kept under `key`; None when nothing is."""
    descriptor = artifacts.get(key)
    if descriptor is None:
        return None
    try:
        return os.pread(descriptor, 1 << 20, 0)
    finally:
        os.close(descriptor)


@pytest.fixture
def artifacts():
    artifacts = Artifacts()
    yield artifacts
    artifacts.close()


def test_a_program_comes_back_as_often_as_it_is_asked_for(artifacts):
    assert content(artifacts, "a") is None
    put(artifacts, "a", b"one")
    put(artifacts, "b", b"two")
    for _ in range(3):
        assert (content(artifacts, "a"), content(artifacts, "b")) == (b"one", b"two")


def test_a_descriptor_that_was_given_out_outlives_the_cache():
    artifacts = Artifacts()
    put(artifacts, "a", b"one")
    descriptor = artifacts.get("a")
    artifacts.close()
    assert isinstance(descriptor, int) and os.pread(descriptor, 10, 0) == b"one"
    os.close(descriptor)


def test_the_first_of_two_compilations_of_one_source_is_kept(artifacts):
    put(artifacts, "a", b"one")
    before = descriptors()
    put(artifacts, "a", b"other")
    artifacts.put("a", REFUSED)
    assert content(artifacts, "a") == b"one" and descriptors() == before


def test_failures_are_kept_as_they_were(artifacts):
    before = descriptors()
    artifacts.put("bad", REFUSED)
    assert artifacts.get("bad") is REFUSED and artifacts.get("bad") is REFUSED
    assert descriptors() == before


def test_the_least_recently_used_goes_first_when_there_are_too_many(artifacts, monkeypatch):
    monkeypatch.setattr(module, "MAXIMUM_ENTRIES", 3)
    before = descriptors()
    put(artifacts, "a", b"1")
    put(artifacts, "b", b"2")
    artifacts.put("c", REFUSED)
    assert content(artifacts, "a") == b"1"  # so that "b" is the oldest now
    put(artifacts, "d", b"4")
    assert content(artifacts, "b") is None
    assert (content(artifacts, "a"), artifacts.get("c"), content(artifacts, "d")) == (b"1", REFUSED, b"4")
    put(artifacts, "e", b"5")
    put(artifacts, "f", b"6")
    assert [content(artifacts, key) for key in "adef"] == [None, b"4", b"5", b"6"]
    assert descriptors() == before + 3


def test_the_least_recently_used_go_first_when_they_are_too_large(artifacts, monkeypatch):
    monkeypatch.setattr(module, "MAXIMUM_BYTES", 100)
    before = descriptors()
    put(artifacts, "a", bytes(40))
    put(artifacts, "b", bytes(40))
    put(artifacts, "c", bytes(20))  # exactly full
    assert [key for key in "abc" if content(artifacts, key) is not None] == ["a", "b", "c"]
    put(artifacts, "d", bytes(41))
    assert [key for key in "abcd" if content(artifacts, key) is not None] == ["c", "d"]
    put(artifacts, "huge", bytes(101))  # fits nowhere, and leaves a cache that still works
    assert [key for key in ("c", "d", "huge") if content(artifacts, key) is not None] == []
    assert descriptors() == before
    put(artifacts, "e", bytes(100))
    assert content(artifacts, "e") == bytes(100)


def test_closing_closes_every_descriptor(artifacts):
    before = descriptors()
    for index in range(20):
        put(artifacts, f"{index}", b"x")
    assert descriptors() == before + 20
    artifacts.close()
    artifacts.close()
    assert descriptors() == before and content(artifacts, "3") is None


def test_many_threads_share_it(artifacts, monkeypatch):
    monkeypatch.setattr(module, "MAXIMUM_ENTRIES", 8)
    monkeypatch.setattr(module, "MAXIMUM_BYTES", 300)
    before = descriptors()
    wrong, hits = [], [0]

    def work(seed):
        draw = random.Random(seed)
        for _ in range(400):
            number = draw.randrange(24)
            want = bytes([number]) * (1 + number)
            if draw.random() < 0.5:
                put(artifacts, f"{number}", want)
            else:
                got = content(artifacts, f"{number}")
                hits[0] += got is not None
                if got not in (None, want):
                    wrong.append((number, got))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and hits[0] > 100
    assert 1 <= descriptors() - before <= 8
    artifacts.close()
    assert descriptors() == before
