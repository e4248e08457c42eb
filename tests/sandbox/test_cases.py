"""Cases that other projects met: O16 clean exits, O17 floods of output, O18 bytes that are no text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_posttrain.sandbox.judge import judge, judge_many, submit
from rl_posttrain.sandbox.kinds import Call, CheckTests, FunctionTests, PytestTests, StdioTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig

ROOT = Path(__file__).resolve().parents[2]
ADD = "def add(a, b): return a + b"
FUNCTION = FunctionTests("add", (Call((1, 2), 3), Call((5, 6), 11)))
STDIO = StdioTests((("1 2", "3"), ("5 6", "11")))
CHECK = CheckTests("def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(5, 6) == 11\n", "add")
PYTEST = PytestTests("from solution import add\ndef test_add():\n    assert add(1, 2) == 3\n", ("test_add",))
READ = "print(add(*map(int, input().split())))"


@pytest.fixture(scope="module", params=[1000, pytest.param(1, marks=pytest.mark.slow)], ids=["fast", "safe"])
def pool(request):
    with Pool(PoolConfig(slots=2, runs_per_slot=request.param)) as pool:
        yield pool


# ---- O16 ----

EXITS = {
    "exit(0)": "exit(0)",
    "quit()": "quit()",
    "sys.exit()": "sys.exit()",
    "os._exit(0)": "os._exit(0)",
    "SystemExit": "raise SystemExit",
    "SystemExit(0)": "raise SystemExit(0)",
    "a subclass": "raise type('Fine', (SystemExit,), {})(0)",
    "in a thread": "thread = threading.Thread(target=os._exit, args=(0,)); thread.start(); thread.join()",
    "at exit": "atexit.register(os._exit, 0); raise SystemExit",
    "by a signal handler": "signal.signal(10, lambda *_: os._exit(0)); os.kill(os.getpid(), 10); time.sleep(1)",
}
IMPORTS = "import atexit, os, signal, sys, threading, time\n"


@pytest.mark.parametrize("where", ["import", "inside"])
@pytest.mark.parametrize("leave", EXITS)
def test_o16_a_clean_exit_of_a_function_is_not_success(pool, leave, where):
    if where == "import":
        code = f"{IMPORTS}{EXITS[leave]}\n{ADD}\n"
    else:
        code = f"{IMPORTS}def add(a, b):\n    {EXITS[leave]}\n    return a + b\n"
    verdict = judge(pool, code, FUNCTION)
    assert verdict.status == "error" and verdict.tests == (False, False), verdict
    assert verdict.fraction == 0.0


@pytest.mark.parametrize("where", ["import", "inside"])
@pytest.mark.parametrize("leave", EXITS)
def test_o16_a_clean_exit_of_a_program_is_not_success(pool, leave, where):
    if where == "import":
        code = f"{IMPORTS}{EXITS[leave]}\n{ADD}\n{READ}\n"
    else:
        code = f"{IMPORTS}def add(a, b):\n    {EXITS[leave]}\n    return a + b\n{READ}\n"
    verdict = judge(pool, code, STDIO)
    assert verdict.status == "wrong" and verdict.tests == (False, False), verdict
    assert all(execution.exit_code == 0 for execution in verdict.executions)  # it was as clean as can be


@pytest.mark.parametrize("tests", [CHECK, PYTEST], ids=["check", "pytest"])
@pytest.mark.parametrize("where", ["import", "inside"])
@pytest.mark.parametrize("leave", ["exit(0)", "os._exit(0)", "SystemExit"])
def test_o16_a_clean_exit_under_assertions_is_not_success(pool, leave, where, tests):
    if where == "import":
        code = f"{IMPORTS}{EXITS[leave]}\n{ADD}\n"
    else:
        code = f"{IMPORTS}def add(a, b):\n    {EXITS[leave]}\n    return a + b\n"
    verdict = judge(pool, code, tests)
    assert verdict.status in ("wrong", "error") and verdict.tests == (False,), verdict


@pytest.mark.parametrize("tests", [FUNCTION, STDIO, CHECK, PYTEST], ids=["function", "stdio", "check", "pytest"])
def test_o16_the_right_solution_passes(pool, tests):
    code = f"{ADD}\nif __name__ == '__main__': {READ}\n"
    assert judge(pool, code, tests).passed


def test_o16_an_exit_after_the_right_answer_of_a_program_is_fine(pool):
    for leave in ("exit(0)", "sys.exit()", "SystemExit"):
        assert judge(pool, f"{IMPORTS}{ADD}\n{READ}\n{EXITS[leave]}", STDIO).passed
    assert judge(pool, f"{IMPORTS}{ADD}\n{READ}\nsys.stdout.flush()\nos._exit(0)", STDIO).passed
    assert judge(pool, f"{IMPORTS}{ADD}\n{READ}\nsys.exit(1)", STDIO).status == "error"


# ---- O17 ----

# Peak memory of a trainer that judges floods, in KiB, before and after, and the verdicts.
FLOODS = """
import json, resource, sys
from rl_posttrain.sandbox.judge import judge, judge_many
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests
from rl_posttrain.sandbox.pool import Pool, PoolConfig
floods = json.loads(sys.argv[1])
function, stdio = FunctionTests("f", (Call((), 1),)), StdioTests((("", "1"),))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with Pool(PoolConfig(slots=2, runs_per_slot=int(sys.argv[2]))) as pool:
    right = "def f(): return 1\\nif __name__ == '__main__': print(1)"
    assert all(verdict.passed for verdict in judge_many(pool, [(right, function), (right, stdio)] * 4))
    before = peak()
    verdicts = judge_many(pool, [(code, tests) for code in floods for tests in (function, stdio)])
    after = peak()
    assert judge(pool, right, function).passed
