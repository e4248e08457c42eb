"""The mixture's draw has the right shares and depends on (seed, step) alone."""

import math
from collections import Counter

import pytest

from rl_posttrain.tasks.mixture import assign, draw

WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}


def test_each_step_is_within_one_of_its_share():
    for step in range(200):
        counts = Counter(draw(0, step, WEIGHTS, 13))
        assert sum(counts.values()) == 13
        for name, weight in WEIGHTS.items():
            assert math.floor(13 * weight) <= counts[name] <= math.ceil(13 * weight)


def test_shares_are_right_on_average():
    counts = Counter(name for step in range(4000) for name in draw(1, step, WEIGHTS, 3))
    for name, weight in WEIGHTS.items():
        # A domain's count in a step is Bernoulli around its share: variance at most 1/4.
        assert abs(counts[name] - 12000 * weight) < 4 * (4000 / 4) ** 0.5


def test_scale_and_order_of_weights_do_not_matter():
    scaled = {name: 40 * weight for name, weight in reversed(WEIGHTS.items())}
    assert draw(2, 5, WEIGHTS, 20) == draw(2, 5, scaled, 20)


def test_step_and_seed_do_matter():
    assert len({tuple(draw(seed, step, WEIGHTS, 20)) for seed in range(3) for step in range(3)}) == 9


def test_order_within_a_step_is_random():
    firsts = Counter(draw(0, step, {"a": 1, "b": 1}, 8)[0] for step in range(400))
    assert 140 < firsts["a"] < 260


def test_weight_zero_is_never_drawn():
    assert all("z" not in draw(0, step, {"z": 0.0, "a": 1.0, "b": 2.0}, 5) for step in range(100))
    assert draw(0, 0, {"a": 1e-300}, 2) == ["a", "a"]


@pytest.mark.parametrize(
    ("weights", "count", "message"),
    [
        ({"a": -1.0, "b": 2.0}, 1, "'a': -1.0"),
        ({"a": math.nan}, 1, "finite"),
        ({"a": math.inf}, 1, "finite"),
        ({"a": 0.0}, 1, "above 0"),
        ({}, 1, "above 0"),
        ({"a": 1.0}, 0, "count=0"),
    ],
)
def test_ranges(weights, count, message):
    with pytest.raises(ValueError, match=message):
        draw(0, 0, weights, count)


def test_assign_counts_on():
    before = {"a": 7}
    assigned, after = assign(["a", "b", "a"], before)
    assert assigned == [("a", 7), ("b", 0), ("a", 8)]
    assert after == {"a": 9, "b": 1}
    assert before == {"a": 7}


def test_a_resumed_run_assigns_the_same():
    counters, whole = {}, []
    for step in range(10):
        assigned, counters = assign(draw(3, step, WEIGHTS, 6), counters)
        whole += assigned
        if step == 4:
            saved, so_far = dict(counters), len(whole)
    resumed = []
    for step in range(5, 10):
        assigned, saved = assign(draw(3, step, WEIGHTS, 6), saved)
        resumed += assigned
    assert whole[so_far:] == resumed and saved == counters
    assert len(set(whole)) == len(whole)
