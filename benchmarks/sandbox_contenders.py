"""Ways to run a candidate against its tests, each in a host process of its own: ours, and what it is compared with.

    command          a new process per run: a bare interpreter, or bubblewrap and an interpreter
    multiprocessing  what most stacks do: fork the trainer, `exec` the candidate and its asserts, join with a time-out
    pool             ours

All hosts measure alike, and a host's memory can be enlarged, as a trainer's is. Standard library and ours only: a
host that forks, or that changes its user, has to be small. `python -m benchmarks.sandbox_contenders JSON` is the
host; `Host` talks to it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rl_posttrain.sandbox.bubblewrap import find_bubblewrap, find_interpreter, system_directories
from rl_posttrain.sandbox.judge import submit
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.types import Verdict

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534
TIMEOUT_SECONDS = 60.0  # of a run that should take milliseconds
PAGE_BYTES = 4096
CALLS = tuple(((i, i + 1), 2 * i + 1) for i in range(5))
ADD = "def add(a, b):\n    return a + b\n"
MODULES = (
    "math json collections itertools functools re heapq bisect random string typing dataclasses datetime decimal "
    "fractions operator copy statistics"
).split()
IMPORTS = f"import {', '.join(MODULES)}\n\n\n{ADD}"
NUMPY = "import numpy\n\n\ndef add(a, b):\n    return int(numpy.add(a, b))\n"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
Submit = Callable[[], Future[Any]]


@dataclass(frozen=True)
class Contender:
    """One way to run one candidate."""

    kind: str  # "command", "multiprocessing" or "pool"
    source: str  # the candidate
    workers: int = 2  # runs at one time
    argv: Sequence[str] = ()  # of a command
    runs_per_slot: int = 1000  # of a pool
    packages: str | None = None  # of a pool: a folder of packages, ...
    preload: Sequence[str] = ()  # ... and those of them that are imported once per slot
    output: str | None = None  # of a pool: the candidate is a program that prints this, instead of the function `add`
    ballast_mb: int = 0  # memory that the host holds besides its own, every page of it touched


def with_asserts(source: str) -> str:
    """The candidate followed by its tests, for graders that run both in one process."""
    return source + "".join(f"assert add{arguments} == {expected}\n" for arguments, expected in CALLS)


def bare_command(program: str) -> tuple[str, ...]:
    """The interpreter alone, without any isolation."""
    return (find_interpreter()[0], "-I", "-S", "-c", program)


def bubblewrap_command(program: str, packages: str | None = None) -> tuple[str, ...]:
    """A new container for the interpreter: own namespaces, no network, tmpfs at /tmp, the system read-only."""
    interpreter, binds = find_interpreter()
    command = [find_bubblewrap(), "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", *system_directories(), *binds]
    command += ["--dev", "/dev", "--size", str(4 << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    command += ["--size", str(32 << 20), "--tmpfs", "/tmp", "--clearenv", "--cap-drop", "ALL"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    if packages is not None:
        command += ["--ro-bind", packages, "/packages"]
        program = f"import sys\nsys.path.insert(0, '/packages')\n{program}"
    return (*command, "--remount-ro", "/", interpreter, "-I", "-S", "-c", program)


# ---- measuring, in the host ----


def check(result: Verdict | bool) -> None:
    """Raises RuntimeError for a run that did not pass: a speed means nothing then."""
    passed = result.passed if isinstance(result, Verdict) else result
    if not passed:
        raise RuntimeError(f"a right candidate did not pass: {result}")


def runs_per_second(submit_one: Submit, seconds: float, depth: int) -> float:
    """Runs per second while `depth` of them are in flight throughout: without the first ones and the last.

    Raises:
      RuntimeError: a run failed, or too few were done in `seconds`.
    """
    finished: list[float] = []
    free = threading.Semaphore(depth)
    futures = []

    def done(_: Future) -> None:
        finished.append(time.perf_counter())
        free.release()

    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        free.acquire()
        futures.append(submit_one())
        futures[-1].add_done_callback(done)
    for future in futures:
        check(future.result(TIMEOUT_SECONDS))
    # What was prepared beforehand, as warm containers are, is used up by the first `depth`.
    counted = [moment for moment in sorted(finished)[depth - 1 :] if moment <= end]
    if len(counted) < 3:
        raise RuntimeError(f"{len(finished)} runs in {seconds} s are too few to measure: give more --seconds")
    return (len(counted) - 1) / (counted[-1] - counted[0])


def latencies(submit_one: Submit, count: int, interval: float | None) -> list[float]:
    """Seconds from a run's arrival to its verdict. `interval`: between arrivals; None: each after the one before."""
    taken: list[float] = []
    done = threading.Semaphore(0)  # a future's result is there before its callbacks have run
    started = time.perf_counter()

    def finish(due: float) -> None:
        taken.append(time.perf_counter() - due)
        done.release()

    futures = []
    for index in range(count):
        due = time.perf_counter()
        if interval is not None:
            due = started + index * interval
            time.sleep(max(0.0, due - time.perf_counter()))
        futures.append(submit_one())
        futures[-1].add_done_callback(lambda _, due=due: finish(due))
        if interval is None:
            check(futures[-1].result(TIMEOUT_SECONDS))
    for future in futures:
        check(future.result(TIMEOUT_SECONDS))
        done.acquire()
    return taken


