"""Limits at their edge: just under passes, just over is the named verdict, in several languages."""

import os
import subprocess
import sys

import pytest

from rl_posttrain.sandbox import processes
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests
from rl_posttrain.sandbox.languages import LANGUAGES
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.types import Execution, Verdict

MIB = 1 << 20
KINDS = ("function", "python", "c", "bash", "javascript")
# Where a case takes about a second: those that differ from the others by their interpreter alone are slow.
SOME = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("python", "javascript"))) for kind in KINDS]
# Programs, by kind of limit and by language, whose {amount} the limit decides on. They end with "done" where the
# limit is not met and do not stop what happens to them where it is. A function is the Python program in a function.
PROGRAMS = {
    "cpu": {
        "python": "import time\nwhile time.process_time() < {amount}: pass",
        "c": "#include <time.h>\n#include <stdio.h>\n"
        'int main(){{ while (clock() < {amount} * CLOCKS_PER_SEC); puts("done"); }}',
        "javascript": "while (process.cpuUsage().user + process.cpuUsage().system < {amount} * 1e6);",
    },
    "wall": {
        "python": "import time\ntime.sleep({amount})",
        "c": '#include <unistd.h>\n#include <stdio.h>\nint main(){{ usleep({amount} * 1e6); puts("done"); }}',
        "bash": "sleep {amount}",
        "javascript": "Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, {amount} * 1000);",
    },
    "memory": {
        "python": "held = bytearray({amount})",
        "c": "#include <stdlib.h>\n#include <string.h>\n#include <stdio.h>\n"
        "int main(){{ for (long n = {amount} >> 20; n > 0; n--) {{\n"
        'char *p = malloc(1 << 20); memset(p, 1, 1 << 20); }}\nputs("done"); }}',
        "bash": "printf -v held '%*s' {amount} x",
        "javascript": "const held = []; for (let n = {amount} >> 20; n > 0; n--) held.push(Buffer.alloc(1 << 20, 1));",
    },
    "file": {
        "python": "with open('/tmp/x', 'wb') as file: file.write(bytes({amount}))",
        "c": "#include <fcntl.h>\n#include <unistd.h>\n#include <stdio.h>\n"
        'int main(){{ int f = open("/tmp/x", O_WRONLY | O_CREAT, 0600);\n'
        'for (long n = 0; n < {amount}; n++) if (write(f, "x", 1) != 1) return 1;\nputs("done"); }}',
        "bash": "printf '%*s' {amount} x > /tmp/x || exit 1",
        "javascript": "require('fs').writeFileSync('/tmp/x', Buffer.alloc({amount}));",
    },
}
DONE = {
    "python": "\nprint('done')",
    "c": "",
    "bash": "\necho done",
    "javascript": "\nconsole.log('done');",
}


@pytest.fixture(scope="module")
def pool():
    with Pool(PoolConfig(slots=1)) as pool:
        yield pool


def run(pool, kind, limit, amount, limits) -> Verdict:
    """The verdict on the program or function for `limit` with that amount."""
    language = "python" if kind == "function" else kind
    if LANGUAGES[language].missing():
        pytest.skip(str(LANGUAGES[language].missing()))
    body = PROGRAMS[limit][language].format(amount=amount)
    if kind != "function":
        return judge(pool, body + DONE[language], StdioTests((("", "done"),)), language=language, limits=limits)
    lines = "\n    ".join(body.splitlines())
    return judge(pool, f"def f():\n    {lines}\n    return 1", FunctionTests("f", (Call((), 1),)), limits=limits)


def execution(verdict) -> Execution:
    (found,) = verdict.executions
    return found


def flags(verdict):
    return {flag.name for flag in verdict.flags}


# ---- time ----


@pytest.mark.parametrize("kind", [kind for kind in SOME if kind.values != ("bash",)])
def test_processor_time(pool, kind):
    limits = Limits(cpu_seconds=0.4, wall_seconds=60.0)
    verdict = run(pool, kind, "cpu", 0.25, limits)
    assert verdict.passed and 0.2 < execution(verdict).cpu_s < 0.4, verdict
    verdict = run(pool, kind, "cpu", 0.5, limits)
    assert verdict.status == "timeout" and execution(verdict).status == "time_limit", verdict
    # A control group counts what the slot itself uses, some milliseconds, on the candidate's account.
    assert "wall_timeout" not in flags(verdict) and 0.38 <= execution(verdict).cpu_s < 0.5


