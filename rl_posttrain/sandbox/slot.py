"""One slot: a container with a fork server, which serves one run at a time."""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rl_posttrain.sandbox import cgroups
from rl_posttrain.sandbox.bubblewrap import SANDBOX_ENVIRONMENT, SandboxUnavailable, explain
from rl_posttrain.sandbox.job import InfrastructureError, Job, MemoryExceeded
from rl_posttrain.sandbox.seccomp import FilterName
from rl_posttrain.sandbox.session import GroupUsage, Session
from rl_posttrain.types import Execution

START_SECONDS = 30.0
CHUNK = 1 << 16


class Launcher(Protocol):
    """Starts and kills containers; see `launcher.py`."""

    def start(
        self, argv: list[str], environment: dict, user: int | None, files: list[int], group: cgroups.Group | None
    ) -> int: ...

    def kill(self, pid: int) -> None: ...

    def retire(self, group: cgroups.Group) -> None: ...


@dataclass(frozen=True)
class Image:
    """What a container shows: its command line, and what its fork server loads.

    `argv`: "{0}" stands for the descriptor of the control socket.
    """

    argv: list[str]
    filters: Mapping[FilterName, bytes]
    paths: tuple[str, ...] = ()  # onto sys.path
    preload: tuple[str, ...] = ()


class Slot:
    """A container that serves runs until it is closed or breaks."""

    def __init__(self, launcher: Launcher, image: Image, user: int | None, group: cgroups.Group | None):
        """Starts the container and does not wait for it; the first `run` does, or `wait_ready`.

        Raises:
          SandboxUnavailable: bubblewrap cannot be executed.
          InfrastructureError: the launcher is gone.
        """
        self.runs = 0
        self._launcher = launcher
        self._group = group
        self._ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = os.memfd_create("slot-stderr")
        try:
            files = [self._errors, theirs.fileno()]
            self.pid = launcher.start(list(image.argv), SANDBOX_ENVIRONMENT, user, files, group)
            theirs.close()
            hello = {
                "filters": {name: base64.b64encode(data).decode() for name, data in image.filters.items()},
                "paths": image.paths,
                "preload": image.preload,
            }
            self._control.settimeout(START_SECONDS)
            self._said = ""
            try:
                self._control.send(json.dumps(hello).encode())
            except OSError as error:  # it has ended already; `wait_ready` says why
                self._said = repr(error)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def wait_ready(self) -> None:
        """Waits until the fork server serves.

        Raises:
          SandboxUnavailable: the container does not start; the message holds its own and what to do.
        """
        if self._ready:
            return
        try:
            answer, reason = self._control.recv(CHUNK), self._said
        except (OSError, TimeoutError) as error:
            answer, reason = b"", repr(error)
        if not answer:
            os.lseek(self._errors, 0, os.SEEK_SET)
            said = os.read(self._errors, CHUNK).decode("utf-8", "replace")
            raise SandboxUnavailable(explain(said or reason))
        message = json.loads(answer)
        if "failed" in message:
            raise SandboxUnavailable(
                f"the sandbox's interpreter cannot load its modules ({message['failed']}): install them into "
                "sandbox.packages, or take them out of sandbox.preload"
            )
        version = tuple(message["ready"])
        if version < (3, 9):
            raise SandboxUnavailable(f"the sandbox's Python is {version}; it needs 3.9 or newer")
        self._control.setblocking(True)
        self._ready = True

    def close(self) -> None:
        """Ends the container. Safe to call twice."""
        self._control.close()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1
        if hasattr(self, "pid"):
            self._launcher.kill(self.pid)
        if self._group is not None:
            self._launcher.retire(self._group)
            self._group = None

    def run(self, job: Job, driver: Callable[[Session], Any]) -> tuple[Execution, Any]:
        """One run. `driver` asks the questions through the session; its result comes with the execution.

          Raises:
            InfrastructureError: the container or its plumbing failed; close this slot.
        MemoryExceeded: so did they, but by the candidate's doing.
        """
        self.wait_ready()
        self.runs += 1
        # Rlimits hold a single process by themselves, and a group's files cost a tenth of a short run. But a group
        # that has had limits keeps them until it gets others.
        group = self._group
        usage = GroupUsage(group if group is not None and (job.watched or group.limited) else None, job)
        try:
            session = Session(self._control, self.runs, job, self.pid, usage)
            try:
                result = session.drive(driver)
            finally:
                session.close()
            return session.execution(), result
        except (OSError, InfrastructureError) as error:
            if usage.killed():  # the kernel took the fork server with the candidate
                raise MemoryExceeded(f"slot {self.pid}: the run exceeded {job.limits.memory_bytes} bytes") from error
            raise InfrastructureError(f"slot {self.pid}: {error!r}") from error

    def cancel(self) -> None:
        """Ends the run in progress, from any thread. Its driver meets `RunEnded`."""
        try:
            self._control.send(json.dumps({"kill": self.runs}).encode())
        except OSError:  # it is being closed, which ends the run too
            pass
