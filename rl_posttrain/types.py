"""The nouns of the loop that live on the host. Standard library only, so that a worker without JAX can use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "heldout"]
FinishReason = Literal["stop", "length"]
VerdictStatus = Literal["pass", "wrong", "error", "compile_error", "timeout", "malformed", "infra_error"]
Outcome = Literal["pass", "wrong", "error", "compile_error", "timeout", "malformed", "skipped"]


@dataclass(frozen=True)
class Task:
    """One question, a deterministic function of (seed, domain, split, index)."""

    domain: str  # "strings/reverse"
    split: Split
    index: int
    prompt: str  # what the policy is asked
    demonstration: str | None = None  # a worked example's completion, for supervised warm-up
    reference: Mapping[str, Any] = field(default_factory=dict)  # what the verifier needs; never shown to the policy

    @property
    def id(self) -> str:
        return f"{self.domain}/{self.split}/{self.index}"


@dataclass(frozen=True)
class Rollout:
    """One completion, token by token as it was sampled. Nothing here is ever re-tokenised."""

    task: Task
    sample: int  # index within the group
    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]  # the end token included when finish_reason is "stop"
    behaviour_logprobs: tuple[float, ...]  # one per completion token, at `temperature`
    text: str  # the completion decoded, without the end token
    finish_reason: FinishReason
    temperature: float
    policy_version: int  # the optimizer step of the parameters that sampled it


@dataclass(frozen=True)
class Flag:
    """Something about a completion or its execution that deserves a look, e.g. `unsolicited_frame`."""

    name: str
    detail: str = ""


@dataclass(frozen=True)
class Execution:
    """What one run of a program in the sandbox showed."""

    # "ok": ended by itself with exit code 0; "error": non-zero exit or signal; "compile_error": the compiler
    # refused it, and stderr has its words; the limits by name; "infra_error": the sandbox failed, which says
    # nothing about the program.
    status: Literal["ok", "error", "compile_error", "time_limit", "memory_limit", "output_limit", "infra_error"]
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False  # stdout or stderr was cut at the limit
    traceback: str = ""  # trimmed to the candidate's own frames
    exit_code: int | None = None
    signal: int | None = None
    cpu_s: float = 0.0
    wall_s: float = 0.0
    peak_memory_bytes: int = 0
    processes_left: int = 0  # killed at the end of the run
    flags: tuple[Flag, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided, outside the sandbox, about one completion."""

    # "infra_error" (the verifier failed) is not a wrong answer: such a sample leaves its group.
    status: VerdictStatus
    tests: tuple[bool, ...] = ()  # one per test, in order; empty when there is nothing to count
    detail: str = ""  # for people: what was wrong
    executions: tuple[Execution, ...] = ()
    flags: tuple[Flag, ...] = ()
    # What became of each test, beside `tests`: "skipped" were not run, because an earlier one ended the run.
    outcomes: tuple[Outcome, ...] = ()
    # "outside": decided where the candidate's code cannot reach; "tamper_evident": in its own process, with a
    # twin of the tests that a right program fails.
    trust: Literal["outside", "tamper_evident"] = "outside"

    @property
    def passed(self) -> bool:
        return self.status == "pass"

    @property
    def fraction(self) -> float:
        """Share of tests passed, in [0, 1]; 1.0 or 0.0 where the verifier has no tests."""
        return sum(self.tests) / len(self.tests) if self.tests else float(self.passed)
