"""Faults on purpose: every task gets its right verdict or "infra_error", none is lost, and nothing is left behind.

By default some sixty runs of the storm; `slow` has a thousand, in both modes.
"""

import glob
import json
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

from rl_posttrain.sandbox import processes, session, slot
from rl_posttrain.sandbox.job import InfrastructureError
from rl_posttrain.sandbox.judge import judge, submit
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.session import Session

ROOT = Path(__file__).resolve().parents[2]
GOOD = "def solve(n): return n + 1"
TESTS = FunctionTests("solve", (Call((1,), 2),))
LIMITS = Limits(cpu_seconds=2.0, wall_seconds=3.0)
SECONDS = 20.0


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
    """Submits tasks while faults strike, `seconds` apart; the statuses that were neither right nor "infra_error"."""
    chance, struck, over = random.Random(0), [], threading.Event()
    with Pool(config) as pool:

        def work():
            while not over.wait(seconds) and len(struck) < strikes:
                fault = FAULTS[len(struck) % len(FAULTS)]
                if strike(pool, fault, chance):
                    struck.append(fault)

        assert judge(pool, GOOD, TESTS).passed
        thread = threading.Thread(target=work)
        thread.start()
        todo = tasks(count)
        futures = [submit(pool, code, tests) for code, tests, _ in todo]
        statuses = [future.result(SECONDS + count).status for future in futures]
        over.set()
        thread.join()
        assert len(struck) >= min(strikes, len(FAULTS))  # each of them, before the tasks were through
        for _ in range(4):  # stopped fork servers are found out one by one
            if judge(pool, GOOD, TESTS).passed:
                break
        assert all(judge(pool, GOOD, TESTS).passed for _ in range(4))  # it works as before
    return [(status, right) for status, (_, _, right) in zip(statuses, todo, strict=True) if status != right]


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


@pytest.mark.parametrize("runs_per_slot", [1000, 1])
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


# ---- resources of this process ----

EXHAUSTED = """
import json, os, resource, sys
from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import Call, FunctionTests
from rl_posttrain.sandbox.pool import Pool, PoolConfig
tests = FunctionTests("solve", (Call((1,), 2),))
def verdict(pool):
    try:
        return judge(pool, "def solve(n): return n + 1", tests).status
    except SandboxUnavailable:
        return "unavailable"
def spend(free):
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for descriptor in held[len(held) - free:]:
            os.close(descriptor)
        return held[:len(held) - free]
def with_free(pool, free, fresh):
    if fresh:
        for place in pool._places:
            place.discard()
    held = spend(free)
    try:
        return verdict(pool)
    finally:
        for descriptor in held:
            os.close(descriptor)
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
first = []
before = len(os.listdir("/proc/self/fd"))
for free in (0, 1, 2, 3, 5, 8):
    with Pool(PoolConfig(slots=1)) as pool:
        first += [with_free(pool, free, False), verdict(pool)]
after = len(os.listdir("/proc/self/fd"))
with Pool(PoolConfig(slots=1)) as pool:
    working = verdict(pool)
    start = len(os.listdir("/proc/self/fd"))
    runs = [with_free(pool, free, fresh) for fresh in (False, True) for free in range(0, 18)]
    last = verdict(pool)
    end = len(os.listdir("/proc/self/fd"))
print(json.dumps([first, before, after, working, runs, last, start, end]))
"""


def run_script(script, folder, *arguments, command=()):
    """The JSON that a Python script prints on its last line, with temporary files in `folder`."""
    done = subprocess.run(
        [*command, sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": folder},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_descriptors_that_run_out_are_infra_errors(folder):
    first, before, after, working, runs, last, start, end = run_script(EXHAUSTED, folder)
    assert set(first[::2]) <= {"unavailable", "infra_error"}
    assert set(first[1::2]) == {"pass"}  # as soon as there are some again
    assert after == before
    assert working == last == "pass"
    assert set(runs) == {"infra_error", "pass"}
    assert end == start
    assert glob.glob(f"{folder}/sandbox-*") == []


FULL = """
import json, os, sys
from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests
from rl_posttrain.sandbox.pool import Pool, PoolConfig
folder = os.environ["TMPDIR"]
tests = FunctionTests("solve", (Call((1,), 2),))
def verdict(pool, language="python"):
    try:
        if language == "cpp":
            code = "#include <bits/stdc++.h>\\nint main() { std::cout << 42; }"
            return judge(pool, code, StdioTests((("", "42"),)), language="cpp").status
        return judge(pool, "def solve(n): return n + 1", tests).status
    except SandboxUnavailable:
        return "unavailable"
def fill():
    made = []
    try:
        while True:
            made.append(f"{folder}/filler{len(made)}")
            with open(made[-1], "wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
    except OSError:
        pass
    try:
        while True:
            made.append(f"{folder}/filler{len(made)}")
            open(made[-1], "x").close()
    except OSError:
        return made[:-1]
with Pool(PoolConfig(slots=1)) as pool:
    found = [verdict(pool)]
    made = fill()
    full = [verdict(pool), verdict(pool, "cpp")]
    pool._places[0].discard()
    full.append(verdict(pool))
    pool._launcher._process.kill()
    pool._launcher._process.wait()
    full += [verdict(pool), verdict(pool)]
    with Pool(PoolConfig(slots=1)) as other:
        full.append(verdict(other))
    for path in made:
        os.remove(path)
    found += [verdict(pool), verdict(pool, "cpp")]
print(json.dumps([found, full, os.listdir(folder)]))
"""


def test_a_full_disk_is_an_infra_error(folder):
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("only root can mount a small disk to fill, with `unshare` of util-linux")
    mount = 'mount -t tmpfs -o size=200m,nr_inodes=100,mode=755 none $0 && exec "$@"'
    found, full, left = run_script(FULL, folder, command=("unshare", "--mount", "sh", "-c", mount, folder))
    assert found == ["pass", "pass", "pass"]
    assert set(full) <= {"pass", "infra_error", "unavailable"}
    assert full[0] == "pass"  # what is there goes on working
    assert left == []


def test_processes_that_run_out_are_infra_errors(nothing_left):
    with Pool(PoolConfig(slots=1)) as pool:
        assert judge(pool, GOOD, TESTS).passed
        launcher = pool._require_launcher()
        if launcher.groups is None or "pids" not in launcher.groups.holds:
            pytest.skip("no control group that limits processes is ours to make")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "SLOT_TASKS", 3 - Limits().processes)  # bubblewrap twice and the fork server
            verdict = judge(pool, GOOD, TESTS)
        assert verdict.status == "infra_error" and "Errno 11" in verdict.detail
        assert judge(pool, GOOD, TESTS).passed


def test_what_all_candidates_share_is_built_again_after_a_failure(nothing_left):
    """As when the disk was full in the midst of it."""

    def fail(target):
        (target / "half").write_text("")
        raise OSError(28, "No space left on device")

    with Pool(PoolConfig(slots=1)) as pool:
        for _ in range(2):
            with pytest.raises(InfrastructureError, match="No space left"):
                pool.shared("thing", fail)
        pool.shared("thing", lambda target: (target / "whole").touch())
        code = "import os\ndef solve(n): return os.listdir('/shared/thing')"
        assert judge(pool, code, FunctionTests("solve", (Call((1,), ["whole"]),))).passed


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


@pytest.mark.parametrize("runs_per_slot", [1000, 1])
@pytest.mark.parametrize("lines", [1, 3, 12])
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
