"""Hostile programs: each has to fail, change nothing outside, and leave a place where right programs pass.

The programs and their table lie in the folder `attacks` beside this file; `experiments/attacks.py` runs them.
By default the quick ones in fast mode; `slow` has the others, safe mode, and all of it as an ordinary user.
"""

import dataclasses
import importlib.util
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pyseccomp
import pytest

from experiments import attacks
from rl_posttrain.sandbox.codec import Malformed, decode
from rl_posttrain.sandbox.judge import judge, judge_many
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.referees import PYTEST

ROOT = Path(__file__).resolve().parents[2]
MODES = {"fast": 1000, "safe": 1}  # runs per container
GOOD = (attacks.FOLDER / "right.py").read_text()
TABLE = attacks.load_attacks()
MISSING = attacks.missing_kinds()
ORDINARY_USER = 1357
# What an ordinary user's interpreter may lack; pure Python.
MODULES = ("pyseccomp", *PYTEST)


@pytest.fixture(scope="module")
def pools():
    """By mode, a pool."""
    opened = {}

    def get(mode):
        if mode not in opened:
            opened[mode] = attacks.attack_pool(PoolConfig(runs_per_slot=MODES[mode]))
        return opened[mode]

    yield get
    for pool in opened.values():
        pool.close()


@pytest.fixture(scope="module")
def guard():
    with attacks.canary() as guard:
        yield guard


@pytest.fixture
def pool(pools):
    return pools("fast")


def cases():
    for mode in MODES:
        for attack in TABLE:
            marks = [pytest.mark.slow] if attack.slow or mode == "safe" else []
            yield pytest.param(mode, attack, id=f"{mode}-{attack.name}", marks=marks)


@pytest.mark.parametrize(("mode", "attack"), list(cases()))
def test_attack_fails_and_leaves_nothing(pools, guard, mode, attack):
    if attack.kind in MISSING:
        pytest.skip(MISSING[attack.kind])
    if attack.machines and platform.machine() not in attack.machines:
        pytest.skip(f"holds instructions of {attack.machines}")
    result = attacks.run_attack(pools(mode), attack, guard)
    assert not result.problems


def kinds():
    for mode in MODES:
        for kind in attacks.KINDS:
            # The first program in C++ waits for its precompiled header.
            marks = [pytest.mark.slow] if kind == "cpp" or mode == "safe" else []
            yield pytest.param(mode, kind, id=f"{mode}-{kind}", marks=marks)


@pytest.mark.parametrize(("mode", "kind"), list(kinds()))
def test_a_right_program_of_every_kind_passes(pools, mode, kind):
    if kind in MISSING:
        pytest.skip(MISSING[kind])
    assert not attacks.check_right(pools(mode), kind).problems


# ---- the whole suite as an ordinary user ----

SCRIPT = """
import json, sys
from experiments.attacks import load_attacks, run_all
from rl_posttrain.sandbox.pool import PoolConfig
for result in run_all(PoolConfig(runs_per_slot=int(sys.argv[1])), load_attacks()):
    print(json.dumps([result.name, result.problems, result.skipped]), flush=True)
"""


