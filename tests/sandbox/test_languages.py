"""Every language of the table, by one program that does what the first line of its input says."""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_posttrain.sandbox import languages, launcher, programs
from rl_posttrain.sandbox import pool as pool_module
from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable, explain
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import StdioTests
from rl_posttrain.sandbox.languages import COMPILE_LIMITS, LANGUAGES
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).parent / "languages"
LIMITS = Limits(cpu_seconds=10.0, wall_seconds=60.0, output_bytes=1 << 18)
SMALL = dataclasses.replace(LIMITS, memory_bytes=256 << 20)
HOST_FILES = "/etc/passwd /etc/hostname /root /home /sys/kernel /var/log /proc/1/environ"


@dataclass(frozen=True)
class Words:
    """What the verdicts of a language say."""

    error: str  # in the detail, when the program of languages/ fails
    overflow: str  # when its recursion has no end; empty: that takes too long
    broken: str = ""  # a program that does not compile; empty where only running it tells
    refusal: str = ""  # what the compiler says of it
    depth: int = 20_000  # of a recursion that is fine


WORDS = {
    "python": Words("exit code 1: ValueError: boom 42", "RecursionError", "print(1\n", "SyntaxError"),
    "c": Words("signal 6: boom 42", "signal 11", "int main(void) { return x; }", "'x' undeclared", 200_000),
    "cpp": Words(
        "signal 6: what():  boom 42", "signal 11", "int main() { return x; }", "'x' was not declared", 200_000
    ),
    "javascript": Words("exit code 1: TypeError: boom 42", "RangeError: Maximum call stack", depth=5_000),
    "bash": Words("exit code 3: boom 42", "", depth=300),
    "rust": Words("exit code 101: boom 42", "stack overflow", "fn main() { x }", "cannot find value `x`"),
    "go": Words("exit code 2: panic: boom 42", "memory limit", "package main\nfunc main() { x }", "undefined: x"),
    "java": Words(
        'exit code 1: Exception in thread "main" java.lang.IllegalStateException: boom 42',
        "StackOverflowError",
        "public class Main { int x = y; }",
        "cannot find symbol",
        200_000,
    ),
}
SLOW = ("rust", "go", "java")  # to compile or to start
each_language = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LANGUAGES]
)


@pytest.fixture(scope="module")
def pool():
    with Pool(PoolConfig(slots=1, limits=LIMITS)) as pool:
        yield pool


def require(name):
    """Skips the test where the language is not installed."""
    missing = LANGUAGES[name].missing()
    if missing is not None:
        pytest.skip(missing)


def obey(pool, name, *cases, limits=None):
    """The verdict on the language's program, for (input, expected output) pairs."""
    require(name)
    code = (SOURCES / LANGUAGES[name].source).read_text()
    return judge(pool, code, StdioTests(cases), language=name, limits=limits)


def test_every_language_has_its_program():
    assert WORDS.keys() == LANGUAGES.keys()


# ---- right and wrong programs ----


@each_language
def test_the_first_program_of_a_language_passes_and_a_wrong_one_is_wrong(pool, name):
    require(name)
    tests = StdioTests((("word\n", "word word\n"), ("a\n", "a b\n")))
    verdict = judge(pool, LANGUAGES[name].hello, tests, language=name)
    assert verdict.status == "wrong" and verdict.outcomes == ("pass", "wrong")
    assert [(each.status, each.exit_code) for each in verdict.executions[-2:]] == [("ok", 0)] * 2


@each_language
def test_input_threads_and_recursion(pool, name):
    depth = str(WORDS[name].depth)
    cases = (("", "empty\n"), ("length\n" + "x" * 100_000, "100000"), ("echo\n" + "é" * 50_000, "é" * 50_000))
    cases += (("threads\n", "19800"), (f"deep\n{depth}\n", depth), ("length", "0"))
    verdict = obey(pool, name, *cases)
    assert verdict.passed, verdict.detail


@each_language
def test_a_failure_at_run_time_shows_what_it_died_of(pool, name):
    verdict = obey(pool, name, ("fail\n", ""), ("length\nab", "2"))
    assert verdict.status == "error" and verdict.outcomes == ("error", "pass")
    assert WORDS[name].error in verdict.detail
    assert "boom 42" in verdict.executions[-2].stderr


@each_language
def test_bytes_that_are_no_text_are_a_wrong_answer(pool, name):
    verdict = obey(pool, name, ("bytes\n", "x"))
    assert verdict.status == "wrong" and verdict.executions[-1].stdout == "\ufffd\ufffd"


