"""Control groups: where ours may be made (on made-up trees), and what they hold (for real, where they can be made)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_posttrain.sandbox import cgroups
from rl_posttrain.sandbox.cgroups import Group, Hierarchy, find, hierarchies, places

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

# ---- made-up trees ----

SYSTEMD = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
SCOPE = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope"


def mount(root, folder, options, kind="cgroup"):
    return f"40 30 0:30 {root} {folder} rw,relatime shared:9 - {kind} cgroup rw,{options}\n"


def test_own_group_in_version_2():
    found = hierarchies(f"0::{SCOPE}\n", "20 1 0:20 / /proc rw - proc proc rw\n" + SYSTEMD)
    assert found == {"unified": Hierarchy("/sys/fs/cgroup", "/sys/fs/cgroup" + SCOPE)}
    assert hierarchies("0::/\n", SYSTEMD)["unified"].own == "/sys/fs/cgroup"


def test_own_groups_in_version_1():
    cgroup = "4:memory:/jobs/7\n3:cpu,cpuacct:/\n2:pids:/\n1:name=systemd:/\n0::/\n"
    mounts = mount("/", "/c/memory", "memory") + mount("/", "/c/cpu", "cpu,cpuacct") + mount("/", "/c/pids", "pids")
    assert hierarchies(cgroup, mounts) == {
        "memory": Hierarchy("/c/memory", "/c/memory/jobs/7"),
        "pids": Hierarchy("/c/pids", "/c/pids"),
        # not "cpu": a group there would also change how the processor is shared
    }
    alone = hierarchies("3:cpuacct:/\n", mount("/", "/c/cpuacct", "cpuacct"))
    assert alone == {"cpu": Hierarchy("/c/cpuacct", "/c/cpuacct")}


@pytest.mark.parametrize(
    ("root", "path", "own"),
    [
        ("/docker/1", "/docker/1", "/c d/memory"),  # a container that sees its own part
        ("/docker/1", "/docker/1/x", "/c d/memory/x"),
        ("/docker/1", "/docker/12", None),
        ("/docker/1", "/", None),
        ("/", "/../2", None),  # outside of the cgroup namespace
    ],
)
def test_own_group_below_another_root(root, path, own):
    found = hierarchies(f"4:memory:{path}\n", mount(root, r"/c\040d/memory", "memory"))
    assert found == ({} if own is None else {"memory": Hierarchy("/c d/memory", own)})


def tree(root, **controllers):
    """Folders with what they hand to their children; keys are paths with __ for /."""
    for name, handed in {"": "", **controllers}.items():
        folder = root / name.replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.subtree_control").write_text(handed + "\n")
        if name:
            (folder / "memory.max").write_text("max\n")


def usable(root, own):
    return [place for place, reason in places(Hierarchy(str(root), str(root / own))) if reason is None]


def test_nearest_group_that_hands_both_controllers_on_comes_first(tmp_path):
    tree(tmp_path, user="cpu memory pids", user__app="memory pids", user__app__run="")
    (tmp_path / "cgroup.subtree_control").write_text("cpuset cpu io memory pids\n")
    assert usable(tmp_path, "user/app/run") == [str(tmp_path / "user/app"), str(tmp_path / "user"), str(tmp_path)]
    (tmp_path / "user/app/cgroup.subtree_control").write_text("memory\n")
    assert usable(tmp_path, "user/app/run") == [str(tmp_path / "user"), str(tmp_path)]


def test_root_itself_can_be_ours(tmp_path):
    tree(tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("memory pids\n")
    assert usable(tmp_path, "") == [str(tmp_path)]


def test_a_memory_limit_that_was_set_for_us_is_never_left(tmp_path):
    tree(tmp_path, a="memory pids", a__b="memory pids", a__b__own="")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids\n")
    (tmp_path / "a/b/memory.max").write_text("1073741824\n")
    assert usable(tmp_path, "a/b/own") == [str(tmp_path / "a/b")]
    (tmp_path / "a/b/own/memory.max").write_text("1073741824\n")
    assert usable(tmp_path, "a/b/own") == []


def test_reasons_name_the_group_and_what_it_lacks(tmp_path):
    tree(tmp_path, own="")
    (tmp_path / "cgroup.subtree_control").write_text("cpu pids\n")
    reasons = dict(places(Hierarchy(str(tmp_path), str(tmp_path / "own"))))
    assert reasons[str(tmp_path)] == f"{tmp_path} does not hand memory to its children"
    assert "memory and pids" in str(reasons[str(tmp_path / "own")])
    [(_, reason)] = places(Hierarchy(str(tmp_path), str(tmp_path / "missing")))
    assert "No such file" in str(reason)


def test_find_says_why_not_and_leaves_nothing(tmp_path, monkeypatch):
    """Folders can be made here, but they are no control groups; then not even folders."""
    tree(tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("memory pids\n")
    here = Hierarchy(str(tmp_path), str(tmp_path))
    deeper = Hierarchy("/c/pids", "/c/pids/job")
    monkeypatch.setattr(cgroups, "hierarchies", lambda *_: {"unified": here, "memory": here, "pids": deeper})
    groups, text = find()
    assert groups is None
    assert "cgroup.subtree_control" in text and "/c/pids/job is kept by whoever made it" in text
    assert "Delegate=yes" in text
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.subtree_control"]
    missing = Hierarchy(str(tmp_path / "missing"), str(tmp_path / "missing"))
    monkeypatch.setattr(cgroups, "hierarchies", lambda *_: {"memory": missing})
    assert "No such file" in find()[1]
    monkeypatch.setattr(cgroups, "hierarchies", lambda *_: {})
    assert "no memory or pids controller is mounted" in find()[1]


def version_2_group(folder):
    for name, text in {
        "memory.max": "max\n",
        "pids.max": "max\n",
        "memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n",
        "memory.peak": "300000\n",
        "cpu.stat": "usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n",
    }.items():
        (folder / name).write_text(text)
    return Group(2, dict.fromkeys(("memory", "pids", "cpu"), str(folder)))


def test_files_of_version_2(tmp_path):
    """Ordinary files of the same names."""
    group = version_2_group(tmp_path)
    group.limit(128 * MIB, 20)
    assert (tmp_path / "memory.max").read_text() == str(128 * MIB)
    assert (tmp_path / "pids.max").read_text().startswith("20")
    assert group.kills() == 2
    assert group.cpu_seconds() == 1.5
    assert group.enter == (f"{tmp_path}/cgroup.procs",)


def test_a_peak_that_cannot_be_forgotten_is_told_only_when_it_rises(tmp_path, monkeypatch):
    """As in version 2 before Linux 6.12, where memory.peak cannot be written."""
    monkeypatch.setattr(cgroups, "_open_peak", lambda path: os.open(path, os.O_RDONLY))
    group = version_2_group(tmp_path)
    assert group.peak_bytes() == 300000
    group.limit(128 * MIB, 20)
    assert group.peak_bytes() is None
    (tmp_path / "memory.peak").write_text("400000\n")
    assert group.peak_bytes() == 400000


# ---- for real ----

# What a launcher does: moves itself in, starts a program, moves back. Prints its own groups before and after, the
# program's, and how it ended.
LAUNCHER = """
import json, os, subprocess, sys
enter, leave, command = json.loads(sys.argv[1])
def move(paths):
    for path in paths:
        descriptor = os.open(path, os.O_WRONLY)
        os.write(descriptor, b"0")
        os.close(descriptor)
