"""What to run in a slot, and how that can fail."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.seccomp import FilterName, Profile

INFINITY = -1  # of an rlimit
STACK_BYTES = 64 << 20  # of address space, which the fork server set aside for the stack of its forks

Mode = Literal["calls", "objects", "program", "suite", "referee", "command"]


class InfrastructureError(RuntimeError):
    """The sandbox failed, which says nothing about the candidate."""


class MemoryExceeded(RuntimeError):
    """A run used so much memory that the kernel ended its whole slot. Close the slot; the run counts."""


class RunEnded(Exception):
    """The run is over, or is being killed, before it gave an answer."""


@dataclass(frozen=True)
class Job:
    """What to run. In all modes but "command" the code goes to the run itself, as the first question."""

    mode: Mode
    limits: Limits
    profile: Profile = "single"
    stdin: bytes = b""
    argv: Sequence[str] = ()  # of a command; argv[0] is an absolute path
    environment: Mapping[str, str] = field(default_factory=dict)  # of a command
    files: Mapping[str, bytes | int] = field(default_factory=dict)  # below /tmp: the bytes, or a descriptor to copy
    artifact: str = ""  # a file below /tmp that the run leaves; `Session.artifact` takes it
    proc: bool = False  # with a /proc that shows this run's processes
    # None: the memory limit is on address space. Else it is on writable memory, with so many bytes on top: for
    # programs that reserve address space without using it.
    reserved_bytes: int | None = None

    @property
    def filter(self) -> FilterName:
        if self.profile == "multi":
            return "multi"
        return "command" if self.mode == "command" else "single"

    @property
    def watched(self) -> bool:
        """Whether its memory has to be looked at from outside: rlimits hold for each process alone."""
        return self.profile == "multi" or self.reserved_bytes is not None

    def message(self, run: int, channels: list[str]) -> bytes:
        limits: dict[str, Any] = asdict(self.limits)
        memory, reserved = self.limits.memory_bytes, self.reserved_bytes
        limits["address_space"] = INFINITY if reserved is not None else memory + STACK_BYTES * (self.mode != "command")
        limits["data_bytes"] = INFINITY if reserved is None else memory + reserved
        fields = {"run": run, "mode": self.mode, "filter": self.filter, "limits": limits, "channels": channels}
        fields |= {"proc": self.proc}
        if self.mode == "command":
            fields |= {"argv": list(self.argv), "environment": dict(self.environment)}
        return json.dumps(fields).encode()