@each_language
def test_endless_recursion_ends(pool, name):
    if not WORDS[name].overflow:
        pytest.skip("bash has no limit of its own, and takes long to reach ours")
    verdict = obey(pool, name, ("endless\n", ""), limits=SMALL)
    assert verdict.status == "error" and WORDS[name].overflow in verdict.detail


@each_language
def test_the_memory_limit_has_its_name(pool, name):
    verdict = obey(pool, name, ("memory\n", ""), limits=SMALL)
    assert verdict.status == "error" and verdict.executions[-1].status == "memory_limit", verdict
    assert verdict.executions[-1].peak_memory_bytes < 2 * SMALL.memory_bytes


@each_language
def test_files_of_the_host_are_not_there(pool, name):
    with tempfile.NamedTemporaryFile("w", delete=False) as secret:
        secret.write("secret")
    try:
        os.chmod(secret.name, 0o644)
        verdict = obey(pool, name, (f"files\n{HOST_FILES} {secret.name} {SOURCES}\n", "0"), ("files\n/usr/bin\n", "1"))
    finally:
        os.unlink(secret.name)
    assert verdict.passed, verdict.detail


# ---- compilers ----


@each_language
def test_what_does_not_compile_is_told_from_what_fails(pool, name):
    require(name)
    words = WORDS[name]
    if not words.broken:
        pytest.skip(f"{name} finds mistakes only when it runs")
    verdict = judge(pool, words.broken, StdioTests((("", ""), ("a", "a"))), language=name)
    assert verdict.status == "compile_error" and verdict.tests == (False, False)
    assert verdict.outcomes == ("compile_error", "compile_error")
    shown = verdict.detail + "".join(each.stdout + each.stderr for each in verdict.executions)
    assert words.refusal in shown.replace("‘", "'").replace("’", "'")
    if LANGUAGES[name].compile:
        assert [each.status for each in verdict.executions] == ["compile_error"]
        assert verdict.detail.startswith("compiling: ")