def groups(pid):
    with open(f"/proc/{pid}/cgroup") as file:
        return file.read()
before = groups("self")
try:
    move(enter)
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
finally:
    move(leave)
inside = groups(child.pid)
output = child.communicate()[0]
print(json.dumps([before, groups("self"), inside, output, child.returncode]))
"""

# Starts children until one is refused, and says how many; else until one ends. Then ends them all.
FORKS = """
import os, signal, time
children = []
try:
    while len(children) < {count}:
        pid = os.fork()
        if pid == 0:
            {child}
            time.sleep(600)
        children.append(pid)
except BlockingIOError:
    print(len(children), flush=True)
else:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.fixture
def groups():
    found, reason = find()
    if found is None:
        pytest.skip(f"no control groups here: {reason}")
    yield found
    found.close()


@pytest.fixture
def group(groups):
    made = groups.slot("0")
    yield made
    made.close()


def needs(groups, controller):
    if controller not in groups.holds:
        pytest.skip(f"no {controller} here: {find_text()}")


def find_text():
    found, text = find()
    if found is not None:
        found.close()
    return text


def run(groups, group, source):
    """Runs a program in the group; its output and exit code."""
    program = [sys.executable, "-I", "-S", "-c", source]
    argument = json.dumps([group.enter, groups.leave, program])
    done = subprocess.run([sys.executable, "-I", "-S", "-c", LAUNCHER, argument], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after, _, output, code = json.loads(done.stdout)
    assert before == after
    return output, code


def test_only_what_the_launcher_starts_is_inside(groups, group):
    command = json.dumps([group.enter, groups.leave, ["cat", "/proc/self/cgroup"]])
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, command]
    before, after, inside, output, code = json.loads(subprocess.run(launcher, capture_output=True, check=True).stdout)
    assert code == 0 and before == after
    assert inside == output
    assert inside.count("/rl_posttrain-") == len(group.enter)
    assert "rl_posttrain" not in before


