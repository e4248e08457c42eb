"""Faults on purpose: every task gets its right verdict or "infra_error", none is lost, and nothing is left behind.

By default some sixty runs of the storm; `slow` has a thousand, in both modes.
"""

import glob
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rl_posttrain.sandbox import launch, processes, session, slot
from rl_posttrain.sandbox.judge import judge, submit
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.session import Session

ROOT = Path(__file__).resolve().parents[2]
GOOD = "def solve(n): return n + 1"
TESTS = FunctionTests("solve", (Call((1,), 2),))
LIMITS = Limits(cpu_seconds=2.0, wall_seconds=3.0)
SECONDS = 120.0


@pytest.fixture
def folder(monkeypatch):
    """A folder for temporary files that the sandbox's user can enter, in place of the machine's."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o755)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield folder
    shutil.rmtree(folder)


def groups(pid):
    """Control groups that the process has made."""
    return glob.glob(f"/sys/fs/cgroup/**/rl_posttrain-{pid}-*", recursive=True)


def living(pid):
    """Processes below `pid` that have not ended."""
    found = []
    for child in processes.descendants(pid):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it ended meanwhile
            continue
        found += [child] * (state not in ("Z", "X"))
    return found


def wait_for(condition, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def nothing_left(folder):
    """Checks, after the test, that processes, descriptors, folders and control groups are those of before."""
    own, before = set(living(os.getpid())), len(os.listdir("/proc/self/fd"))
    yield folder
    wait_for(lambda: set(living(os.getpid())) <= own, 20)
    assert len(os.listdir("/proc/self/fd")) == before
    assert glob.glob(f"{folder}/sandbox-*") == []
    assert groups(os.getpid()) == []


# ---- killing and stopping ----


def strike(pool, fault, chance, containers=None):
    """Does `fault` to one process of the pool (of these containers) that is there. Whether there was one.

    The process is held by a descriptor and looked at again before the signal: its number may be another's by then.
    """
    launcher = pool._launcher
    if launcher is None or launcher.ended():
        return False
    root = launcher._process.pid
    if containers is None:
        containers = [pid for pid in processes.descendants(root) if parent(pid) == root]
    if fault == "launcher":
        victims = [root]
    elif fault == "container":
        victims = containers
    else:
        place = {"fork server": 1, "stopped fork server": 1, "pid 1": 2}[fault]
        victims = [tree[place] for pid in containers if len(tree := processes.descendants(pid)) > place]
    if not victims:
        return False
    victim = chance.choice(victims)
    handle = -1
    try:
        handle = os.pidfd_open(victim)
        if victim not in processes.descendants(os.getpid()):
            return False
        signal.pidfd_send_signal(handle, signal.SIGSTOP if fault.startswith("stopped") else signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def tasks(count):
    """(code, tests, right status), none of which a fault may turn into another."""
    kinds = (
        (GOOD, TESTS, "pass"),
        ("def solve(n): return n", TESTS, "wrong"),
        ("def solve(n): return 1 / 0", TESTS, "error"),
        ("import time\ndef solve(n):\n    time.sleep(0.05)\n    return n + 1", TESTS, "pass"),
        ("print(int(input()) + 1)", StdioTests((("1", "2"), ("5", "6"))), "pass"),
        ("import os; print(2, flush=True); os.kill(os.getpid(), 9)", StdioTests((("1", "2"),)), "error"),
        ("print(1)", StdioTests((("1", "2"),)), "wrong"),
    )
    return [kinds[number % len(kinds)] for number in range(count)]


FAULTS = ("fork server", "container", "pid 1", "launcher", "stopped fork server")


def storm(config, count, strikes, seconds):
    """Judges `count` tasks, or more, until all faults have struck, `seconds` apart; the wrong (status, right one).

    Also checks that the pool works afterwards.
    """
    chance, struck, found = random.Random(0), [], []
    with Pool(config) as pool:

        def work():
            while len(struck) < strikes:
                time.sleep(seconds)
                fault = FAULTS[len(struck) % len(FAULTS)]
                if strike(pool, fault, chance):
                    struck.append(fault)

        assert judge(pool, GOOD, TESTS).passed
        thread = threading.Thread(target=work)
        thread.start()
        while len(found) < count or thread.is_alive():
            todo = tasks(20)
            futures = [submit(pool, code, tests) for code, tests, _ in todo]
            found += [
                (future.result(SECONDS).status, right) for future, (_, _, right) in zip(futures, todo, strict=True)
            ]
        thread.join()
        for _ in range(4):  # stopped fork servers are found out one by one
            if judge(pool, GOOD, TESTS).passed:
                break
        assert all(judge(pool, GOOD, TESTS).passed for _ in range(4))
    return [(status, right) for status, right in found if status != right]


def test_no_fault_makes_a_wrong_verdict(nothing_left, monkeypatch):
    monkeypatch.setattr(session, "KILL_SECONDS", 1.0)  # until a stopped fork server is given up,
    monkeypatch.setattr(slot, "START_SECONDS", 5.0)  # and one that is stopped while it starts
    config = PoolConfig(slots=2, limits=Limits(cpu_seconds=2.0, wall_seconds=1.0))
    wrong = storm(config, 60, strikes=5, seconds=0.15)
    assert {status for status, _ in wrong} <= {"infra_error"}
    assert len(wrong) < 20


@pytest.mark.slow
@pytest.mark.parametrize("runs_per_slot", [1000, 1])
def test_no_fault_makes_a_wrong_verdict_in_a_thousand_runs(nothing_left, monkeypatch, runs_per_slot):
    monkeypatch.setattr(session, "KILL_SECONDS", 1.0)
    monkeypatch.setattr(slot, "START_SECONDS", 5.0)
    config = PoolConfig(slots=2, runs_per_slot=runs_per_slot, limits=LIMITS)
    wrong = storm(config, 1000, strikes=100, seconds=0.1)
    assert {status for status, _ in wrong} <= {"infra_error"}
    assert len(wrong) < 200


@pytest.mark.parametrize("runs_per_slot", [1000, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_a_fault_interrupts_is_repeated(nothing_left, monkeypatch, fault, runs_per_slot):
    original, struck = Session.ask, []

    def ask(self, question):
        """Strikes while the first run waits for its first question."""
        if not struck:
            struck.append(self._pid)
            wait_for(lambda: len(processes.descendants(self._pid)) > session.PERMANENT)
            assert strike(pool, fault, random.Random(0), [self._pid])
        return original(self, question)

    monkeypatch.setattr(session, "KILL_SECONDS", 0.5)
    monkeypatch.setattr(Session, "ask", ask)
    limits = Limits(cpu_seconds=2.0, wall_seconds=2.0)
    code = "import time\ndef solve(n):\n    time.sleep(0.3)  # the fault is noticed meanwhile\n    return n + 1"
    with Pool(PoolConfig(slots=1, runs_per_slot=runs_per_slot, limits=limits)) as pool:
        assert judge(pool, code, TESTS).passed
        assert judge(pool, GOOD, TESTS).passed
        found = pool.statistics()
    # A run does not need its stopped fork server any more, which the next run finds out, unless it is elsewhere.
    retries = 0 if fault == "stopped fork server" and runs_per_slot == 1 else 1
    assert (found["retries"], found["infra_errors"]) == (retries, 0)


def test_a_launcher_that_does_not_answer_is_replaced(nothing_left, monkeypatch):
    monkeypatch.setattr(launch, "ANSWER_SECONDS", 1.0)
    with Pool(PoolConfig(slots=1)) as pool:
        assert judge(pool, GOOD, TESTS).passed
        pool._require_launcher()._process.send_signal(signal.SIGSTOP)
        assert judge(pool, GOOD, TESTS).passed  # what serves needs no launcher
        pool._places[-1].discard()
        assert judge(pool, GOOD, TESTS).passed
        found = pool.statistics()
        assert (found["retries"], found["infra_errors"]) == (1, 0)


# ---- the trainer's own end ----

TRAINER = """
import sys, threading
from rl_posttrain.sandbox.judge import submit
from rl_posttrain.sandbox.kinds import Call, FunctionTests
from rl_posttrain.sandbox.pool import Pool, PoolConfig
pool = Pool(PoolConfig(slots=2, pending=8, runs_per_slot=int(sys.argv[1])))
tests = FunctionTests("solve", (Call((1,), 2),))
def done(future):
    if not future.cancelled():
        print(future.result().status, flush=True)
def work():
    while True:
        submit(pool, "import time\\ntime.sleep(0.01)\\ndef solve(n): return n + 1", tests).add_done_callback(done)
threads = [threading.Thread(target=work) for _ in range(2)]
print("start", flush=True)
for thread in threads: thread.start()
"""


@pytest.mark.parametrize(
    ("lines", "runs_per_slot"),
    [(12, 1000), (1, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1000), (3, 1000), (12, 1)))],
)
def test_nothing_survives_a_trainer_that_is_killed_while_it_submits(folder, lines, runs_per_slot):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(runs_per_slot)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": folder},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    try:
        said = [trainer.stdout.readline() for _ in range(lines)]
        wait_for(lambda: living(trainer.pid))
        started = living(trainer.pid)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    assert said == ["start\n", *["pass\n"] * (lines - 1)]
    handles = [pid for pid in started if os.path.exists(f"/proc/{pid}")]
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}/fd") for pid in handles), 30)
    wait_for(lambda: glob.glob(f"{folder}/sandbox-*") == [], 30)
    with Pool(PoolConfig(slots=1)) as pool:  # the next one removes the empty control groups of the dead
        assert judge(pool, GOOD, TESTS).passed
    assert groups(trainer.pid) == []
