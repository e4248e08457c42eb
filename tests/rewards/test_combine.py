"""What each kind of verdict earns, and that no wrong answer can earn what a right one does."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_posttrain.config import ConfigError, build
from rl_posttrain.rewards.combine import RewardConfig, group_rewards, length_cost, overlong, reward
from rl_posttrain.types import Rollout, Task, Verdict

HALF = (True, False)
TASK = Task("strings/sort", "train", 0, "")


def completion(length, finish="stop"):
    return Rollout(TASK, 0, (1,), (5,) * length, (-1.0,) * length, "", finish, 1.0, 0)


def earned(config, pairs, max_tokens=10):
    """Rewards of one group, of (status, length) pairs; the longest are cut off."""
    rollouts = [completion(n, "length" if status == "malformed" and n == max_tokens else "stop") for status, n in pairs]
    return group_rewards(rollouts, [Verdict(status) for status, _ in pairs], config, max_tokens)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict("pass"), 2.0),
        (Verdict("pass", (True, True)), 2.0),
        (Verdict("wrong"), -0.5),
        (Verdict("wrong", HALF), 0.0),
        (Verdict("error", (True, False, False, False)), -0.25),
        (Verdict("timeout", HALF), 0.0),
        (Verdict("malformed"), -1.0),
        (Verdict("malformed", HALF), -1.0),  # what is no answer gets no partial credit
        (Verdict("infra_error"), None),
        (Verdict("infra_error", (True, True)), None),
    ],
)
def test_values(verdict, expected):
    config = RewardConfig(correct=2.0, wrong=-0.5, partial=1.0, malformed=-1.0)
    assert reward(verdict, config) == expected


def test_by_default_only_right_answers_earn():
    config = RewardConfig()
    statuses = ("pass", "wrong", "error", "timeout", "malformed")
    assert [reward(Verdict(status, HALF), config) for status in statuses] == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"partial": 1.0}, "must earn less"),
        ({"wrong": 1.0}, "must earn less"),
        ({"wrong": 0.6, "partial": 0.4}, "must earn less"),
        ({"correct": 0.0}, "must earn less"),
        ({"partial": -0.1}, "at least 0"),
        ({"malformed": 0.1}, "must not pay"),
        ({"correct": math.inf}, "finite"),
        ({"wrong": math.nan}, "finite"),
        ({"wrong": -math.inf}, "finite"),
        ({"length_penalty": math.nan}, "finite"),
        ({"length_penalty": -0.1}, "at least 0"),
        ({"overlong_buffer": -1, "overlong_penalty": 0.5}, "at least 0"),
        ({"overlong_buffer": 4}, "set both"),
        ({"overlong_penalty": 0.5}, "set both"),
        ({"length_penalty": 1.0}, "a wrong one reaches"),
        ({"overlong_buffer": 4, "overlong_penalty": 1.0}, "a wrong one reaches"),
        ({"overlong_buffer": 4, "overlong_penalty": 0.5, "length_penalty": 0.5}, "a wrong one reaches"),
        ({"partial": 0.6, "length_penalty": 0.5}, "a wrong one reaches"),
        ({"truncated": "dropped"}, "filtered"),
    ],
)
def test_ranges(values, message):
    with pytest.raises(ConfigError, match=message):
        build(RewardConfig, values)


def test_whatever_is_accepted_keeps_right_above_wrong():
    accepted = 0
    levels = (-1.0, -0.2, 0.0, 0.3, 0.9, 1.0)
    for correct, wrong, partial, malformed in itertools.product(levels, repeat=4):
        try:
            config = RewardConfig(correct, wrong, partial, malformed)
        except ValueError:
            continue
        accepted += 1
        right = reward(Verdict("pass"), config)
        others = [
            Verdict(status, tests)
            for status in ("wrong", "error", "timeout", "malformed")
            for tests in ((), HALF, (True, True, True))
        ]
        assert all(reward(verdict, config) < right for verdict in others)
        assert reward(Verdict("malformed"), config) <= reward(Verdict("wrong"), config)
    assert accepted > 50


# ---- lengths ----


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0.0), (15, 0.0), (16, 0.0), (17, 0.25), (18, 0.5), (19, 0.75), (20, 1.0)]
)
def test_overlong_rises_over_the_buffer(length, expected):
    """DAPO's equation 13, times -1: L_max 20, L_cache 4."""
    assert overlong(length, 20, 4) == expected
    assert overlong(length, 20, 0) == 0  # no buffer, no punishment