def test_memory_beyond_the_limit_ends_the_program(groups, group):
    needs(groups, "memory")
    use = "x = bytearray(b'x') * (100 << 20); print(len(x))"
    group.limit(150 * MIB, 50)
    assert run(groups, group, use) == (f"{100 * MIB}\n", 0)
    assert group.kills() == 0
    group.limit(90 * MIB, 50)
    output, code = run(groups, group, use)
    assert (output, code) == ("", -9)
    assert group.kills() >= 1


def test_memory_of_many_processes_and_of_shared_memory_counts_together(groups, group):
    needs(groups, "memory")
    group.limit(100 * MIB, 50)
    run(groups, group, FORKS.format(count=6, child="x = bytearray(b'x') * (30 << 20)"))
    assert group.kills() >= 1
    earlier = group.kills()
    shared = "import os\nf = os.memfd_create('x')\nfor _ in range(200): os.write(f, b'x' * (1 << 20))"
    assert run(groups, group, shared)[1] == -9
    assert group.kills() > earlier


def test_peak_is_of_the_run_since_the_limit_was_set(groups, group):
    needs(groups, "memory")
    group.limit(400 * MIB, 50)
    run(groups, group, "x = bytearray(b'x') * (150 << 20)")
    peak = group.peak_bytes()
    if peak is None and groups.version == 2:
        pytest.skip("memory.peak needs Linux 5.19")
    assert peak is not None and 150 * MIB <= peak < 200 * MIB
    group.limit(400 * MIB, 50)
    run(groups, group, "pass")
    later = group.peak_bytes()
    assert later is None or later < 100 * MIB


def test_task_limit_counts_processes_and_threads(groups, group):
    needs(groups, "pids")
    group.limit(512 * MIB, 8)
    assert run(groups, group, FORKS.format(count=50, child="pass")) == ("7\n", 0)
    group.limit(512 * MIB, 20)
    thread = "import threading, time\nn = 0\ntry:\n    while n < 50:\n"
    thread += "        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n        n += 1\n"
    thread += "except RuntimeError: print(n)"
    assert run(groups, group, thread) == ("19\n", 0)


def test_cpu_time_of_processes_that_nobody_waits_for(groups, group):
    needs(groups, "cpu")
    burn = "import os, signal, time, resource\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    burn += "if os.fork() == 0:\n    while time.process_time() < 0.5: pass\n    os._exit(0)\n"
    burn += "try: os.wait()\nexcept ChildProcessError: pass\n"
    burn += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)"
    before = group.cpu_seconds()
    output, _ = run(groups, group, burn)
    assert float(output) < 0.1  # it has hidden it
    assert 0.5 <= group.cpu_seconds() - before < 3


def test_removal_waits_for_processes_and_names_those_that_stay(groups, monkeypatch):
    group = groups.slot("busy")
    script = 'for path in "$@"; do echo 0 > "$path"; done; echo in; exec sleep 600'
    with subprocess.Popen(["sh", "-c", script, "sh", *group.enter], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"in\n"
        monkeypatch.setattr(cgroups, "CLOSE_SECONDS", 0.05)
        with pytest.raises(TimeoutError, match=rf"\['{process.pid}'\] are still in it"):
            group.close()
        process.kill()
        monkeypatch.setattr(cgroups, "CLOSE_SECONDS", 30)
        group.close()
        group.close()
    assert not any(os.path.exists(os.path.dirname(path)) for path in group.enter)


def test_closing_the_pool_removes_all(groups):
    slots = [groups.slot(str(index)) for index in range(3)]
    with pytest.raises(FileExistsError):
        groups.slot("1")
    folders = {os.path.dirname(path) for slot in slots for path in slot.enter}
    assert all(map(os.path.isdir, folders))
    groups.close()
    assert not any(os.path.exists(path) for folder in folders for path in (folder, os.path.dirname(folder)))
    with pytest.raises(OSError):
        slots[0].limit(64 * MIB, 8)


def test_leftovers_of_dead_trainers_are_removed_and_those_of_the_living_stay(groups):
    trainer = "import os, sys\nfrom rl_posttrain.sandbox.cgroups import find\ngroups = find()[0]\n"
    trainer += "print(*{os.path.dirname(path) for path in groups.slot('0').enter}, flush=True)\nsys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", trainer], cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        folders = process.stdout.readline().split()
        assert folders
        find_text()
        assert all(map(os.path.isdir, folders))
        process.kill()
    assert all(map(os.path.isdir, folders))
    find_text()
    assert not any(os.path.exists(path) for folder in folders for path in (folder, os.path.dirname(folder)))
    assert groups.slot("still ours")
