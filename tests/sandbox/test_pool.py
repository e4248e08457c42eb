"""Pools: isolation of runs, recycling, faults of the sandbox itself, and that nothing outlives them."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rl_posttrain.sandbox import pool as pool_module
from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable
from rl_posttrain.sandbox.job import InfrastructureError
from rl_posttrain.sandbox.judge import judge, judge_many
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.slot import Slot

ROOT = Path(__file__).resolve().parents[2]
GOOD = "def solve(n): return n + 1"
TESTS = FunctionTests("solve", (Call((1,), 2),))


def value_of(pool, expression, setup=""):
    """What an expression gives inside a run, as text."""
    verdict = judge(pool, f"{setup}\nprint({expression}, end='')", StdioTests((("", "?"),)))
    assert verdict.executions[0].status == "ok", verdict
    return verdict.executions[0].stdout


def descendants(pid):
    """Every living process below `pid`."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended in the meantime
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, queue = [], [pid]
    while queue:
        queue += children.get(queue[0], [])
        found += children.get(queue.pop(0), [])
    return found


def alive(pids):
    """Those of `pids` that have not ended."""
    states = []
    for pid in pids:
        try:
            states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            states.append("gone")
    return [pid for pid, state in zip(pids, states, strict=True) if state not in ("gone", "Z")]


def wait_until_dead(pids, seconds=20.0):
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive(pids)


@pytest.fixture(scope="module")
def pool():
    with Pool(PoolConfig(slots=1)) as pool:
        yield pool


# ---- isolation ----


def test_namespaces_are_fresh_and_small(pool):
    for _ in range(2):
        assert value_of(pool, "os.getpid(), os.getppid()", "import os") == "2 1"
        assert value_of(pool, "os.listdir('/tmp')", "import os") == "[]"
        value_of(pool, "0", "open('/tmp/left', 'w').write('x')")
    assert value_of(pool, "os.uname().nodename", "import os") == "sandbox"


def test_the_file_system_is_read_only_and_holds_the_system_alone(pool):
    names = value_of(pool, "sorted(os.listdir('/'))", "import os")
    assert set(eval(names)) <= {
        "bin",
        "dev",
        "etc",
        "harness",
        "lib",
        "lib32",
        "lib64",
        "sbin",
        "shared",
        "tmp",
        "toolchains",
        "usr",
    }
    setup = """
import os
def writable(folder):
    try: open(folder + '/x', 'w'); return True
    except OSError: return False
"""
    for folder in ("/", "/dev", "/dev/shm", "/usr", "/usr/lib", "/etc", "/harness"):
        assert value_of(pool, f"writable({folder!r})", setup) == "False", folder
    assert value_of(pool, "writable('/tmp')", setup) == "True"


def test_no_user_no_capability_no_environment(pool):
    assert value_of(pool, "os.getuid() == 0", "import os") == "False"
    status = "ctypes.CDLL(None).prctl(23, 21, 0, 0, 0), ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)"
    assert value_of(pool, status, "import ctypes") == "0 1"  # CAP_SYS_ADMIN not in bounds; no_new_privs
    names = value_of(pool, "sorted(os.environ)", "import os")
    known = {"HOME", "LANG", "MALLOC_ARENA_MAX", "PATH", "PWD", "PYTHONHASHSEED"}
    assert set(eval(names)) <= known


def test_no_network(pool):
    setup = """
import socket
def refused(*kind):
    try: socket.socket(*kind); return False
    except PermissionError: return True
"""
    kinds = "(2, 1), (2, 2), (10, 1), (1, 1), (16, 3), (17, 3)"
    assert value_of(pool, f"all(refused(*kind) for kind in ({kinds}))", setup) == "True"


def test_only_the_pipes_of_the_run_are_open(pool):
    setup = """
import os
def open_ones():
    found = []
    for fd in range(300):
        try: os.fstat(fd); found.append(fd)
        except OSError: pass
    return found
"""
    assert value_of(pool, "open_ones()", setup) == "[0, 1, 2, 4]"


