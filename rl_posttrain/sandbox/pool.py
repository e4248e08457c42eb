"""Slots for many threads: started lazily, lent one run at a time, recycled, replaced when they fail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_posttrain.sandbox.bubblewrap import (
    COPIED_BINARY,
    SandboxUnavailable,
    find_bubblewrap,
    reachable_copy,
    unprivileged_user,
)
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.seccomp import Profile, build_filter
from rl_posttrain.sandbox.slot import InfrastructureError, Job, Session, Slot
from rl_posttrain.types import Execution

FIRST_USER = 65534  # nobody; slot i runs as this minus i, since the kernel counts some quotas by user
USERS = 500
CLOSE_SECONDS = 15.0


@dataclass(frozen=True)
class PoolConfig:
    """How many runs at one time, and when their container is replaced. The config section `sandbox`."""

    slots: int = 2  # about the number of processor cores
    runs_per_slot: int = 1000  # 1: every run in a container of its own, at about ten times the cost
    limits: Limits = field(default_factory=Limits)  # of runs that do not bring their own

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= USERS:
            raise ValueError(f"slots={self.slots}: must be between 1 and {USERS}")
        if self.runs_per_slot < 1:
            raise ValueError(f"runs_per_slot={self.runs_per_slot}: use at least 1")


class Pool:
    """Runs candidate code in `config.slots` containers. A context manager; safe to share between threads.

    The first run starts the launcher and the first slot. No process outlives `close`, nor this process,
    however it ends. A forked copy of this process must make its own pool.
    """

    def __init__(self, config: PoolConfig):
        self.config = config
        self._condition = threading.Condition()
        self._idle: list[tuple[int, Slot | None]] = [(index, None) for index in range(config.slots)]
        self._closed = False
        self._works = False  # a slot has started, so that a later failure to start is a fault of the moment
        self._owner = os.getpid()
        self._launcher: LauncherProcess | None = None
        self._filters: dict[Profile, bytes] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: Job, driver: Callable[[Session], Any]) -> tuple[Execution, Any]:
        """One run on the next free slot; after a failure of the sandbox once more, on a fresh one.

        Raises:
          SandboxUnavailable: no slot has ever started: this machine cannot run candidate code.
          InfrastructureError: the second attempt failed too.
        """
        try:
            return self._attempt(job, driver)
        except InfrastructureError:
            return self._attempt(job, driver, fresh=True)

    def _attempt(self, job: Job, driver: Callable[[Session], Any], fresh: bool = False) -> tuple[Execution, Any]:
        index, slot = self._take()
        try:
            if slot is not None and (fresh or slot.runs >= self.config.runs_per_slot):
                slot.close()
                slot = None
            if slot is None:
                slot = self._start_slot(index)
            return slot.run(job, driver)
        except BaseException:  # an interrupted run leaves its slot in an unknown state, too
            if slot is not None:
                slot.close()
                slot = None
            raise
        finally:
            self._give_back(index, slot)

    def _take(self) -> tuple[int, Slot | None]:
        if os.getpid() != self._owner:
            raise RuntimeError("this Pool belongs to the process that made it; make a new one after fork")
        with self._condition:
            while not self._idle and not self._closed:
                self._condition.wait()
            if self._closed:
                raise RuntimeError("this Pool is closed")
            return self._idle.pop()

    def _give_back(self, index: int, slot: Slot | None) -> None:
        with self._condition:
            if slot is None:
                self._idle.insert(0, (index, None))  # warm slots first
            else:
                self._idle.append((index, slot))
            self._condition.notify_all()

    def _start_slot(self, index: int) -> Slot:
        try:
            with self._condition:
                if not self._filters:
                    self._filters = {"single": build_filter("single"), "multi": build_filter("multi")}
                if self._launcher is not None and self._launcher.ended():
                    self._launcher.close()
                    self._launcher = None
                if self._launcher is None:
                    self._launcher = LauncherProcess(find_bubblewrap())
                launcher = self._launcher
            slot = Slot(launcher, self._filters, unprivileged_user(FIRST_USER - index))
        except SandboxUnavailable as error:
            if not self._works:
                raise
            raise InfrastructureError(str(error)) from error
        self._works = True
        return slot

    def close(self) -> None:
        """Waits for runs in progress, then ends every process of the pool. Calling it again does nothing."""
        if os.getpid() != self._owner:
            return
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify_all()
            while len(self._idle) < self.config.slots:
                self._condition.wait()
            slots = [slot for _, slot in self._idle if slot is not None]
        for slot in slots:
            slot.close()
        if self._launcher is not None:
            self._launcher.close()


class LauncherProcess:
    """The trainer's end of `launcher.py`."""

    def __init__(self, bubblewrap: str) -> None:
        folder = reachable_copy(bubblewrap)
        self.bubblewrap = bubblewrap if folder is None else f"{folder}/{COPIED_BINARY}"
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).parent / "launcher.py")
        number = theirs.fileno()
        command = [sys.executable, "-I", "-S", script, str(number), str(os.getpid())]
        # No preexec_fn and no change of user: Python then starts it with vfork, whatever this process's size.
        self._process = subprocess.Popen(
            command if folder is None else [*command, folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(number,),
            start_new_session=True,  # Ctrl-C is for the trainer, which then closes the pool
        )
        theirs.close()

    def start(self, argv: list[str], environment: dict, user: int | None, files: list[int]) -> int:
        """Starts a container; its pid. `files`: its stderr, then what argv calls "{0}", "{1}", ...

        Raises:
          SandboxUnavailable: the program cannot be executed.
          InfrastructureError: the launcher is gone.
        """
        message = {"argv": argv, "environment": environment, "user": user}
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(message).encode()], files)
                data = self._control.recv(1 << 16)
            except OSError as error:
                raise InfrastructureError(f"the launcher ended: {error!r}") from error
        if not data:
            raise InfrastructureError("the launcher ended")
        answer = json.loads(data)
        if "error" in answer:
            raise SandboxUnavailable(
                f"bubblewrap cannot be started: {answer['error']}. It runs as an unprivileged user, who "
                "has to be able to reach it: `apt-get install bubblewrap`"
            )
        return answer["pid"]

    def kill(self, pid: int) -> None:
        with self._lock:
            try:
                self._control.send(json.dumps({"kill": pid}).encode())
            except OSError:  # the launcher is gone, and its containers with it
                return

    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        with self._lock:
            self._control.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