BOMBS = {
    "time": ("cpp", "template<int n> struct A{A<n-1> a;A<n-2> b;};template<>struct A<0>{};template<>struct A<1>{};\n"
             "template<int n,int m>struct B{static constexpr int v=B<n-1,2*m>::v+B<n-1,2*m+1>::v;};"
             "template<int m>struct B<0,m>{static constexpr int v=1;};int main(){return B<26,0>::v;}"),
    "file": ("c", "char a[1 << 29] = {1};\nint main(void) { return a[0]; }"),
    "include": ("c", '#include "/dev/zero"\nint main(void) {}'),
    "itself": ("c", '#include "main.c"\nint main(void) {}'),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_for_compilers_end_within_the_compilers_limits(pool, bomb, monkeypatch):
    name, code = BOMBS[bomb]
    require(name)
    limits = dataclasses.replace(COMPILE_LIMITS, cpu_seconds=1.0, memory_bytes=256 << 20, file_bytes=8 << 20)
    monkeypatch.setattr(programs, "COMPILE_LIMITS", limits)
    verdict = judge(pool, code, StdioTests((("", ""),)), language=name)
    assert verdict.status == "compile_error" and verdict.outcomes == ("compile_error",)
    (execution,) = verdict.executions
    assert execution.cpu_s < 3 and execution.peak_memory_bytes < 1 << 30 and len(execution.stderr) < 1 << 17
    assert verdict.detail.removeprefix("compiling: ").strip()
    assert obey(pool, name, ("length\nab", "2")).passed


# ---- what is not there ----


def test_an_unknown_language_is_named_with_those_that_are_known(pool):
    with pytest.raises(ValueError, match="cobol.*python, c, cpp"):
        judge(pool, "", StdioTests((("", ""),)), language="cobol")


def test_a_missing_program_is_an_error_with_the_remedy(pool, monkeypatch):
    absent = dataclasses.replace(LANGUAGES["javascript"], programs=("/usr/bin/no-such-node",))
    monkeypatch.setitem(LANGUAGES, "javascript", absent)
    with pytest.raises(SandboxUnavailable, match="no-such-node is missing: `apt-get install nodejs`"):
        judge(pool, "", StdioTests((("", ""),)), language="javascript")


def test_a_missing_toolchain_is_an_error_with_the_remedy(pool, monkeypatch):
    monkeypatch.setitem(LANGUAGES, "rust", dataclasses.replace(LANGUAGES["rust"], toolchain=lambda: None))
    with pytest.raises(SandboxUnavailable, match="candidates in rust.*toolchain.*apt-get install rustc"):
        judge(pool, "fn main() {}", StdioTests((("", ""),)), language="rust")
    assert "rust" not in languages.find_toolchains()


def test_a_proc_that_cannot_be_mounted_has_its_remedy():
    words = explain("bwrap: Can't mount proc on /newroot/proc: Operation not permitted")
    assert "systempaths=unconfined" in words and "procMount: Unmasked" in words


# ---- toolchains in private folders ----

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's private folders are out of the sandbox's reach")


@pytest.fixture
def private():
    """A toolchain of one shell script, where only its owner can look."""
    with tempfile.TemporaryDirectory() as folder:  # 0700
        compiler = Path(folder) / "toolchain" / "bin" / "rustc"
        compiler.parent.mkdir(parents=True)
        compiler.write_text("#!/bin/sh\ntouch /toolchains/rust/x 2>/dev/null && exit 3\ncp main.rs main\n")
        compiler.chmod(0o755)
        yield compiler.parents[1]


def state(folder):
    """Every file below `folder` with what would show that somebody has touched it."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@needs_root
def test_a_private_toolchain_is_shown_read_only_and_survives(private, monkeypatch):
    monkeypatch.setattr(pool_module, "find_toolchains", lambda: {"rust": str(private)})
    monkeypatch.setitem(LANGUAGES, "rust", dataclasses.replace(LANGUAGES["rust"], toolchain=lambda: str(private)))
    before = state(private)
    with Pool(PoolConfig(slots=1)) as pool:
        verdict = judge(pool, "#!/bin/sh\ncat\n", StdioTests((("a", "a"),)), language="rust", profile="multi")
        assert verdict.passed, verdict
        assert state(private) == before
        folder = pool._require_launcher()._folder
    assert not folder.exists() and state(private) == before


TRAINER = """
import sys
from rl_posttrain.sandbox import pool as pool_module
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import StdioTests
pool_module.find_toolchains = lambda: {"rust": sys.argv[1]}
pool = pool_module.Pool(pool_module.PoolConfig(slots=1))
assert judge(pool, "print(1)", StdioTests((("", "1"),))).passed
print(pool._launcher._folder, pool._launcher._process.pid, flush=True)
judge(pool, "import time; time.sleep(60)", StdioTests((("", "1"),)))
"""


@needs_root
@pytest.mark.parametrize("victim", ["trainer", "launcher"])
def test_a_private_toolchain_survives_a_kill(private, victim):
    before = state(private)
    command = [sys.executable, "-c", TRAINER, str(private)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        folder, pid = trainer.stdout.readline().split()
        if victim == "launcher":
            os.kill(int(pid), 9)
            time.sleep(0.5)  # the trainer sees it, and starts another
        trainer.kill()
    deadline = time.monotonic() + 20
    while victim == "trainer" and os.path.exists(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state(private) == before
    assert victim == "launcher" or not os.path.exists(folder)
    shutil.rmtree(folder, ignore_errors=True)  # nobody was left to do it


FAILING = """
import importlib.util, json, os, socket, sys
spec = importlib.util.spec_from_file_location("launcher", sys.argv[1])
launcher = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launcher)
whole = launcher.mount
def mount(source, target, flags):
    if flags & launcher.MS_REMOUNT:
        raise OSError("refused")  # what is mounted stays, and could be written
    whole(source, target, flags)
launcher.mount = mount
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ours.close()
sys.argv[1:] = [str(theirs.fileno()), str(os.getppid()), sys.argv[2], json.dumps([sys.argv[3:5]])]
launcher.main()
"""


@needs_root
def test_a_private_toolchain_survives_a_failure_to_show_it(private):
    before = state(private)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "shown" / "toolchains" / "rust"
        target.mkdir(parents=True)
        command = [sys.executable, "-c", FAILING, launcher.__file__, f"{folder}/shown", str(private), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "refused" in done.stderr, done
        assert state(private) == before
        assert not os.path.exists(f"{folder}/shown")


@pytest.mark.slow
def test_the_toolchains_of_this_machine_are_left_as_they_are():
    found = languages.find_toolchains()
    if not found:
        pytest.skip("neither rust nor go is installed")
    before = {name: state(Path(path)) for name, path in found.items()}
    with Pool(PoolConfig(slots=1)) as pool:
        for name in found:
            assert judge(pool, LANGUAGES[name].hello, StdioTests((("a", "a a"),)), language=name).passed
    assert {name: state(Path(path)) for name, path in found.items()} == before
