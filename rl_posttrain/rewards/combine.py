"""A verdict as a number, and what a completion's length takes off it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl_posttrain.types import Rollout, Verdict


@dataclass(frozen=True)
class RewardConfig:
    """What a completion earns. Whatever is accepted here, a right answer of any length earns more than any wrong one.

    Attributes:
      correct: for passing everything.
      wrong: for an answer that does not pass.
      partial: on top of `wrong`, times the share of tests passed, where the verifier counts tests.
      malformed: for what is no answer at all, such as a completion cut off at the length limit.
      truncated: what a completion cut off at the length limit is: "malformed", or "filtered", which leaves its group
        without moving the others.
      overlong_buffer: tokens before the length limit over which `overlong_penalty` sets in; 0 is none.
      overlong_penalty: taken off any completion at the length limit, right or wrong; see `overlong`.
      length_penalty: taken off a right answer by its length among the group's right answers; see `length_cost`.

    Raises:
      ValueError: a value out of range or without effect, or a right answer that a wrong one could reach.
    """

    correct: float = 1.0
    wrong: float = 0.0
    partial: float = 0.0
    malformed: float = 0.0
    truncated: Literal["malformed", "filtered"] = "malformed"
    overlong_buffer: int = 0
    overlong_penalty: float = 0.0
    length_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ("correct", "wrong", "partial", "malformed", "overlong_penalty", "length_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: must be finite")
        if self.partial < 0:
            raise ValueError(f"partial={self.partial}: must be at least 0, or passing more tests would cost reward")
        if self.wrong + self.partial >= self.correct:
            raise ValueError(
                f"wrong={self.wrong} + partial={self.partial} reaches correct={self.correct}: a wrong answer "
                "must earn less than a right one; lower partial"
            )
        if self.malformed > self.wrong:
            raise ValueError(
                f"malformed={self.malformed} is above wrong={self.wrong}: giving no answer must not pay; lower it"
            )
        self._check_lengths()

    def _check_lengths(self) -> None:
        for name in ("overlong_buffer", "overlong_penalty", "length_penalty"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0")
        if (self.overlong_buffer > 0) != (self.overlong_penalty > 0):
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} and overlong_penalty={self.overlong_penalty}: one has no "
                "effect without the other; set both, or neither"
            )
        least = self.correct - self.length_penalty - self.overlong_penalty
        if least <= self.wrong + self.partial:
            raise ValueError(
                f"length_penalty={self.length_penalty} and overlong_penalty={self.overlong_penalty} could leave a "
                f"right answer {least}, which a wrong one reaches (wrong + partial = {self.wrong + self.partial}): "
                "lower them, or raise correct"
            )


def group_rewards(
    rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], config: RewardConfig, max_tokens: int
) -> list[float | None]:
    """The rewards of one prompt's completions; None for a sample that leaves the group.

    Args:
      max_tokens: the length limit that the completions were sampled under, their end tokens included.
    """
    lengths = [len(rollout.completion_tokens) for rollout in rollouts]
    right = [length for length, verdict in zip(lengths, verdicts, strict=True) if verdict.passed]
    earned: list[float | None] = []
    for rollout, verdict, length in zip(rollouts, verdicts, lengths, strict=True):
        worth = reward(verdict, config)
        if worth is None or (config.truncated == "filtered" and rollout.finish_reason == "length"):
            earned.append(None)
            continue
        if verdict.passed:
            worth -= config.length_penalty * length_cost(length, right)
        earned.append(worth - config.overlong_penalty * overlong(length, max_tokens, config.overlong_buffer))
    return earned


def overlong(length: int, max_tokens: int, buffer: int) -> float:
    """How overlong a completion is, in [0, 1]: 0 up to `max_tokens - buffer` tokens, then linear, 1 at `max_tokens`.

    DAPO's soft overlong punishment is -1 times that: https://arxiv.org/abs/2503.14476, equation 13, whose L_max is
    `max_tokens` here, and L_cache the buffer. No completion is longer than `max_tokens`.
    """
    return max(0.0, (length - (max_tokens - buffer)) / buffer) if buffer else 0.0


def length_cost(length: int, right: Sequence[int]) -> float:
    """How long a right answer is among the lengths of the group's right answers, in (0, 1); 0.5 is their mean.

    `sigmoid((length - mean) / deviation)`: https://arxiv.org/abs/2502.04463, where the reward of a right answer is 1
    less alpha times that. Wrong answers have no such cost: making them short is no aim.
    """
    deviation = statistics.pstdev(right)
    return 1.0 / (1.0 + math.exp(-(length - statistics.fmean(right)) / deviation)) if deviation else 0.5


def reward(verdict: Verdict, config: RewardConfig) -> float | None:
    """What a verdict is worth; None for "infra_error": nothing is known about that sample, and it leaves its group."""
    match verdict.status:
        case "infra_error":
            return None
        case "pass":
            return config.correct
        case "malformed":
            return config.malformed
        case _:  # wrong, error, timeout
            return config.wrong + config.partial * verdict.fraction