def test_processor_time_of_bash(pool):
    limits = Limits(cpu_seconds=0.5, wall_seconds=60.0)
    tests = StdioTests((("", "done"),))
    assert judge(
        pool, "for ((i = 0; i < 1000; i++)); do :; done; echo done", tests, language="bash", limits=limits
    ).passed
    for code in ("while :; do :; done", "(while :; do :; done) & (while :; do :; done) & wait"):
        verdict = judge(pool, code, tests, language="bash", limits=limits)
        assert verdict.status == "timeout" and execution(verdict).status == "time_limit", verdict
        assert "wall_timeout" not in flags(verdict)


@pytest.mark.parametrize("kind", SOME)
def test_wall_time(pool, kind):
    limits = Limits(cpu_seconds=2.0, wall_seconds=0.6)
    assert run(pool, kind, "wall", 0.2, limits).passed
    verdict = run(pool, kind, "wall", 60, limits)
    assert verdict.status == "timeout" and execution(verdict).status == "time_limit"
    assert flags(verdict) == {"wall_timeout"} and execution(verdict).cpu_s < 0.8


def test_wall_time_is_stretched_by_the_wait_for_a_processor(pool, monkeypatch):
    """Sleep stands for a program that wants to run and may not."""
    limits = Limits(cpu_seconds=2.0, wall_seconds=0.2)
    asked = []

    def waited(pids):
        asked.append(list(pids))
        return 60.0

    monkeypatch.setattr(processes, "waited_seconds", waited)
    verdict = run(pool, "python", "wall", 0.6, limits)
    assert verdict.passed and execution(verdict).wall_s >= 0.6
    assert asked and all(len(pids) == 1 for pids in asked)  # of the candidate alone
    verdict = run(pool, "python", "wall", 60.0, limits)  # ten times as long at most, however it was kept waiting
    assert verdict.status == "timeout" and flags(verdict) == {"wall_timeout"}
    monkeypatch.setattr(processes, "waited_seconds", lambda pids: 0.0)
    verdict = run(pool, "python", "wall", 1.0, limits)
    assert verdict.status == "timeout" and flags(verdict) == {"wall_timeout"}


BUSY = "import os\nprint(flush=True)\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@pytest.fixture
def load():
    """Twice as many busy processes as there are processors."""
    command = [sys.executable, "-I", "-S", "-c", BUSY]
    # Each in a session of its own, as runs are: the scheduler may share the processors by session.
    count = 2 * (os.cpu_count() or 1)
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_load_makes_no_time_out_of_a_right_program_and_saves_no_sleeper(pool, load):
    """Half the limit of processor time takes longer than the whole wall limit: judged by the clock, all would fail."""
    if processes.available() is not None:
        pytest.skip(str(processes.available()))
    limits = Limits(cpu_seconds=0.8, wall_seconds=0.6)
    verdicts = [run(pool, kind, "cpu", 0.4, limits) for kind in ("function", "c")]
    assert [verdict.status for verdict in verdicts] == ["pass"] * 2
    assert any(execution(verdict).wall_s > 0.6 for verdict in verdicts)
    verdict = run(pool, "python", "wall", 60, limits)
    assert verdict.status == "timeout" and flags(verdict) == {"wall_timeout"}


# ---- memory ----


@pytest.mark.parametrize("kind", SOME)
def test_memory(pool, kind):
    limits = Limits(cpu_seconds=5.0, wall_seconds=60.0, memory_bytes=256 * MIB)
    under = 60 if kind == "bash" else 150  # bash makes a copy
    assert run(pool, kind, "memory", under * MIB, limits).passed
    verdict = run(pool, kind, "memory", 600 * MIB if kind == "javascript" else 256 * MIB, limits)
    assert verdict.status == "error" and execution(verdict).status == "memory_limit", verdict
    assert verdict.tests == (False,)


