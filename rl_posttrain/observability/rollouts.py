"""What a step's completions looked like, in numbers: per step and per domain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import get_args

import numpy as np

from rl_posttrain.types import Rollout, Verdict, VerdictStatus


def rollout_metrics(
    groups: Sequence[Sequence[Rollout]], verdicts: Sequence[Sequence[Verdict]], rewards: np.ndarray
) -> dict[str, float]:
    """Rewards, lengths and verdicts of one step.

    Args:
      rewards: float [P, W], NaN for samples that left their group: they count in no reward. Those whose verifier
        failed count in `verdict/infra_error_fraction` only, those filtered as overlong also as not solved.
    """
    rollouts = [rollout for group in groups for rollout in group]
    statuses = [verdict.status for group in verdicts for verdict in group]
    lengths = np.array([len(rollout.completion_tokens) for rollout in rollouts])
    judged = np.isfinite(rewards)
    spread = [np.ptp(row[ok]) if ok.any() else 0.0 for row, ok in zip(rewards, judged)]
    metrics = {
        "reward/mean": _mean(rewards[judged]),
        "group/zero_signal_fraction": float(np.mean([value == 0 for value in spread])),
        "completion/length_mean": float(lengths.mean()),
        "completion/length_max": float(lengths.max()),
        "completion/truncated_fraction": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
    }
    for status in get_args(VerdictStatus):
        metrics[f"verdict/{status}_fraction"] = statuses.count(status) / len(statuses)
    by_domain: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for group, group_verdicts, row in zip(groups, verdicts, rewards):
        for rollout, verdict, value in zip(group, group_verdicts, row):
            if verdict.status != "infra_error":
                by_domain[rollout.task.domain].append((float(value), verdict.passed))
    for name, pairs in sorted(by_domain.items()):
        metrics[f"domain/{name}/reward"] = _mean([value for value, _ in pairs if np.isfinite(value)])
        metrics[f"domain/{name}/accuracy"] = _mean([passed for _, passed in pairs])
    return metrics


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
