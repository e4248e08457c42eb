"""Splits are disjoint by construction, and every draw is the same in every process."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest

from rl_posttrain.sandbox.bubblewrap import confined_command
from rl_posttrain.tasks import PromptSpaceError, Tools, load, names
from rl_posttrain.tasks.splits import HELDOUT_FRACTION, Item, derive, find, procedural, split_of

ROOT = Path(__file__).resolve().parents[2]
# `judge` is not called here: these tests make tasks and do not score them.
TOOLS = Tools(confine=confined_command, judge=lambda pool, programs: [])
REASONING = {
    "reasoning/spell_backward": {"tag": "spell"},
    "reasoning/chain_sum": {},
    "reasoning/isomorphic_strings": {},  # its items depend on the order of sets
}
PROCEDURAL = [name for name in names() if not name.startswith(("reasoning/", "math/"))]  # math's are from files


@pytest.fixture(scope="module", autouse=True)
def close_tools():
    yield
    TOOLS.close()


def test_split_is_a_keyed_hash_of_the_text():
    for prompt in ("rev abc", "", "größer\n", "map ab>ba"):
        digest = blake2b(prompt.encode(), digest_size=8, key=b"rl_posttrain/split/1").hexdigest()
        assert split_of(prompt) == ("heldout" if int(digest, 16) / 2**64 < 0.25 else "train")


def test_heldout_is_a_quarter():
    counts = Counter(split_of(f"prompt {i}") for i in range(20_000))
    share = counts["heldout"] / 20_000
    assert abs(share - HELDOUT_FRACTION) < 4 * (0.25 * 0.75 / 20_000) ** 0.5


def test_derive_separates_paths():
    paths = [("a", "bc"), ("ab", "c"), ("abc",), (1, 23), (12, 3), ("1", 23), (1, "23"), (123,), ("123",)]
    assert len({derive(*path) for path in paths}) == len(paths)
    assert all(0 <= derive("x", i, bits=31) < 2**31 for i in range(1000))
    assert max(derive("x", i, bits=31) for i in range(1000)) > 2**30


@pytest.mark.parametrize("name", PROCEDURAL)
def test_splits_share_no_prompt_over_seeds(name):
    domain = load(name, {}, TOOLS)
    train = {task.prompt for seed in range(5) for task in domain.make(seed, "train", range(300))}
    held = {task.prompt for seed in range(5) for task in domain.make(seed, "heldout", range(300))}
    assert not train & held
    assert len(train) > 1200 and len(held) > 1200


@pytest.mark.parametrize("name", REASONING)
def test_splits_share_no_prompt_over_seeds_in_reasoning(name):
    domain = load(name, REASONING[name], TOOLS)
    train = {task.prompt for seed in range(3) for task in domain.make(seed, "train", range(150))}
    held = {task.prompt for seed in range(3) for task in domain.make(seed, "heldout", range(150))}
    assert not train & held
    assert all(split_of(prompt) == "heldout" for prompt in held)


def test_a_small_space_still_keeps_the_splits_apart():
    domain = load("strings/sort_digits", {"min_length": 2, "max_length": 2}, TOOLS)
    train = {task.prompt for task in domain.make(0, "train", range(600))}
    held = {task.prompt for task in domain.make(1, "heldout", range(600))}
    assert len(train) + len(held) == 100  # every prompt there is, each in one split


def test_index_alone_decides_a_task():
    domain = load("strings/reverse", {}, TOOLS)
    together = domain.make(3, "train", [5, 0, 7])
    assert together == [domain.make(3, "train", [i])[0] for i in (5, 0, 7)]
    assert [task.index for task in together] == [5, 0, 7]
    assert together != domain.make(4, "train", [5, 0, 7])
    assert together[0].prompt != domain.make(3, "heldout", [5])[0].prompt


def test_find_is_bounded_and_says_why():
    wrong = next(text for text in map(str, range(100)) if split_of(text) == "heldout")
    drawn = []

    def draw(attempt):
        drawn.append(attempt)
        return Item(wrong, None)

    with pytest.raises(PromptSpaceError, match=f"d/x: none of 256 draws.*'train'.*{wrong!r}.*widen"):
        find(draw, "train", "d/x")
    assert drawn == list(range(256))


def test_find_skips_failed_draws():
    items = [None, Item(next(t for t in map(str, range(100)) if split_of(t) == "train"), "a")]
    assert find(items.__getitem__, "train", "d/x") is items[1]


def test_procedural_carries_the_item():
    make = procedural("d/x", lambda rng: Item(f"p{rng.getrandbits(60)}", "demo", {"k": [1]}))
    (task,) = make(0, "train", [4])
    assert (task.id, task.demonstration, task.reference) == ("d/x/train/4", "demo", {"k": [1]})


DIGESTS = """
import hashlib, json, sys
from rl_posttrain.sandbox.bubblewrap import confined_command
from rl_posttrain.tasks import Tools, load
from rl_posttrain.tasks.mixture import draw
tools = Tools(confine=confined_command, judge=lambda pool, programs: [])
for name, options in json.loads(sys.argv[1]).items():
    domain = load(name, options, tools)
    tasks = [domain.make(7, split, range(40)) for split in ("train", "heldout")]
    print(name, hashlib.sha256(repr(tasks).encode()).hexdigest())
print(draw(0, 3, {"b": 1.0, "a": 2.0, "c": 0.3}, 16))
tools.close()
"""


def test_same_in_every_process():
    wanted = {name: {} for name in PROCEDURAL} | REASONING

    def run(hash_seed: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS, json.dumps(wanted)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first = run("1")
    assert len(first) == len(wanted) + 1
    assert first == run("2")
    # ... and in this one.
    domain = load("code/slices", {}, TOOLS)
    tasks = [domain.make(7, split, range(40)) for split in ("train", "heldout")]
    assert f"code/slices {hashlib.sha256(repr(tasks).encode()).hexdigest()}" in first
