"""A verdict as a number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_posttrain.types import Verdict


@dataclass(frozen=True)
class RewardConfig:
    """What a completion earns.

    Attributes:
      correct: for passing everything.
      wrong: for an answer that does not pass.
      partial: on top of `wrong`, times the share of tests passed, where the verifier counts tests.
      malformed: for what is no answer at all, such as a completion cut off at the length limit.
    """

    correct: float = 1.0
    wrong: float = 0.0
    partial: float = 0.0
    malformed: float = 0.0

    def __post_init__(self) -> None:
        for name in ("correct", "wrong", "partial", "malformed"):
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


def reward(verdict: Verdict, config: RewardConfig) -> float | None:
    """The reward, or None for "infra_error": nothing is known about that sample, and it leaves its group."""
    match verdict.status:
        case "infra_error":
            return None
        case "pass":
            return config.correct
        case "malformed":
            return config.malformed
        case _:  # wrong, error, timeout
            return config.wrong + config.partial * verdict.fraction
