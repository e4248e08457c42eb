"""Slots for many threads: lent one run at a time, recycled, warmed ahead, replaced when they fail."""

from __future__ import annotations

import collections
import heapq
import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rl_posttrain.sandbox.artifacts import Artifacts
from rl_posttrain.sandbox.bubblewrap import (
    SandboxUnavailable,
    find_bubblewrap,
    find_interpreter,
    make_readable,
    readable_by_sandbox,
    slot_command,
    unprivileged_user,
)
from rl_posttrain.sandbox.job import InfrastructureError, Job, MemoryExceeded
from rl_posttrain.sandbox.languages import TOOLCHAINS, find_toolchains
from rl_posttrain.sandbox.launch import LauncherProcess
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.seccomp import FILTER_NAMES, FilterName, build_filter
from rl_posttrain.sandbox.session import Session
from rl_posttrain.sandbox.slot import Image, Slot
from rl_posttrain.sandbox.statistics import Statistics
from rl_posttrain.sandbox.submission import Submission, current
from rl_posttrain.types import Execution

FIRST_USER = 65534  # nobody; the n-th slot runs as this minus n, since the kernel counts some quotas by user
USERS = 500
TRUSTED_RUNS = 1000  # before a referee's container is replaced
SOURCES = ("forkserver.py", "harness.py", "codec.py", "objects.py", "exceptions.py", "proxies.py", "referee.py")
PACKAGES, SHARED = "/packages", "/shared"  # inside a container
TOOLS = f"{SHARED}/tools"  # pytest and what it needs

Result = TypeVar("Result")