@pytest.mark.parametrize("how", ["mmap.mmap(-1, {amount})", "mmap.mmap(-1, {amount}, mmap.MAP_PRIVATE)"])
def test_mapped_memory_counts_shared_or_not(pool, how):
    code = "import mmap\ndef f():\n    held = {how}\n    held.write(bytes(len(held)))\n    return 1".replace(
        "{how}", how
    )
    tests = FunctionTests("f", (Call((), 1),))
    limits = Limits(memory_bytes=256 * MIB)
    assert judge(pool, code.format(amount=80 * MIB), tests, limits=limits).passed
    verdict = judge(pool, code.format(amount=256 * MIB), tests, limits=limits)
    assert verdict.status == "error", verdict
    assert execution(verdict).peak_memory_bytes < 256 * MIB


BOMBS = {
    "python": (
        "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n"
        "        held = b'x' * (60 << 20)\n        time.sleep(60)\ntime.sleep(60)"
    ),
    "python shared": (
        "import mmap, os, time\nfor _ in range(10):\n    if os.fork() == 0:\n"
        "        held = mmap.mmap(-1, 60 << 20)\n        held.write(b'x' * (60 << 20))\n        time.sleep(60)\n"
        "time.sleep(60)"
    ),
    "bash": "for i in 1 2 3 4 5 6 7 8 9 10; do (printf -v held '%*s' 30000000 x; sleep 60) & done; wait",
}


@pytest.mark.parametrize("name", BOMBS)
def test_many_small_processes_have_one_memory_limit(pool, name):
    limits = Limits(cpu_seconds=20.0, wall_seconds=60.0, memory_bytes=256 * MIB, processes=40)
    tests = StdioTests((("", ""),))
    verdict = judge(pool, BOMBS[name], tests, language=name.split()[0], profile="multi", limits=limits)
    assert verdict.status == "error" and execution(verdict).status == "memory_limit", verdict
    assert judge(pool, "print(1)", StdioTests((("", "1"),)), profile="multi", limits=limits).passed


# ---- processes ----

FORKS = """
#include <stdio.h>
#include <unistd.h>
int main() { int n = 0; while (n < 99) { int pid = fork(); if (pid < 0) break; if (!pid) { pause(); } n++; }
printf("%d", n); }
"""
THREADS = """
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
void *wait(void *nothing) { pause(); return 0; }
int main() { int n = 0; pthread_t thread; while (n < 99 && !pthread_create(&thread, 0, wait, 0)) n++;
printf("%d", n); }
"""


@pytest.mark.parametrize("limit", [1, 7])
def test_processes_and_threads_of_c(pool, limit):
    limits = Limits(processes=limit, memory_bytes=1 << 30)
    expected = StdioTests((("", str(limit - 1)),))
    assert judge(pool, THREADS, expected, language="c", limits=limits).passed
    verdict = judge(pool, FORKS, expected, language="c", profile="multi", limits=limits)
    assert verdict.passed and execution(verdict).processes_left == limit - 1
    assert judge(pool, FORKS, StdioTests((("", "0"),)), language="c", limits=limits).passed


def test_processes_of_bash(pool):
    """Bash waits a while and tries again, so the wall limit ends a program that wants too many for ever."""
    code = "for i in {1..%d}; do sleep 60 & done; echo done; kill $(jobs -p)"
    tests = StdioTests((("", "done"),))
    limits = Limits(processes=6, wall_seconds=1.0)
    assert judge(pool, code % 4, tests, language="bash", limits=limits).passed  # and one for the substitution
    verdict = judge(pool, code % 6, tests, language="bash", limits=limits)
    assert verdict.status == "timeout" and "fork" in execution(verdict).stderr


# ---- files ----


@pytest.mark.parametrize("kind", KINDS)
def test_one_file(pool, kind):
    limits = Limits(file_bytes=1 * MIB)
    assert run(pool, kind, "file", MIB, limits).passed
    verdict = run(pool, kind, "file", MIB + 1, limits)
    assert verdict.status == "error" and verdict.tests == (False,), verdict


def test_many_files_share_the_limit(pool):
    code = "def f(n):\n    for i in range(n): open(f'/tmp/{i}', 'wb', 0).write(bytes(4096))\n    return n"
    limits = Limits(file_bytes=1 * MIB)
    assert judge(pool, code, FunctionTests("f", (Call((256,), 256),)), limits=limits).passed
    verdict = judge(pool, code, FunctionTests("f", (Call((257,), 257),)), limits=limits)
    assert verdict.status == "error" and "No space left" in verdict.detail


