"""A step in numbers, on a group of each kind."""

import numpy as np
import pytest

from rl_posttrain.observability.rollouts import rollout_metrics
from rl_posttrain.types import Rollout, Task, Verdict


def rollout(domain, length, finish="stop"):
    task = Task(domain, "train", 0, "")
    return Rollout(task, 0, (1,), (2,) * length, (-1.0,) * length, "", finish, 1.0, 0)


def test_what_left_its_group_counts_in_no_reward_and_as_unsolved_unless_its_verifier_failed():
    groups = [
        [rollout("a", 2), rollout("a", 3), rollout("a", 8, "length")],  # the last is filtered
        [rollout("b", 1), rollout("b", 1), rollout("b", 1)],
    ]
    statuses = [["pass", "wrong", "malformed"], ["pass", "pass", "infra_error"]]
    rewards = np.array([[1.0, 0.0, np.nan], [1.0, 1.0, np.nan]])
    metrics = rollout_metrics(groups, [[Verdict(status) for status in group] for group in statuses], rewards)
    assert metrics["reward/mean"] == 0.75
    assert metrics["domain/a/reward"] == 0.5 and metrics["domain/b/reward"] == 1
    assert metrics["domain/a/accuracy"] == pytest.approx(1 / 3) and metrics["domain/b/accuracy"] == 1
    assert metrics["group/zero_signal_fraction"] == 0.5
    assert metrics["completion/truncated_fraction"] == pytest.approx(1 / 6)
    assert metrics["completion/length_max"] == 8 and metrics["completion/length_mean"] == pytest.approx(16 / 6)
    assert metrics["verdict/pass_fraction"] == 0.5
    assert metrics["verdict/infra_error_fraction"] == metrics["verdict/malformed_fraction"] == pytest.approx(1 / 6)