def test_randomness_differs_between_runs_and_string_hashes_do_not(pool):
    assert value_of(pool, "random.random()", "import random") != value_of(pool, "random.random()", "import random")
    assert value_of(pool, "hash('a')") == value_of(pool, "hash('a')")


def test_a_run_does_not_see_an_earlier_runs_modules(pool):
    value_of(pool, "0", "import json; json.dumps = None; import builtins; builtins.left = 1")
    assert value_of(pool, "json.dumps, hasattr(builtins, 'left')", "import json, builtins").endswith("False")
    assert judge(pool, GOOD, TESTS).passed


def test_no_new_processes_unless_allowed(pool):
    code = "import subprocess\ndef solve(n): return subprocess.run(['/bin/true']).returncode + n + 1"
    refused = judge(pool, code, TESTS)
    assert refused.status == "error" and "PermissionError" in refused.detail
    assert judge(pool, code, TESTS, profile="multi").passed


# ---- life and death ----


def test_slots_are_recycled():
    with Pool(PoolConfig(slots=1, runs_per_slot=2)) as pool:
        pids = []
        for _ in range(4):
            assert judge(pool, GOOD, TESTS).passed
            pids.append(pool._places[-1]._slots["candidate"].pid)
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_nothing_starts_before_the_first_run_and_nothing_is_left_after_close():
    before = set(descendants(os.getpid()))
    pool = Pool(PoolConfig(slots=2))
    assert set(descendants(os.getpid())) == before
    verdicts = judge_many(pool, [(GOOD, TESTS)] * 4)
    assert all(verdict.passed for verdict in verdicts)
    started = set(descendants(os.getpid())) - before
    assert len(started) >= 4  # the launcher, bubblewrap twice, fork servers
    descriptors = len(os.listdir("/proc/self/fd"))
    pool.close()
    assert alive(sorted(started)) == []
    assert len(os.listdir("/proc/self/fd")) < descriptors
    pool.close()  # a second time does nothing
    with pytest.raises(RuntimeError, match="closed"):
        judge(pool, GOOD, TESTS)


def test_no_descriptor_is_leaked():
    with Pool(PoolConfig(slots=1)) as pool:
        judge(pool, GOOD, TESTS)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            judge(pool, GOOD, TESTS)
            judge(pool, "import os; os._exit(3)", TESTS)
        assert len(os.listdir("/proc/self/fd")) == before


TRAINER = """
import sys, threading, time
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import Call, FunctionTests
from rl_posttrain.sandbox.pool import Pool, PoolConfig
pool = Pool(PoolConfig(slots=1))
assert judge(pool, "def solve(n): return n + 1", FunctionTests("solve", (Call((1,), 2),))).passed
print("ready", flush=True)
judge(pool, "import time\\ntime.sleep(60)", FunctionTests("solve", (Call((1,), 2),)))
"""


def test_nothing_survives_the_trainers_death():
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
    time.sleep(0.3)  # the sleeping run is on its way
    started = descendants(trainer.pid)
    assert len(started) >= 4
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert wait_until_dead(started) == []


def test_a_pool_started_by_a_thread_outlives_the_thread():
    with Pool(PoolConfig(slots=1)) as pool:
        verdicts = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: verdicts.append(judge(pool, GOOD, TESTS)))
            thread.start()
            thread.join()
        slot = pool._places[-1]._slots["candidate"]
        assert all(verdict.passed for verdict in verdicts) and slot.runs == 2


def test_a_forked_copy_refuses_the_pool():
    with Pool(PoolConfig(slots=1)) as pool:
        pool._owner += 1  # what a fork looks like from inside
        with pytest.raises(RuntimeError, match="after fork"):
            judge(pool, GOOD, TESTS)
        pool._owner -= 1


# ---- faults of the sandbox ----


def killer(pool, stop, limit=None):
    """Kills the slot's container whenever there is one, `limit` times."""
    killed = set()
    while not stop.is_set() and (limit is None or len(killed) < limit):
        time.sleep(0.05)
        launcher = pool._launcher
        if launcher is None:
            continue
        for pid in descendants(launcher._process.pid):
            try:
                if pid not in killed and b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                    if limit is not None:
                        break
            except OSError:
                continue