@pytest.mark.parametrize("make", ["open(name, 'w').close()", "os.mkdir(name)", "os.symlink('x', name)"])
def test_number_of_files(pool, make):
    code = f"import os\ndef f(n):\n    for i in range(n):\n        name = f'/tmp/{{i}}'\n        {make}\n    return n"
    limits = Limits(file_bytes=16 * MIB)
    assert judge(pool, code, FunctionTests("f", (Call((2047,), 2047),)), limits=limits).passed  # and /tmp itself
    verdict = judge(pool, code, FunctionTests("f", (Call((2048,), 2048),)), limits=limits)
    assert verdict.status == "error" and "No space left" in verdict.detail


HUGE = "char big[8 << 20] = {1};\nint main() { return !big[0]; }"  # eight MiB in the file, too


def test_the_program_itself_does_not_count(pool):
    """A candidate that chose to be too big for its own files would leave its group without a verdict."""
    for size in (8, 4):
        verdict = judge(pool, HUGE, StdioTests((("", ""),)), language="c", limits=Limits(file_bytes=size * MIB))
        assert verdict.passed, verdict


OPEN = """
#include <fcntl.h>
#include <stdio.h>
int main() { int n = 0; while (open("/dev/null", O_RDONLY) >= 0) n++; printf("%d", n); }
"""


def test_open_files(pool):
    limits = Limits(open_files=32)
    assert judge(pool, OPEN, StdioTests((("", "29"),)), language="c", limits=limits).passed
    code = "import os\ndef f(n):\n    for _ in range(n): os.open('/dev/null', 0)\n    return n"
    free = 32 - 5  # three streams, questions and answers
    assert judge(pool, code, FunctionTests("f", (Call((free,), free),)), limits=limits).passed
    verdict = judge(pool, code, FunctionTests("f", (Call((free + 1,), free + 1),)), limits=limits)
    assert verdict.status == "error" and "Too many open files" in verdict.detail


# ---- output ----

WRITE = {
    "function": "import sys\ndef f():\n    sys.{stream}.write('x' * {count})\n    return 1",
    "python": "import sys\nsys.{stream}.write('x' * {count})",
    "c": "#include <stdio.h>\nint main(){{ for (int n = 0; n < {count}; n++) putc(120, {stream}); }}",
    "bash": "printf 'x%.0s' {{1..{count}}} >&{stream}",
    "javascript": "process.{stream}.write('x'.repeat({count}));",
}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("kind", KINDS)
def test_output(pool, kind, stream):
    language = "python" if kind == "function" else kind
    if LANGUAGES[language].missing():
        pytest.skip(str(LANGUAGES[language].missing()))
    limits = Limits(output_bytes=5000)
    target = {"stdout": "1", "stderr": "2"}[stream] if kind == "bash" else stream

    def write(count):
        tests = FunctionTests("f", (Call((), 1),))
        if kind != "function":
            tests = StdioTests((("", "x" * min(count, 5000) if stream == "stdout" else ""),), comparison="exact")
        return judge(pool, WRITE[kind].format(stream=target, count=count), tests, language=language, limits=limits)

    verdict = write(5000)
    assert verdict.passed and not execution(verdict).truncated, verdict
    assert getattr(execution(verdict), stream) == "x" * 5000
    verdict = write(5001)
    assert verdict.status == "error" and verdict.tests == (False,) and flags(verdict) == {"output_limit"}, verdict
    assert execution(verdict).status == "output_limit" and execution(verdict).truncated
    assert getattr(execution(verdict), stream) == "x" * 5000


def test_size_of_an_answer(pool):
    limits = Limits(output_bytes=1000)
    frame = len('{"id":"0123456789abcdef","value":""}')
    for size, status in ((limits.reply_bytes - frame, "ok"), (limits.reply_bytes - frame + 1, "output_limit")):
        tests = FunctionTests("f", (Call((size,), "x" * size),))
        verdict = judge(pool, "def f(n): return 'x' * n", tests, limits=limits)
        assert verdict.passed == (status == "ok") and execution(verdict).status == status
        assert flags(verdict) == (set() if status == "ok" else {"result_too_big"})
        assert not execution(verdict).truncated  # of output, there was none
