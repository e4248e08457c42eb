"""Descriptors, disk space and processes that run out: "infra_error" meanwhile, and the pool works afterwards."""

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rl_posttrain.sandbox import session
from rl_posttrain.sandbox.job import InfrastructureError
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import Call, FunctionTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig

ROOT = Path(__file__).resolve().parents[2]
GOOD = "def solve(n): return n + 1"
TESTS = FunctionTests("solve", (Call((1,), 2),))


@pytest.fixture
def folder(monkeypatch):
    """A folder for temporary files that the sandbox's user can enter, in place of the machine's; empty at the end."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o755)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield folder
    assert os.listdir(folder) == []
    os.rmdir(folder)


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
for free in (0, 2, 5):
    with Pool(PoolConfig(slots=1)) as pool:
        first += [with_free(pool, free, False), verdict(pool)]
after = len(os.listdir("/proc/self/fd"))
with Pool(PoolConfig(slots=1)) as pool:
    working = verdict(pool)
    start = len(os.listdir("/proc/self/fd"))
    runs = [with_free(pool, free, fresh) for fresh in (False, True) for free in range(*map(int, sys.argv[1:]))]
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


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_descriptors_that_run_out_are_infra_errors(folder, step):
    arguments = ("0", "20", str(step))  # descriptors that are left
    first, before, after, working, runs, last, start, end = run_script(EXHAUSTED, folder, *arguments)
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
        if language != "python":
            code = "int main() { return 0; }"
            return judge(pool, code, StdioTests((("", ""),)), language=language).status
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
    full = [verdict(pool), verdict(pool, sys.argv[1])]
    pool._places[0].discard()
    full.append(verdict(pool))
    pool._launcher._process.kill()
    pool._launcher._process.wait()
    full += [verdict(pool), verdict(pool)]
    with Pool(PoolConfig(slots=1)) as other:
        full.append(verdict(other))
    for path in made:
        os.remove(path)
    found += [verdict(pool), verdict(pool, sys.argv[1])]
print(json.dumps([found, full, os.listdir(folder)]))
"""


@pytest.mark.parametrize("language", ["c", pytest.param("cpp", marks=pytest.mark.slow)])
def test_a_full_disk_is_an_infra_error(folder, language):
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("only root can mount a small disk to fill, with `unshare` of util-linux")
    mount = 'mount -t tmpfs -o size=200m,nr_inodes=100,mode=755 none $0 && exec "$@"'
    found, full, left = run_script(FULL, folder, language, command=("unshare", "--mount", "sh", "-c", mount, folder))
    assert found == ["pass", "pass", "pass"]
    assert set(full) <= {"pass", "infra_error", "unavailable"}
    assert full[0] == "pass"  # what is there goes on working
    assert left == []


def test_processes_that_run_out_are_infra_errors(folder):
    with Pool(PoolConfig(slots=1)) as pool:
        assert judge(pool, GOOD, TESTS).passed
        launcher = pool._require_launcher()
        if launcher.groups is None or "pids" not in launcher.groups.holds:
            pytest.skip("no control group that limits processes is ours to make")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "SLOT_TASKS", 3 - Limits().processes)  # bubblewrap twice and the fork server
            verdict = judge(pool, GOOD, TESTS, profile="multi")
        assert verdict.status == "infra_error" and "Errno 11" in verdict.detail
        assert judge(pool, GOOD, TESTS).passed


def test_what_all_candidates_share_is_built_again_after_a_failure(folder):
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