BUSY = "import time\ndef solve(n):\n    time.sleep(0.6)\n    return n + 1"


def test_a_slot_that_dies_in_mid_run_is_replaced_and_the_run_repeated():
    with Pool(PoolConfig(slots=1)) as pool:
        assert judge(pool, GOOD, TESTS).passed
        stop = threading.Event()
        thread = threading.Thread(target=killer, args=(pool, stop, 1))
        thread.start()
        verdict = judge(pool, BUSY, TESTS)
        stop.set()
        thread.join()
        assert verdict.passed
        assert judge(pool, GOOD, TESTS).passed


def test_a_lasting_fault_is_an_infra_error_and_never_a_wrong_answer():
    with Pool(PoolConfig(slots=1)) as pool:
        assert judge(pool, GOOD, TESTS).passed
        stop = threading.Event()
        thread = threading.Thread(target=killer, args=(pool, stop))
        thread.start()
        verdict = judge(pool, BUSY, TESTS)
        stop.set()
        thread.join()
        assert verdict.status == "infra_error" and not verdict.passed and verdict.tests == ()
        assert verdict.executions[0].status == "infra_error"
        assert verdict.flags[0].name == "infra_error"
        assert judge(pool, GOOD, TESTS).passed  # the pool has recovered


def test_a_launcher_that_dies_is_replaced():
    with Pool(PoolConfig(slots=1)) as pool:
        assert judge(pool, GOOD, TESTS).passed
        launcher = pool._launcher._process.pid
        started = [launcher, *descendants(launcher)]
        pool._launcher._process.kill()
        pool._launcher._process.wait()
        assert judge(pool, GOOD, TESTS).passed
        assert wait_until_dead(started) == []


def test_a_fault_is_retried_exactly_once(monkeypatch):
    attempts = []

    def run(self, job, driver):
        attempts.append(self.pid)
        raise InfrastructureError("injected")

    with Pool(PoolConfig(slots=1)) as pool:
        monkeypatch.setattr(Slot, "run", run)
        assert judge(pool, GOOD, TESTS).status == "infra_error"
        assert len(attempts) == 2 and attempts[0] != attempts[1]


@pytest.mark.parametrize(
    ("script", "remedy"),
    [
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "Remedy"),
        ("exit 0", "Remedy"),
        (None, "apt-get install bubblewrap"),
    ],
)
def test_a_machine_without_a_working_sandbox_raises(monkeypatch, script, remedy):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        broken = Path(folder) / "bwrap"
        broken.write_text(f"#!/bin/sh\n{script}\n")
        broken.chmod(0o644 if script is None else 0o755)
        monkeypatch.setattr(pool_module, "find_bubblewrap", lambda: str(broken))
        with Pool(PoolConfig(slots=1)) as pool:
            for _ in range(2):
                with pytest.raises(SandboxUnavailable, match=remedy):
                    judge(pool, GOOD, TESTS)


def test_importing_the_sandbox_is_light():
    code = (
        "import sys, rl_posttrain.sandbox.judge\n"
        "heavy = {'jax', 'numpy', 'flax', 'pyseccomp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_limits_of_an_earlier_run_do_not_stay():
    """Neither in a slot nor in a control group that another slot had before."""
    threads = "import threading\ndef solve(n):\n    go = threading.Event()\n"
    threads += "    started = [threading.Thread(target=go.wait) for _ in range(12)]\n"
    threads += "    for thread in started: thread.start()\n    go.set()\n    return n + 1\n"
    for runs_per_slot in (1000, 1):
        with Pool(PoolConfig(slots=1, runs_per_slot=runs_per_slot)) as pool:
            for _ in range(4):
                assert judge(pool, GOOD, TESTS, profile="multi", limits=Limits(processes=1)).passed
                assert judge(pool, GOOD, TESTS, limits=Limits(processes=1)).passed
                assert judge(pool, threads, TESTS, limits=Limits(processes=16)).passed
                assert judge(pool, threads, TESTS, profile="multi", limits=Limits(processes=16)).passed
