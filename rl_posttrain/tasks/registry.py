"""Domains by name: "family/name" plus options becomes something that makes tasks and scores completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_posttrain.config import ConfigError, nearest
from rl_posttrain.tasks.splits import PromptSpaceError
from rl_posttrain.types import Split, Task, Verdict

_HELDOUT_DRAWS_PER_TASK = 16  # how many indices `heldout` looks at per task asked for before it gives up


@dataclass(frozen=True)
class Domain:
    """One kind of question.

    Attributes:
      name: "strings/reverse".
      make: (seed, split, indices) -> tasks, one per index, deterministic. Prompts of the two splits never
        coincide, whatever the seeds.
      score: (tasks, completions) -> verdicts, one per completion, decided out of reach of the policy's text.
    """

    name: str
    make: Callable[[int, Split, Sequence[int]], list[Task]]
    score: Callable[[Sequence[Task], Sequence[str]], list[Verdict]]


@dataclass(frozen=True)
class FunctionCheck:
    """What a program must do: `entry`, called with each tuple of arguments, returns the expected value."""

    entry: str
    calls: tuple[tuple[tuple[Any, ...], Any], ...]  # (arguments, expected value)


class Confine(Protocol):
    """Wraps an argv so that it runs without network and sees only system folders and `readable`."""

    def __call__(self, argv: Sequence[str], *, readable: Sequence[str] = ()) -> list[str]: ...


Judge = Callable[[Any, Sequence[tuple[str, FunctionCheck]]], list[Verdict]]


@dataclass(frozen=True)
class Tools:
    """What families need from outside; `rewards.verifiers.tools(pool)` builds the sandboxed ones.

    Attributes:
      pool: the sandbox pool that `judge` uses.
      confine: wraps the argv of a trusted helper process, as `sandbox.bubblewrap.confined_command` does.
      judge: (pool, [(code, check), ...]) -> verdicts, running the code in the pool.
      helpers: long-lived helper processes by name, shared by all domains loaded with these tools.
    """

    pool: Any = None
    confine: Confine | None = None
    judge: Judge | None = None
    helpers: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def close(self) -> None:
        """Ends the helper processes. Domains loaded with these tools start new ones when used again."""
        for helper in self.helpers.values():
            helper.close()


Loader = Callable[[str, dict[str, Any], Tools], Domain]
_FAMILIES: dict[str, tuple[Loader, tuple[str, ...]]] = {}


def register(family: str, members: Iterable[str]) -> Callable[[Loader], Loader]:
    """Decorator for `load(name, options, tools) -> Domain`, which serves "family/member" for each member."""

    def add(loader: Loader) -> Loader:
        _FAMILIES[family] = (loader, tuple(members))
        return loader

    return add


def names() -> list[str]:
    """Every domain that `load` knows, sorted."""
    return sorted(f"{family}/{member}" for family, (_, members) in _FAMILIES.items() for member in members)


def load(name: str, options: Mapping[str, Any], tools: Tools) -> Domain:
    """The domain `name` with `options`.

    Raises:
      ConfigError: unknown family, name or option (the message gives the nearest), an option out of range, a
        domain that is refused (with the reason), or a tool that is missing.
    """
    family = name.partition("/")[0]
    if family not in _FAMILIES:
        raise ConfigError(f"domain {name!r}: there is no family {family!r}{nearest(family, _FAMILIES)}")
    return _FAMILIES[family][0](name, dict(options), tools)


def require_member(name: str, known: Iterable[str]) -> str:
    """The part of `name` after its family, if it is `known`."""
    family, _, member = name.partition("/")
    known = list(known)
    if member not in known:
        raise ConfigError(f"domain {name!r}: {family!r} has no domain {member!r}{nearest(member, known)}")
    return member


def heldout(domain: Domain, seed: int, count: int) -> list[Task]:
    """`count` tasks of split "heldout" with different prompts, in index order.

    Raises:
      PromptSpaceError: the domain has too few; the message says how many were found.
    """
    found: dict[str, Task] = {}
    limit = _HELDOUT_DRAWS_PER_TASK * count
    start = 0
    while len(found) < count and start < limit:
        stop = min(start + max(count - len(found), 16), limit)
        for task in domain.make(seed, "heldout", range(start, stop)):
            found.setdefault(task.prompt, task)
        start = stop
    if len(found) < count:
        raise PromptSpaceError(
            f"{domain.name}: {count} different held-out prompts were asked for, but {start} draws gave only "
            f"{len(found)}: widen the domain's options or evaluate on fewer"
        )
    return list(found.values())[:count]