@dataclass(frozen=True)
class PoolConfig:
    """How many runs at one time, and what they find. The config section `sandbox`."""

    slots: int = 2  # about the number of processor cores
    # 1000 ("fast"): that many runs before a container is replaced; each has namespaces of its own all the same.
    # 1 ("safe"): every run in a container of its own, started ahead, at about five times the processor time.
    runs_per_slot: int = 1000
    limits: Limits = field(default_factory=Limits)  # of runs that do not bring their own
    pending: int = 1024  # submitted runs that wait for a slot; `submit` waits when there are more
    interpreter: str | None = None  # the candidates' Python; None: the system's
    packages: str | None = None  # a folder that they can import from: `pip install --target FOLDER numpy`
    preload: tuple[str, ...] = ()  # modules from it that are imported once per container, not once per run

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= USERS // 4:
            raise ValueError(f"slots={self.slots}: must be between 1 and {USERS // 4}")
        for name in ("runs_per_slot", "pending"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: use at least 1")


class Place:
    """One of a pool's `slots` places: the containers that serve one judgement at a time, in turn or together."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._slots: dict[str, Slot] = {}

    def run(self, job: Job, driver: Callable[[Session], Any]) -> tuple[Execution, Any]:
        """One run in the candidates' container."""
        return self._run("proc" if job.proc else "candidate", job, driver)

    def run_referee(self, job: Job, driver: Callable[[Session], Any]) -> tuple[Execution, Any]:
        """One run in the container of trusted tests, which no candidate's code ever enters. May be nested in `run`."""
        return self._run("referee", job, driver)

    def _run(self, kind: str, job: Job, driver: Callable[[Session], Any]) -> tuple[Execution, Any]:
        slot = self._slots.get(kind)
        runs = self._pool.config.runs_per_slot if kind != "referee" else TRUSTED_RUNS
        if slot is not None and slot.runs >= runs:
            self._slots.pop(kind).close()
            slot = None
        if slot is None:
            slot = self._slots[kind] = self._pool.fresh_slot(kind)
        submission = getattr(current, "submission", None)
        started = time.monotonic()
        try:
            if submission is not None:
                with submission.lock:
                    if submission.stopped:
                        raise CancelledError
                    submission.slots.add(slot)
            return slot.run(job, driver if submission is None else submission.guard(driver))
        except MemoryExceeded:
            self._slots.pop(kind).close()
            return Execution("memory_limit", signal=9), None
        except BaseException:  # an interrupted run leaves its slot in an unknown state, too
            self._slots.pop(kind).close()
            raise
        finally:
            if submission is not None:
                with submission.lock:
                    submission.slots.discard(slot)
                    if submission.stopped:
                        raise CancelledError
            self._pool.record(time.monotonic() - started)
            if runs == 1 and self._slots.get(kind) is slot:
                self._slots.pop(kind).close()
                if kind == "candidate":
                    self._pool.warm_up()

    @property
    def artifacts(self) -> Artifacts:
        """What has been compiled in this pool."""
        return self._pool.artifacts

    def share(self, name: str, build: Callable[[Path], None]) -> None:
        """See `Pool.shared`."""
        self._pool.shared(name, build)

    def discard(self) -> None:
        """Closes its containers; the next run starts new ones."""
        while self._slots:
            self._slots.popitem()[1].close()


def _attempt(function: Callable[[Place], Result], place: Place) -> Result:
    try:
        return function(place)
    except OSError as error:  # this machine has no descriptor or no space left, say
        raise InfrastructureError(repr(error)) from error


class Pool:
    """Runs candidate code in `config.slots` containers. A context manager; safe to share between threads.

    The first run starts the launcher and the first container. No process outlives `close`, nor this process,
    however it ends. A forked copy of this process must make its own pool.
    """

    def __init__(self, config: PoolConfig):
        self.config = config
        self.artifacts = Artifacts()
        self._condition = threading.Condition()
        self._places = [Place(self) for _ in range(config.slots)]
        self._spares: collections.deque[Slot] = collections.deque()  # booting, for the next runs
        self._queue: list[tuple[int, int, Submission, Callable[[], Any], float]] = []
        self._sequence = itertools.count()
        self._workers: list[threading.Thread] = []
        self._closed = False
        self._works: set[str] = set()  # kinds of which one has started: a later failure is a fault of the moment
        self._owner = os.getpid()
        self._launcher: LauncherProcess | None = None
        self._filters: dict[FilterName, bytes] = {}
        self._statistics = Statistics()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- running ----

    def run(self, job: Job, driver: Callable[[Session], Any]) -> tuple[Execution, Any]:
        """One run on the next free place; after a failure of the sandbox once more, in a fresh container.

        Raises:
          SandboxUnavailable: no container has ever started: this machine cannot run candidate code.
          InfrastructureError: the second attempt failed too.
        """
        return self.use(lambda place: place.run(job, driver))

    def use(self, function: Callable[[Place], Result]) -> Result:
        """Calls `function` with a free place; after a failure of the sandbox once more, with fresh containers."""
        place = self._take()
        try:
            try:
                return _attempt(function, place)
            except InfrastructureError:
                self._statistics.add("retries")
                place.discard()
                return _attempt(function, place)
        except InfrastructureError:
            self._statistics.add("infra_errors")
            raise
        finally:
            with self._condition:
                self._places.append(place)
                self._condition.notify_all()

    def submit(self, function: Callable[[], Result], *, priority: int = 0) -> Submission:
        """Calls `function` on one of `slots` worker threads; lower priorities first, then in order of submission.

        Waits while `config.pending` others wait, so not for callbacks of submissions, which run on those threads.
        """
        self._refuse_fork()
        with self._condition:
            while len(self._queue) >= self.config.pending and not self._closed:
                self._condition.wait()
            self._refuse_closed()
            submission = Submission()
            heapq.heappush(self._queue, (priority, next(self._sequence), submission, function, time.monotonic()))
            if len(self._workers) < self.config.slots:
                self._workers.append(threading.Thread(target=self._work, name="sandbox", daemon=True))
                self._workers[-1].start()
            self._condition.notify_all()
        submission.add_done_callback(self._forget)
        return submission

    def _forget(self, submission: Any) -> None:
        """Makes room for another when one is cancelled before its turn."""
        if submission.cancelled():
            with self._condition:
                self._queue = [entry for entry in self._queue if entry[2] is not submission]
                heapq.heapify(self._queue)
                self._condition.notify_all()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closed:
                    self._condition.wait()
                if not self._queue:
                    return
                _, _, submission, function, submitted = heapq.heappop(self._queue)
                self._condition.notify_all()
            if not submission.set_running_or_notify_cancel():
                continue
            self._statistics.waited(time.monotonic() - submitted)
            current.submission = submission
            try:
                result = function()
            except BaseException as error:
                submission.set_exception(error)
            else:
                submission.set_result(result)

    def statistics(self) -> dict[str, float]:
        """What happened since the last call: counts, runs per second, queue and run times in seconds."""
        with self._condition:
            pending = len(self._queue)
        return {**self._statistics.take(), "pending": pending}

    def record(self, seconds: float) -> None:
        """Counts a run (for `Place`)."""
        self._statistics.ran(seconds)

    def _take(self) -> Place:
        self._refuse_fork()
        with self._condition:
            while not self._places and not self._closed:
                self._condition.wait()
            self._refuse_closed()
            return self._places.pop()  # the last used is warm

    def _refuse_fork(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("this Pool belongs to the process that made it; make a new one after fork")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this Pool is closed")

    # ---- containers ----

    def fresh_slot(self, kind: str) -> Slot:
        """A container that serves; one that was started ahead, where there is one (for `Place`).

        Raises:
          SandboxUnavailable, InfrastructureError: it does not start; the second when others did before.
        """
        try:
            slot = None
            if kind == "candidate":
                self._require_launcher()
                with self._condition:
                    slot = self._spares.popleft() if self._spares else None
            if slot is None:
                slot = self._start_slot(kind)
            try:
                slot.wait_ready()
            except BaseException:
                slot.close()
                raise
        except SandboxUnavailable as error:
            if kind not in self._works:
                raise
            raise InfrastructureError(str(error)) from error
        self._works.add(kind)
        return slot

    def warm_up(self) -> None:
        """Starts containers for the next runs, without waiting for them (for `Place`, in safe mode)."""
        while len(self._spares) < self.config.slots and not self._closed:
            slot = self._start_slot("candidate")
            with self._condition:
                self._spares.append(slot)

    def _start_slot(self, kind: str) -> Slot:
        launcher = self._require_launcher()
        user = unprivileged_user(FIRST_USER - self._statistics.add("containers") % USERS)
        return Slot(launcher, self._image(launcher, kind), user, launcher.group())

    def _image(self, launcher: LauncherProcess, kind: str) -> Image:
        interpreter, binds = find_interpreter(self.config.interpreter)
        binds = [*binds, "--ro-bind", str(launcher.shared), SHARED]
        for name, path in launcher.toolchains.items():
            binds += ["--ro-bind", path, f"{TOOLCHAINS}/{name}"]
        paths, preload = [TOOLS], ("referee",)
        if kind != "referee":
            paths, preload = [], self.config.preload
            if self.config.packages is not None:
                if not readable_by_sandbox(self.config.packages):
                    raise SandboxUnavailable(
                        f"sandbox.packages={self.config.packages!r} does not exist or cannot be read by the "
                        "unprivileged user that candidates run as: `pip install --target` into a public folder"
                    )
                binds += ["--ro-bind", os.path.realpath(self.config.packages), PACKAGES]
                paths = [PACKAGES]
        argv = slot_command(launcher.bubblewrap, interpreter, binds, launcher.harness, proc=kind == "proc")
        return Image(argv, self._filters, tuple(paths), tuple(preload))

    def _require_launcher(self) -> LauncherProcess:
        with self._condition:
            if not self._filters:
                self._filters = {name: build_filter(name) for name in FILTER_NAMES}
            if self._launcher is not None and self._launcher.ended():
                while self._spares:  # they ended with it
                    self._spares.popleft().close()
                self._launcher.close()
                self._launcher = None
            if self._launcher is None:
                self._launcher = LauncherProcess(
                    find_bubblewrap(), find_interpreter(self.config.interpreter)[0], find_toolchains()
                )
            return self._launcher

    def delegation(self) -> str:
        """What control groups hold here, or why there are none."""
        return self._require_launcher().delegation

    def shared(self, name: str, build: Callable[[Path], None]) -> None:
        """Makes SHARED/`name` in the containers, once: `build` fills its folder with what every candidate may read.

        Raises:
          InfrastructureError: that failed; the next call tries again.
        """
        launcher = self._require_launcher()
        with launcher.building:
            folder = launcher.shared / name
            if not folder.exists():
                partial = launcher.shared / f".{name}"
                try:
                    partial.mkdir()
                    build(partial)
                    make_readable(partial)
                    partial.rename(folder)
                except (OSError, subprocess.SubprocessError) as error:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise InfrastructureError(f"making {SHARED}/{name}: {error!r}") from error

    def close(self) -> None:
        """Drops what waits, waits for runs in progress, then ends every process. Calling it again does nothing."""
        if os.getpid() != self._owner:
            return
        with self._condition:
            if self._closed:
                return
            self._closed = True
            waiting, self._queue = self._queue, []
            for _, _, submission, _, _ in waiting:
                submission.cancel()
            self._condition.notify_all()
            while len(self._places) < self.config.slots:
                self._condition.wait()
        for worker in self._workers:
            worker.join()
        for place in self._places:
            place.discard()
        while self._spares:
            self._spares.popleft().close()
        self.artifacts.close()
        if self._launcher is not None:
            self._launcher.close()