@pytest.fixture(scope="module")
def readable_copy():
    """A folder that everybody may read, with what the attacks need, also on an interpreter that has nothing."""
    folder = Path(tempfile.mkdtemp(prefix="attacks-"))
    try:
        for name in ("rl_posttrain/__init__.py", "rl_posttrain/types.py", "experiments/__init__.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        shutil.copy(ROOT / "experiments/attacks.py", folder / "experiments")
        for name in ("rl_posttrain/sandbox", "tests/sandbox/attacks"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in MODULES:
            found = importlib.util.find_spec(name)
            if found is None or found.origin is None:
                continue
            origin = Path(found.origin)
            if found.submodule_search_locations is None:
                shutil.copy(origin, folder)
            else:
                shutil.copytree(origin.parent, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder
    finally:
        shutil.rmtree(folder)


def as_ordinary_user(command, folder, **more):
    return subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"},
        user=ORDINARY_USER,
        group=ORDINARY_USER,
        extra_groups=[],
        capture_output=True,
        text=True,
        **more,
    )


def reachable_interpreter(folder):
    """A Python 3.11 or newer that the ordinary user can run, or None."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            version = as_ordinary_user([path, "-c", "import sys; print(sys.version_info >= (3, 11))"], folder)
        except OSError:
            continue
        if version.stdout.strip() == "True":
            return path
    return None


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_all_attacks_fail_for_an_ordinary_user_too(readable_copy, mode):
    if os.geteuid() != 0:
        pytest.skip("this is an ordinary user already")
    interpreter = reachable_interpreter(readable_copy)
    if interpreter is None:
        pytest.skip("no Python 3.11 that an ordinary user can run: `apt-get install python3`")
    command = [interpreter, "-s", "-c", SCRIPT, str(MODES[mode])]
    ended = as_ordinary_user(command, readable_copy, timeout=1800)
    assert ended.returncode == 0, ended.stderr[-2000:]
    results = {name: (problems, skipped) for name, problems, skipped in map(json.loads, ended.stdout.splitlines())}
    assert {attack.name for attack in TABLE} <= results.keys()
    bad = {name: problems for name, (problems, _) in results.items() if problems}
    assert not bad, json.dumps(bad, indent=1)
    assert sum(skipped is None for _, skipped in results.values()) > 80


# ---- the suite itself: would it notice? ----


def test_every_program_has_a_row():
    programs = {path.name for path in attacks.FOLDER.iterdir()} - {"attacks.json"}
    rows = [attack.file for attack in TABLE]
    assert len(rows) == len(set(rows))
    assert programs - set(rows) == {kind.right for kind in attacks.KINDS.values()}


def test_a_folder_without_the_programs_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="git clone"):
        attacks.load_attacks(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "cobol"}, "kind='cobol'"),
        ({"file": "missing.py"}, "missing.py"),
        ({"verdicts": ["infra_error"]}, "must name the ways to fail"),
        ({"verdicts": []}, "must name the ways to fail"),
    ],
)
def test_a_wrong_row_is_refused(tmp_path, change, message):
    row = {"file": "x.py", "kind": "func", "tries": "", "right": "", "verdicts": ["wrong"]}
    (tmp_path / "x.py").write_text("")
    (tmp_path / "attacks.json").write_text(json.dumps([row | change]))
    with pytest.raises(ValueError, match=message):
        attacks.load_attacks(tmp_path)


def test_several_slots_are_refused(guard):
    with Pool(PoolConfig(slots=2)) as pool, pytest.raises(ValueError, match="slots=2"):
        attacks.run_attack(pool, TABLE[0], guard)


def test_an_attack_that_passes_or_fails_in_another_way_is_a_problem(pool, guard):
    right = attacks.Attack("right.py", "func", "", "", ["wrong"])
    assert attacks.run_attack(pool, right, guard).problems == ("it passes",)
    late = attacks.Attack("a32_infinite_stdout.py", "func", "", "", ["wrong"], ["ok"], ["unsolicited_frame"])
    problems = attacks.run_attack(pool, late, guard).problems
    assert len(problems) == 3 and "'error' instead of wrong" in problems[0]


@pytest.mark.parametrize(
    ("name", "limits"), [("a30_thread_bomb", {"processes": 500}), ("a75_descriptors_and_pipes", {"open_files": 1024})]
)
def test_a_missing_limit_is_a_problem(pool, guard, name, limits):
    attack = next(attack for attack in TABLE if attack.name == name)
    assert attacks.run_attack(pool, dataclasses.replace(attack, limits=limits), guard).problems


def test_a_missing_filter_is_a_problem(guard, monkeypatch):
    def allow_everything(_):
        rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        with tempfile.TemporaryFile() as file:
            rules.export_bpf(file)
            file.seek(0)
            return file.read()

    monkeypatch.setattr("rl_posttrain.sandbox.pool.build_filter", allow_everything)
    with attacks.attack_pool(PoolConfig()) as pool:
        for name in ("a36_network", "a62_limit_pid_1", "a68_fork_where_refused"):
            attack = next(attack for attack in TABLE if attack.name == name)
            assert attacks.run_attack(pool, attack, guard).problems, name


def test_a_changed_canary_and_a_leak_are_problems(pool):
    with attacks.canary() as guard:
        printing = dataclasses.replace(guard, secret="threads")  # which that attack prints
        attack = next(attack for attack in TABLE if attack.name == "a30_thread_bomb")
        problems = attacks.run_attack(pool, attack, printing).problems
    assert problems == ("a file of the machine was read: 'threads'", "the canary outside was changed")


def test_processes_of_a_run_are_seen_while_it_lasts(pool):
    slow = "import time\ntime.sleep(1.5)\n" + GOOD
    thread = threading.Thread(target=judge, args=(pool, slow, attacks.CALLS))
    thread.start()
    deadline = time.monotonic() + 10
    while attacks.runs_left() == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    during = attacks.runs_left()
    thread.join()
    assert during > 0


def test_shared_memory_is_seen():
    before = attacks.shared_memory_bytes()
    with mmap.mmap(-1, 128 << 20) as block:
        for offset in range(0, len(block), mmap.PAGESIZE):
            block[offset] = 1
        grown = attacks.shared_memory_bytes() - before
    assert grown > attacks.SHARED_MEMORY_BYTES


def test_the_end_of_the_pool_is_a_result_and_shows_in_the_summary():
    chosen = [attack for attack in TABLE if attack.name in ("a35_daemon_left_behind", "a69_stopped_processes")]
    results = list(attacks.run_all(PoolConfig(), chosen))
    assert [result.name for result in results] == ["right_func_exec", *(a.name for a in chosen), "end of the pool"]
    assert all(result.ok for result in results)
    assert attacks.summary(results) == "4 checks of the sandbox, 0 with problems, 0 skipped"
    bad = dataclasses.replace(results[1], problems=("it passes",))
    assert attacks.summary([bad]).endswith("1 with problems, 0 skipped: a35_daemon_left_behind")
    assert attacks.table([bad]).row_count == 1


# ---- what the table has no room for ----


def test_values_have_one_encoding():
    # A parser that also takes UTF-16 reads brackets that the check of their depth does not see (a43): where the
    # recursion limit is high, they crash this process.
    assert decode(b"49", 100) == 49
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(Malformed):
            decode("49".encode(encoding), 100)


HARNESS_PATCHES = {
    "send": "import sys\nh = sys.modules['harness']\nh.send.__code__ = (lambda p: None).__code__",
    "encode": "import sys\nc = sys.modules['codec']\nc.encode = lambda v: b'true'",
    "resolve": "import sys\nh = sys.modules['harness']\nh.resolve = lambda m, e: (lambda *a: True)",
    "replay": (
        "import sys\nh = sys.modules['harness']\nold = h.receive\n"
        'def receive():\n    q = old()\n    h.send(b\'{"id":"%s","value":true}\' % q[\'id\'].encode())\n    return q\n'
        "h.receive = receive"
    ),
    "main": "import sys\nvars(sys.modules['__main__'])['watch'] = lambda *a: {'status': 0}",
}


@pytest.mark.parametrize("name", sorted(HARNESS_PATCHES))
def test_patching_the_harness_gains_nothing(pool, name):
    code = HARNESS_PATCHES[name] + "\ndef solve(n): return 0"
    verdict = judge(pool, code, attacks.CALLS, limits=Limits(cpu_seconds=1.0, wall_seconds=1.0))
    assert not verdict.passed and not any(verdict.tests) and verdict.status != "infra_error"
    assert judge(pool, GOOD, attacks.CALLS).passed


@pytest.mark.slow
def test_hostile_and_right_programs_mixed_on_several_slots(guard):
    hostile = [attack.source(guard) for attack in TABLE if attack.kind == "func" and not attack.slow]
    items = [(code, attacks.CALLS) for attack in hostile for code in (attack, GOOD)] * 3
    with Pool(PoolConfig(slots=4, runs_per_slot=20, limits=Limits(cpu_seconds=4.0, wall_seconds=30.0))) as pool:
        verdicts = judge_many(pool, items)
    assert [verdict.passed for verdict in verdicts] == [code is GOOD for code, _ in items]
    assert not [verdict for verdict in verdicts if verdict.status == "infra_error"]
