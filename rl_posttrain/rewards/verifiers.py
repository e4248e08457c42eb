"""Rollouts to verdicts, each by the verifier of its domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_posttrain.sandbox.bubblewrap import confined_command
from rl_posttrain.sandbox.judge import judge_many
from rl_posttrain.sandbox.kinds import Call, FunctionTests
from rl_posttrain.tasks.registry import Domain, FunctionCheck, Tools
from rl_posttrain.types import Rollout, Verdict

TRUNCATED = Verdict("malformed", detail="truncated")


def verify(domains: Mapping[str, Domain], rollouts: Sequence[Rollout]) -> list[Verdict]:
    """One verdict per rollout, in order.

    A completion that was cut off at the length limit never passes, even if what there is would be right: it
    is "malformed" with detail "truncated", and no verifier sees it.

    Raises:
      KeyError: a rollout's domain is not among `domains`.
    """
    verdicts = [TRUNCATED] * len(rollouts)
    places: dict[str, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        if rollout.task.domain not in domains:
            raise KeyError(f"rollout of domain {rollout.task.domain!r}; the domains are {sorted(domains)}")
        if rollout.finish_reason != "length":
            places.setdefault(rollout.task.domain, []).append(place)
    for name, chosen in places.items():
        tasks, texts = [rollouts[i].task for i in chosen], [rollouts[i].text for i in chosen]
        for i, verdict in zip(chosen, domains[name].score(tasks, texts), strict=True):
            verdicts[i] = verdict
    return verdicts


def judge_functions(pool: Any, programs: Sequence[tuple[str, FunctionCheck]]) -> list[Verdict]:
    """`Tools.judge` by the sandbox: runs each program in `pool`, compares what it returns outside."""
    return judge_many(
        pool,
        [
            (
                code,
                FunctionTests(check.entry, tuple(Call(arguments, expected) for arguments, expected in check.calls)),
            )
            for code, check in programs
        ],
    )


def tools(pool: Any) -> Tools:
    """The sandboxed tools that task families need."""
    return Tools(pool=pool, confine=confined_command, judge=judge_functions)
