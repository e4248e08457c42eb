"""The stages of a run as config sections, in their order: worked examples, preference pairs, reinforcement."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_posttrain.algorithms.preference import PreferenceKind, check_settings
from rl_posttrain.algorithms.update import UpdateConfig


@dataclass(frozen=True)
class SftConfig:
    """Supervised warm-up on worked examples, before GRPO (config section `sft`)."""

    steps: int = 0
    batch_size: int = 64  # examples per optimizer step
    examples: int = 4096  # per domain; an epoch is all of them once
    row_length: int = 256
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"steps={self.steps} must be at least 0")
        for name in ("batch_size", "examples", "row_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class PreferenceConfig:
    """Learning from preference pairs, between the warm-up and GRPO (config section `preference`).

    The reference is the policy at the stage's start. Adapters drop nothing in this stage, whatever `lora.dropout` is:
    policy and reference are scored alike, so that the first loss is that of margin 0.
    """

    steps: int = 0
    batch_size: int = 32  # pairs per optimizer step
    row_length: int = 512  # holds a prompt with both completions
    path: str | None = None  # a jsonl file of pairs (docs/data.md)
    heldout: str | None = None  # another, for the accuracy; no prompt may stand in both
    kind: PreferenceKind = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"steps={self.steps} must be at least 0")
        for name in ("batch_size", "row_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.steps and (self.path is None or self.heldout is None):
            raise ValueError(f"path={self.path!r}, heldout={self.heldout!r}: name two jsonl files of pairs, or steps=0")
        check_settings(self.beta, self.label_smoothing)


@dataclass(frozen=True)
class GrpoConfig:
    """The reinforcement-learning stage (config section `grpo`)."""

    steps: int = 100  # rollouts; each is followed by epochs * mini_batches optimizer steps
    epochs: int = 1  # passes over a rollout
    mini_batches: int = 1  # optimizer steps per pass, split by group
    row_length: int = 256
    mismatch_alarm: float = 1e-3  # largest |log ratio| of trainer and sampler at an unchanged policy

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"steps={self.steps} must be at least 0")
        for name in ("epochs", "mini_batches", "row_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.mismatch_alarm > 0:
            raise ValueError(f"mismatch_alarm={self.mismatch_alarm} must be above 0")