found = [(v.status, v.detail, v.executions[0].status, v.executions[0].truncated,
          len(v.executions[0].stdout), len(v.executions[0].stderr)) for v in verdicts]
print(json.dumps([before, after, found]))
"""
FLOOD = {
    "print": "while True: print('x' * 1000)",
    "large pieces": "import sys\nwhile True: sys.stdout.write('x' * 10_000_000)",
    "stderr": "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
    "bytes": "import os\nwhile True: os.write(1, bytes(1 << 20))",
    "both": "import os\nwhile True: os.write(1, b'x' * 4096); os.write(2, b'y' * 4096)",
    "threads": (
        "import os, threading\ndef flood():\n    while True: os.write(1, b'x' * 65536)\n"
        "for _ in range(4): threading.Thread(target=flood).start()\nflood()"
    ),
}


@pytest.mark.parametrize("runs_per_slot", [1000, pytest.param(1, marks=pytest.mark.slow)])
def test_o17_an_endless_print_is_ended_by_its_limit_in_little_memory(runs_per_slot):
    command = [sys.executable, "-c", FLOODS, json.dumps(list(FLOOD.values())), str(runs_per_slot)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after, found = json.loads(done.stdout)
    assert len(found) == 2 * len(FLOOD)
    for status, detail, execution, truncated, stdout, stderr in found:
        assert (status, execution, truncated) == ("error", "output_limit", True)
        assert "output limit" in detail
        assert max(stdout, stderr) == 1 << 16
    assert after - before < 50 << 10


@pytest.mark.parametrize("comparison", ["lines", "exact", "tokens"])
@pytest.mark.parametrize(
    "after", ["'\\n' * 100_000", "' ' * 100_000", "'z'", "'\\n' + 'x' * 100_000"], ids=["lines", "spaces", "z", "more"]
)
def test_o17_a_right_answer_that_was_cut_at_the_cap_never_passes(pool, comparison, after):
    """What is kept would be right: the first `output_bytes` are the answer, with white space that does not matter."""
    limits = Limits(output_bytes=1000)
    tests = StdioTests((("", "x" * 1000),), comparison=comparison)
    assert judge(pool, "import sys\nsys.stdout.write('x' * 1000)", tests, limits=limits).passed
    verdict = judge(pool, f"import sys\nsys.stdout.write('x' * 1000 + {after})", tests, limits=limits)
    assert verdict.status == "error" and "output limit" in verdict.detail and verdict.tests == (False,)
    assert verdict.executions[0].truncated and verdict.executions[0].stdout == "x" * 1000


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_o17_a_function_whose_output_was_cut_never_passes(pool, stream):
    limits = Limits(output_bytes=1000)
    code = f"import sys\ndef add(a, b):\n    print('x' * %d, file=sys.{stream})\n    return a + b"
    assert judge(pool, code % 499, FUNCTION, limits=limits).passed  # twice 500 with the line's end
    verdict = judge(pool, code % 500, FUNCTION, limits=limits)
    assert not verdict.passed and verdict.tests in ((True, False), (False, False))
    assert verdict.executions[0].status == "output_limit" and verdict.executions[0].truncated


def test_o17_a_right_value_after_a_flood_that_was_caught_never_passes(pool):
    code = (
        "import os\ndef add(a, b):\n    try:\n        os.write(1, bytes(1 << 20))\n    finally:\n        return a + b"
    )
    verdict = judge(pool, code, FUNCTION)
    assert not verdict.passed and verdict.executions[0].status == "output_limit"


# ---- O18 ----

BYTES = {"fffe": b"\xff\xfe", "half a character": b"\xe2\x82", "surrogate": b"\xed\xa0\x80", "all": bytes(range(256))}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_o18_invalid_bytes_beside_the_answer_of_a_program(pool, stream, name):
    """On stderr they change nothing; on stdout they are a part of the answer, which is wrong then."""
    code = f"import os\n{ADD}\nprint(add(*map(int, input().split())), flush=True)\n"
    code += f"os.write({1 if stream == 'stdout' else 2}, {BYTES[name]!r})"
    right = f"{ADD}\n{READ}"
    verdicts = judge_many(pool, [(right, STDIO), (code, STDIO), (right, STDIO), ("print(0)", STDIO)])
    assert [verdict.passed for verdict in verdicts] == [True, stream == "stderr", True, False]
    assert verdicts[1].status == ("pass" if stream == "stderr" else "wrong")
    for execution in verdicts[1].executions:
        text = execution.stdout + execution.stderr
        assert "\ufffd" in text and text.encode("utf-8")  # it can be written anywhere
        assert execution.status == "ok"


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_o18_invalid_bytes_beside_the_answer_of_a_function(pool, stream, name):
    code = f"import sys\ndef add(a, b):\n    sys.{stream}.buffer.write({BYTES[name]!r})\n    return a + b"
    verdicts = judge_many(pool, [(ADD, FUNCTION), (code, FUNCTION), (ADD, FUNCTION), ("def add(a, b): 0", FUNCTION)])
    assert [verdict.passed for verdict in verdicts] == [True, True, True, False]
    text = getattr(verdicts[1].executions[0], stream)
    assert "\ufffd" in text and text.encode("utf-8")


@pytest.mark.parametrize("tests", [CHECK, PYTEST], ids=["check", "pytest"])
def test_o18_invalid_bytes_beside_assertions(pool, tests):
    code = "import os\ndef add(a, b):\n    os.write(1, b'\\xff\\xfe')\n    os.write(2, b'\\xff\\xfe')\n    return a + b"
    assert judge(pool, code, tests).passed


@pytest.mark.parametrize(
    "text", ["'\\udcff\\udcfe'", "'\\ud800'", "b'\\xff\\xfe'", "'\\x00'"], ids=["escaped", "surrogate", "bytes", "nul"]
)
def test_o18_values_and_messages_that_are_no_text(pool, text):
    """As a value, in an exception's message, and as a program's output: scored, and fit to be written."""
    tests = FunctionTests("f", (Call((), 1),))
    for code in (
        f"def f(): return {text}",
        f"def f(): raise ValueError({text})",
        f"raise ValueError({text})",
        f"def f(): raise type('E', (Exception,), {{'__str__': lambda self: str({text})}})",
    ):
        verdict = submit(pool, code, tests).result(60)
        assert not verdict.passed and verdict.status in ("wrong", "error", "malformed")
        said = [verdict.detail, *(execution.traceback for execution in verdict.executions)]
        assert all(line.encode("utf-8") is not None for line in said)
    verdict = judge(pool, f"print({text})", StdioTests((("", "1"),)))
    assert not verdict.passed and verdict.executions[0].stdout.encode("utf-8") is not None
    assert judge(pool, ADD, FUNCTION).passed


def test_o18_source_and_input_that_are_no_text(pool):
    for code in ("\udcff\udcfe", "print('\ud800')", "\ufeffprint(3)"):
        verdict = judge(pool, code, STDIO)
        assert verdict.status in ("wrong", "error", "compile_error") and not verdict.passed
    tests = StdioTests((("\udcff\ud800", "?"),))
    verdict = judge(pool, "print(len(input()))", tests)
    assert verdict.status in ("wrong", "error")


def test_o18_compiled_programs_may_print_anything(pool):
    code = '#include <stdio.h>\nint main() { printf("3\\n"); fwrite("\\xff\\xfe", 1, 2, stderr); }'
    if not os.path.exists("/usr/bin/gcc"):
        pytest.skip("no gcc")
    assert judge(pool, code, StdioTests((("", "3"),)), language="c").passed
    broken = "int main() { return \udcff\xff; }"
    assert judge(pool, broken, StdioTests((("", "3"),)), language="c").status == "compile_error"