# ---- the contenders ----


def run_command(argv: Sequence[str]) -> bool:
    """Whether a new process ends with exit code 0."""
    run = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=ENVIRONMENT, cwd="/")
    return run.returncode == 0


def run_in_fork(source: str) -> bool:
    """A minimal grader of the usual kind. A candidate can forge its verdict: it is here for its speed."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_execute, args=(source, sender))
    process.start()
    sender.close()
    process.join(TIMEOUT_SECONDS)
    with receiver:
        try:
            if receiver.poll():  # rather than is_alive, which another thread's start may confuse
                return receiver.recv() == "passed"
        except EOFError:  # it ended without a word
            return False
    process.kill()
    process.join()
    return False


def _execute(source: str, sender: Any) -> None:
    try:
        exec(source, {})
        sender.send("passed")
    except BaseException as error:
        sender.send(f"failed: {error!r}")


@contextlib.contextmanager
def opened(contender: Contender) -> Iterator[Submit]:
    """What starts one run of the contender."""
    if contender.kind == "pool":
        config = PoolConfig(
            slots=contender.workers,
            runs_per_slot=contender.runs_per_slot,
            packages=contender.packages,
            preload=tuple(contender.preload),
        )
        tests: FunctionTests | StdioTests = FunctionTests("add", tuple(Call(*call) for call in CALLS))
        if contender.output is not None:
            tests = StdioTests((("", contender.output),))
        with Pool(config) as pool:
            yield lambda: submit(pool, contender.source, tests)
        return
    run: tuple[Callable[..., bool], Any] = (run_in_fork, with_asserts(contender.source))
    if contender.kind == "command":
        run = (run_command, contender.argv)
        if os.geteuid() == 0:  # once, here: a process that drops root for each run is started by a slower path
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
    with ThreadPoolExecutor(contender.workers) as executor:
        yield lambda: executor.submit(*run)


def serve(contender: Contender, questions: TextIO, answers: TextIO) -> None:
    """The host: answers measurements until its questions end."""
    ballast = bytearray(contender.ballast_mb << 20)
    ballast[::PAGE_BYTES] = b"\1" * len(range(0, len(ballast), PAGE_BYTES))
    with opened(contender) as submit_one:
        for future in [submit_one() for _ in range(2 * contender.workers)]:
            check(future.result(TIMEOUT_SECONDS))
        answer: Any = "ready"
        while True:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            line = questions.readline()
            if not line:
                return
            name, arguments = json.loads(line)
            if name == "runs_per_second":
                answer = runs_per_second(submit_one, *arguments, depth=4 * contender.workers)
            else:
                answer = latencies(submit_one, *arguments)


class Host:
    """A contender's process. Close it, or use it in a `with` block."""

    def __init__(self, contender: Contender) -> None:
        """Returns when a few runs have passed.

        Raises:
          RuntimeError: they have not; the process's own words are on stderr.
        """
        self._contender = contender
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sandbox_contenders", json.dumps(asdict(contender))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def runs_per_second(self, seconds: float) -> float:
        """Throughput over about `seconds`, with all workers busy."""
        return self._ask("runs_per_second", seconds)

    def latencies(self, count: int, interval: float | None = None) -> list[float]:
        """Seconds of each of `count` runs that arrive every `interval` seconds, or one after another."""
        return self._ask("latencies", count, interval)

    def _ask(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"the host of {self._contender} ended with exit code {code}; its words are above")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process and waits for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    contender = Contender(**json.loads(sys.argv[1]))
    serve(contender, sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
