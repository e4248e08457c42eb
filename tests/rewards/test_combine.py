"""What each kind of verdict earns, and that no wrong answer can earn what a right one does."""

import itertools
import math

import pytest

from rl_posttrain.config import ConfigError, build
from rl_posttrain.rewards.combine import RewardConfig, reward
from rl_posttrain.types import Verdict

HALF = (True, False)


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
