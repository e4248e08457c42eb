"""What /proc tells about the processes of a slot."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_posttrain.sandbox import processes
from rl_posttrain.sandbox.processes import available, descendants, memory_bytes, waited_seconds

# A child of the main thread, a child of another thread, a grandchild. Says their pids, then waits.
FAMILY = """
import os, sys, threading, time
def start(then=lambda: None):
    pid = os.fork()
    if pid == 0:
        then()
        time.sleep(600)
    return pid
read, write = os.pipe()
def with_child():
    os.write(write, str(start()).encode())
first = start(with_child)
grandchild = int(os.read(read, 32))
made = []
def work():
    made.append(start())
    time.sleep(600)  # children of a thread that ended belong to the main one
threading.Thread(target=work, daemon=True).start()
while not made:
    time.sleep(0.001)
print(first, grandchild, made[0], flush=True)
time.sleep(600)
"""

# Takes memory of another kind at each signal.
HOLDER = """
import mmap, signal
signals = [signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
def pause():
    print("ready", flush=True)
    signal.sigwait(signals)
pause()
anonymous = bytearray(b"x") * (64 << 20)
pause()
shared = mmap.mmap(-1, 32 << 20)
for page in range(0, 32 << 20, 4096):
    shared[page] = 1
pause()
file = open({path!r}, "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
mapped.find(b"y")
pause()
signal.pause()
"""


@pytest.fixture
def start():
    """Starts a Python program; it and everything below it ends with the test."""
    started = []

    def start(source):
        command = [sys.executable, "-I", "-S", "-c", source]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.communicate()


def line(process):
    assert process.stdout is not None
    return process.stdout.readline().split()


def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("children_file", [True, False])
def test_descendants_of_every_thread_and_generation(start, monkeypatch, children_file):
    if children_file and not os.path.exists("/proc/thread-self/children"):
        pytest.skip("this kernel has no /proc/<pid>/task/<tid>/children")
    family = start(FAMILY)
    first, grandchild, second = map(int, line(family))
    if not children_file:
        exists = os.path.exists
        monkeypatch.setattr(os.path, "exists", lambda path: not path.endswith("/children") and exists(path))
    found = descendants(family.pid)
    assert sorted(found) == sorted([first, grandchild, second])
    assert found.index(first) < found.index(grandchild)
    assert descendants(first) == [grandchild]
    assert family.pid in descendants(os.getpid())


@pytest.mark.parametrize("name", ["sh", "a b", ") S 1 (", "(x) Z 999", "\n5 5 5"])
def test_scan_is_not_fooled_by_program_names(monkeypatch, tmp_path, name):
    """A made-up /proc without `children` files."""
    for pid, parent, called in ((10, 1, "bwrap"), (11, 10, name), (12, 11, "python"), (13, 1, "other")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({called}) S {parent} {pid} {pid} 0 -1\n")
    (tmp_path / "14").mkdir()  # it has just ended
    (tmp_path / "meminfo").write_text("")
    monkeypatch.setattr(processes, "PROC", str(tmp_path))
    assert descendants(10) == [11, 12]


def test_a_process_that_ended_counts_as_nothing(start):
    living = start("import time; print(1, flush=True); time.sleep(600)")
    line(living)
    ended = gone()
    assert descendants(ended) == []
    assert memory_bytes([ended]) == 0
    assert waited_seconds([ended]) == 0.0
    assert memory_bytes([ended, living.pid]) == memory_bytes([living.pid]) > 0


def test_zombies_are_found_and_hold_no_memory(start):
    parent = start(
        "import os, time\npid = os.fork()\nif pid == 0: os._exit(0)\n"
        "os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\nprint(pid, flush=True)\ntime.sleep(600)"
    )
    zombie = int(line(parent)[0])
    assert descendants(parent.pid) == [zombie]
    assert memory_bytes([zombie]) == 0


def test_memory_is_anonymous_and_shared_but_not_files(start, tmp_path):
    big = tmp_path / "big"
    big.write_bytes(b"x" * (48 << 20))
    holder = start(HOLDER.format(path=str(big)))
    sizes = []
    for _ in range(4):
        line(holder)
        sizes.append(memory_bytes([holder.pid]))
        os.kill(holder.pid, signal.SIGUSR1)
    anonymous, shared, file = (after - before for before, after in zip(sizes, sizes[1:]))
    assert 64 << 20 <= anonymous < 70 << 20
    assert 32 << 20 <= shared < 38 << 20
    assert file < 8 << 20
    assert memory_bytes([holder.pid, holder.pid]) == 2 * sizes[-1]


def test_waiting_for_a_processor_is_told_from_sleeping(start):
    if "schedstat" in (available() or ""):
        pytest.skip(str(available()))
    core = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, [{core}])\nprint(1, flush=True)\nwhile True: pass"
    rivals = [start(busy) for _ in range(2)]
    sleeper = start("import time; print(1, flush=True); time.sleep(600)")
    for process in (*rivals, sleeper):
        line(process)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{sleeper.pid}/stat").read_text().split()[2] != "S":
        assert time.monotonic() < deadline
    slept = waited_seconds([sleeper.pid])
    while min(waited_seconds([rival.pid]) for rival in rivals) < 0.2:
        assert time.monotonic() < deadline, "two busy processes on one processor do not wait for each other"
        time.sleep(0.02)
    assert waited_seconds([sleeper.pid]) == slept
    pids = [rival.pid for rival in rivals]
    assert waited_seconds([*pids, sleeper.pid]) >= 0.2


def test_available_here():
    text = available()
    if text is not None:
        pytest.skip(text)
    assert os.path.exists("/proc/thread-self/children")


def test_available_says_what_is_missing_and_what_follows(monkeypatch, tmp_path):
    """A made-up /proc."""
    monkeypatch.setattr(processes, "PROC", str(tmp_path))
    assert "mount a proc file system" in str(available())
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name:\tx\nVmRSS:\t 12 kB\n")
    (tmp_path / "self" / "schedstat").write_text("0 0 0\n")  # as where it is switched off
    text = str(available())
    assert "RssAnon" in text and "CONFIG_PROC_CHILDREN" in text and "CONFIG_SCHED_INFO" in text
    (tmp_path / "self" / "status").write_text("Name:\tx\nRssAnon:\t 12 kB\nRssShmem:\t 0 kB\n")
    (tmp_path / "self" / "schedstat").write_text("123 0 7\n")
    (tmp_path / "thread-self").mkdir()
    (tmp_path / "thread-self" / "children").write_text("")
    assert available() is None