def test_a_length_costs_by_where_it_stands_among_right_answers():
    right = (2, 4, 9)
    z = (np.array(right) - np.mean(right)) / np.std(right)
    assert [length_cost(length, right) for length in right] == pytest.approx((1 / (1 + np.exp(-z))).tolist())
    assert length_cost(7, (7,)) == length_cost(7, (7, 7)) == 0.5


def test_penalties_by_hand():
    dapo = RewardConfig(correct=1.0, wrong=-1.0, malformed=-1.0, overlong_buffer=4, overlong_penalty=1.0)
    group = [("pass", 6), ("pass", 8), ("wrong", 9), ("malformed", 10), ("infra_error", 3)]
    assert earned(dapo, group) == [1.0, 0.5, -1.75, -2.0, None]
    shorter = RewardConfig(length_penalty=0.5)
    costs = [1 / (1 + math.exp(-z)) for z in (-1, 1)]  # of the lengths 2 and 6; wrong answers neither pay nor count
    assert earned(shorter, [("pass", 2), ("wrong", 9), ("pass", 6)]) == pytest.approx(
        [1 - 0.5 * costs[0], 0.0, 1 - 0.5 * costs[1]]
    )
    assert earned(RewardConfig(), group) == [1.0, 1.0, 0.0, 0.0, None]  # by default lengths cost nothing


def test_filtering_takes_out_what_was_cut_off_and_moves_no_other():
    kept = [("pass", 3), ("wrong", 9), ("malformed", 4)]  # no answer, but ended
    config = RewardConfig(malformed=-1.0, truncated="filtered", length_penalty=0.2)
    assert earned(config, [*kept, ("malformed", 10)]) == [*earned(config, kept), None]
    assert earned(RewardConfig(malformed=-1.0), [("malformed", 10)]) == [-1.0]


LEVELS = st.floats(-3, 3, allow_nan=False)
STATUSES = ("pass", "wrong", "error", "timeout", "malformed")


@st.composite
def configs(draw):
    """Accepted ones, up to the edge of what is."""
    wrong, partial, buffer = draw(LEVELS), draw(st.floats(0, 2)), draw(st.integers(0, 12))
    malformed = wrong - draw(st.floats(0, 2))
    length, over = draw(st.floats(0, 2)), draw(st.floats(0.01, 2)) if buffer else 0.0
    correct = wrong + partial + length + over + draw(st.sampled_from([1e-6, 0.1, 1.0]))
    return RewardConfig(correct, wrong, partial, malformed, draw(st.sampled_from(("malformed", "filtered"))),
                        buffer, over, length)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(configs(), st.lists(st.tuples(st.sampled_from(STATUSES), st.integers(1, 12), st.booleans()), min_size=2))
def test_no_length_can_reverse_correctness(config, drawn):
    rollouts = [completion(length) for _, length, _ in drawn]
    verdicts = [Verdict(status, (True, solved)) for status, _, solved in drawn]
    rewards = group_rewards(rollouts, verdicts, config, 12)
    right = [r for r, (status, *_) in zip(rewards, drawn) if status == "pass"]
    others = [r for r, (status, *_) in zip(rewards, drawn) if status != "pass"]
    assert min(right, default=math.inf) > max(others, default=-math.inf)
    assert min(right, default=math.inf) > config.wrong + config.partial  # and so above any wrong one elsewhere
