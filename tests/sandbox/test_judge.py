"""Verdicts on programs that run in the real sandbox."""

import resource

import pytest

from rl_posttrain.sandbox.judge import judge, judge_many
from rl_posttrain.sandbox.kinds import Call, CheckTests, FunctionTests, StdioTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig

ADD = FunctionTests("add", (Call((1, 2), 3), Call((5, 6), 11)))
DOUBLE = StdioTests((("21\n", "42\n"), ("4", "8")))


@pytest.fixture(scope="module")
def pool():
    with Pool(PoolConfig(slots=2)) as pool:
        yield pool


def limited(**limits):
    return Pool(PoolConfig(slots=1, limits=Limits(**limits)))


# ---- function calls ----


def test_a_right_function_passes_and_shows_its_run(pool):
    verdict = judge(pool, "def add(a, b):\n    print('adding')\n    return a + b\n", ADD)
    assert verdict.passed and verdict.tests == (True, True)
    (execution,) = verdict.executions
    assert (execution.status, execution.exit_code, execution.signal) == ("ok", 0, None)
    assert execution.stdout == "adding\nadding\n"
    assert 0 < execution.cpu_s < 2 and execution.wall_s > 0
    assert 4 << 20 < execution.peak_memory_bytes < 512 << 20
    assert execution.flags == () and execution.processes_left == 0


def test_a_wrong_function_fails_test_by_test(pool):
    verdict = judge(pool, "def add(a, b):\n    return 3\n", ADD)
    assert verdict.status == "wrong" and verdict.tests == (True, False) and verdict.fraction == 0.5
    assert "test 2" in verdict.detail and "11" in verdict.detail


def test_an_exception_is_an_error_with_the_candidates_own_frames(pool):
    verdict = judge(pool, "def inner():\n    return 1 / 0\ndef add(a, b):\n    return inner()\n", ADD)
    assert verdict.status == "error" and verdict.tests == (False, False)
    trace = verdict.executions[0].traceback
    assert trace.count('File "') == 2 and "line 4, in add" in trace and "return 1 / 0" in trace
    assert "harness" not in trace


def test_an_exception_in_one_call_leaves_the_others(pool):
    verdict = judge(pool, "def add(a, b):\n    assert a < 5\n    return a + b\n", ADD)
    assert verdict.status == "error" and verdict.tests == (True, False)


@pytest.mark.parametrize("code", ["x = y", "import nothing_of_the_kind", "pass", "raise SystemExit"])
def test_code_that_does_not_load_or_lacks_the_entry_is_an_error(pool, code):
    verdict = judge(pool, code, ADD)
    assert verdict.status == "error" and verdict.tests == (False, False)


@pytest.mark.parametrize("code", ["def add(a b): pass", "  x = 1", "if True:\n\tx = 1\n        y = 2", "\0"])
def test_code_that_the_grammar_refuses_is_a_compile_error(pool, code):
    verdict = judge(pool, code, ADD)
    assert verdict.status == "compile_error" and verdict.tests == (False, False)
    assert verdict.outcomes == ("compile_error", "compile_error")


def test_methods_get_a_fresh_instance(pool):
    code = "class Solution:\n    n = 0\n    def up(self):\n        self.n += 1\n        return self.n\n"
    assert judge(pool, code, FunctionTests("Solution.up", (Call((), 1), Call((), 1)))).passed


def test_every_plain_type_crosses_both_ways(pool):
    values = [None, True, 2**80, -1.5, float("inf"), "é\n", b"\x00\xff", (1, [2]), {(1, 2): {3}}, set(), 1j]
    tests = FunctionTests("same", tuple(Call((value,), value) for value in values))
    assert judge(pool, "def same(value): return value", tests).passed


def test_tolerance_is_applied(pool):
    code = "def third(): return 0.33333"
    assert judge(pool, code, FunctionTests("third", (Call((), 1 / 3),), tolerance=1e-4)).passed
    assert judge(pool, code, FunctionTests("third", (Call((), 1 / 3),))).status == "wrong"


def test_expected_values_never_enter_the_sandbox(pool):
    code = """
import gc, sys
def find(n):
    seen = [o for o in gc.get_objects() if isinstance(o, (list, tuple, dict))]
    frames, f = [], sys._getframe()
    while f: frames.append({**f.f_globals, **f.f_locals}); f = f.f_back
    return "".join(map(str, [918, 273, 645])) in repr(seen) + repr(frames)
"""
    verdict = judge(pool, code, FunctionTests("find", (Call((1,), 918273645),)))
    assert verdict.status == "wrong" and verdict.detail.endswith("got false")


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)", "raise SystemExit", "exit()"])
@pytest.mark.parametrize("where", ["import", "call"])
def test_o16_a_clean_exit_is_not_success(pool, leave, where):
    body = f"{leave}\ndef add(a, b): return a + b" if where == "import" else f"def add(a, b):\n    {leave}"
    verdict = judge(pool, f"import os, sys\n{body}\n", ADD)
    assert verdict.status == "error" and verdict.tests == (False, False)


@pytest.mark.parametrize(
    "code",
    [
        # before any question, with the sandbox's own frames
        "import os, struct\n"
        "for b in (b'{\"ok\":1}', b'{\"value\":3}', b'{\"value\":11}'):\n"
        "    os.write(4, struct.pack('>I', len(b)) + b)\n"
        "def add(a, b): return 0",
        # a second reply beside the first
        "import sys\nharness = sys.modules['harness']\n"
        "def add(a, b):\n    harness.send(b'{\"value\":3}'); return a + b",
        # the reply to the last question, twice
        "import sys\nharness = sys.modules['harness']\nold = harness.send\n"
        "def twice(data): old(data); old(data)\nharness.send = twice\ndef add(a, b): return a + b",
        # garbage on the channel after right answers
        "import os, atexit, threading\n"
        "def add(a, b):\n    threading.Timer(0.0, lambda: os.write(4, b'xx')).start(); return a + b",
    ],
    ids=["at import", "beside", "twice", "garbage"],
)
def test_tampering_fails_all_tests_and_is_flagged(pool, code):
    verdict = judge(pool, code, ADD)
    assert not verdict.passed and not all(verdict.tests)
    if "Timer" not in code:  # the timer may also lose the race and write nothing
        assert verdict.status == "malformed" and verdict.tests == (False, False)
        assert {flag.name for flag in verdict.flags} & {"forged_frame", "unsolicited_frame"}


def test_a_huge_reply_is_flagged(pool):
    code = "import os\ndef add(a, b):\n    os.write(4, b'\\xff\\xff\\xff\\xffxx')\n    while True: pass"
    verdict = judge(pool, code, ADD)
    assert not verdict.passed and [flag.name for flag in verdict.flags] == ["result_too_big"]
    assert verdict.executions[0].status == "output_limit"


def test_a_process_that_will_not_end_is_killed_and_flagged(pool):
    code = "import os, time\nos._exit = lambda code: time.sleep(60)\ndef add(a, b): return a + b"
    verdict = judge(pool, code, ADD)
    assert verdict.passed and [flag.name for flag in verdict.flags] == ["lingering"]
    assert verdict.executions[0].signal == 9


# ---- stdin and stdout ----


def test_a_right_program_passes(pool):
    verdict = judge(pool, "print(int(input()) * 2)", DOUBLE)
    assert verdict.passed and [e.stdout for e in verdict.executions] == ["42\n", "8\n"]


def test_a_wrong_program_fails_case_by_case(pool):
    verdict = judge(pool, "print(42)", DOUBLE)
    assert verdict.status == "wrong" and verdict.tests == (True, False)


@pytest.mark.parametrize(
    ("code", "stdout", "exit_code"),
    [
        ("import sys; print(42); sys.exit()", "42\n", 0),
        ("print(42); exit()", "42\n", 0),
        ("print(42); raise SystemExit(3)", "42\n", 3),
        ("import sys; print(42); sys.exit('no')", "42\n", 1),
        ("print(42); 1 / 0", "42\n", 1),
        ("import atexit; atexit.register(print, 42)", "42\n", 0),
        (
            "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print(42))).start()",
            "42\n",
            0,
        ),
        ("if __name__ == '__main__': print(42)", "42\n", 0),
        ("import sys; sys.stdout.write('42')", "42", 0),
        ("import sys; print(sum(map(int, sys.stdin.read().split())) * 2)", "42\n", 0),
        ("print(int(open(0).readline()) * 2)", "42\n", 0),
        ("import asyncio\nasync def main(): print(42)\nasyncio.run(main())", "42\n", 0),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(42).x)", "42\n", 0),
    ],
)
def test_programs_behave_as_under_python_main(pool, code, stdout, exit_code):
    verdict = judge(pool, code, StdioTests((("21\n", "42\n"),)))
    (execution,) = verdict.executions
    assert (execution.stdout, execution.exit_code) == (stdout, exit_code)
    assert verdict.passed == (exit_code == 0)


def test_trailing_white_space_does_not_matter_and_other_space_does(pool):
    tests = StdioTests((("", "1 2\n3\n"),))
    assert judge(pool, "print('1 2  \\n3\\n\\n')", tests).passed
    assert not judge(pool, "print('1  2\\n3')", tests).passed
    assert not judge(pool, "print('1 2\\n\\n3')", tests).passed


def test_large_stdin_that_is_not_read_is_fine(pool):
    assert judge(pool, "print(42)", StdioTests((("x" * 3_000_000, "42"),))).passed


def test_large_stdin_that_is_read_arrives_whole(pool):
    tests = StdioTests((("x" * 3_000_000, "3000000"),))
    assert judge(pool, "import sys; print(len(sys.stdin.read()))", tests).passed


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_o18_invalid_bytes_do_not_stop_the_judge(pool, stream):
    code = f"import sys\nprint(int(input()) * 2, flush=True)\nsys.{stream}.buffer.write(b'\\xff\\xfe')"
    verdicts = judge_many(pool, [("print(int(input()) * 2)", DOUBLE), (code, DOUBLE), ("print(0)", DOUBLE)])
    assert [verdict.passed for verdict in verdicts] == [True, stream == "stderr", False]
    assert "\ufffd\ufffd" in getattr(verdicts[1].executions[0], stream)


def test_o18_invalid_bytes_beside_function_answers(pool):
    code = "import sys\ndef add(a, b):\n    sys.stdout.buffer.write(b'\\xff\\xfe'); return a + b"
    assert judge(pool, code, ADD).passed


def test_a_frame_from_a_program_is_tampering(pool):
    code = "import os\nprint(int(input()) * 2)\nos.write(4, b'\\0\\0\\0\\2ok')"
    verdict = judge(pool, code, DOUBLE)
    assert verdict.status == "malformed" and verdict.tests == (False, False)
    assert "unsolicited_frame" in {flag.name for flag in verdict.flags}


# ---- limits ----


def test_cpu_limit():
    with limited(cpu_seconds=0.3, wall_seconds=30.0) as pool:
        verdict = judge(pool, "def add(a, b):\n    while a < 5 or True: pass", ADD)
        assert verdict.status == "timeout" and verdict.executions[0].status == "time_limit"
        assert 0.3 <= verdict.executions[0].cpu_s < 0.6
        assert judge(pool, "while True: pass", DOUBLE).tests == (False, False)
        assert judge(pool, "def add(a, b): return a + b", ADD).passed


def test_cpu_limit_counts_all_threads():
    code = "import threading, hashlib\ndef burn():\n    while True: hashlib.sha256(bytes(1 << 20))\n"
    code += "for _ in range(4): threading.Thread(target=burn).start()"
    with limited(cpu_seconds=0.3, wall_seconds=30.0) as pool:
        execution = judge(pool, code, StdioTests((("", "x"),))).executions[0]
    assert execution.status == "time_limit" and 0.3 <= execution.cpu_s < 0.9


def test_wall_limit():
    with limited(wall_seconds=0.5) as pool:
        verdict = judge(pool, "import time\ndef add(a, b): time.sleep(60)", ADD)
        assert verdict.status == "timeout"
        assert verdict.executions[0].status == "time_limit" and verdict.executions[0].cpu_s < 0.4
        assert [flag.name for flag in verdict.flags] == ["wall_timeout"]
        verdict = judge(pool, "import signal, os\nos.kill(os.getpid(), signal.SIGSTOP)", DOUBLE)
        assert verdict.status == "timeout" and verdict.tests == (False, False)


@pytest.mark.parametrize("tests", [FunctionTests("f", (Call((), 1),)), StdioTests((("", "1"),))])
def test_memory_limit(tests):
    code = "def f():\n    x = bytearray(200 << 20)\n    return 1\nif __name__ == '__main__': print(f())"
    with limited(memory_bytes=128 << 20) as pool:
        verdict = judge(pool, code, tests)
        assert verdict.status == "error" and verdict.executions[0].status == "memory_limit"
        assert "MemoryError" in verdict.executions[0].traceback
        assert verdict.executions[0].peak_memory_bytes < 128 << 20
    with limited(memory_bytes=320 << 20) as pool:
        verdict = judge(pool, code, tests)
        assert verdict.passed and verdict.executions[0].peak_memory_bytes > 200 << 20


THREADS = """
import threading
def count():
    done, started = threading.Event(), 0
    try:
        for _ in range(40):
            threading.Thread(target=done.wait).start(); started += 1
    except RuntimeError:
        pass
    done.set()
    return started
"""


def test_process_limit_counts_threads():
    for processes in (1, 5, 16):
        with limited(processes=processes) as pool:
            tests = FunctionTests("count", (Call((), processes - 1),))
            assert judge(pool, THREADS, tests).passed


def test_process_limit_counts_processes_where_they_are_allowed():
    code = """
import os, time
def count():
    started = 0
    for _ in range(40):
        try: pid = os.fork()
        except OSError: break
        if pid == 0: time.sleep(60)
        started += 1
    return started
"""
    with limited(processes=6) as pool:
        tests = FunctionTests("count", (Call((), 5),))
        verdict = judge(pool, code, tests, profile="multi")
        assert verdict.passed and verdict.executions[0].processes_left == 5
        assert judge(pool, code, FunctionTests("count", (Call((), 0),))).passed


def test_file_limits():
    code = """
def one(n):
    with open('/tmp/x', 'wb') as file: file.write(bytes(n))
    return n
def many(n):
    for i in range(n): one(60_000); __import__('os').rename('/tmp/x', f'/tmp/{i}')
    return n
"""
    with limited(file_bytes=1 << 20) as pool:
        assert judge(pool, code, FunctionTests("one", (Call((1 << 20,), 1 << 20),))).passed
        verdict = judge(pool, code, FunctionTests("one", (Call(((1 << 20) + 1,), 0),)))
        assert verdict.status == "error" and "OSError" in verdict.detail
        assert judge(pool, code, FunctionTests("many", (Call((10,), 10),))).passed
        verdict = judge(pool, code, FunctionTests("many", (Call((30,), 30),)))
        assert verdict.status == "error" and "No space left" in verdict.detail


def test_open_file_limit():
    code = "def f(n):\n    return len([open('/tmp/x', 'w') for _ in range(n)])"
    with limited(open_files=32) as pool:
        assert judge(pool, code, FunctionTests("f", (Call((20,), 20),))).passed
        verdict = judge(pool, code, FunctionTests("f", (Call((40,), 40),)))
        assert verdict.status == "error" and "Too many open files" in verdict.detail


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_o17_an_output_flood_is_killed_and_the_judge_stays_small(pool, stream):
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 100_000)"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for tests in (DOUBLE, ADD):
        verdict = judge(pool, code, tests)
        assert verdict.status == "error" and "output limit" in verdict.detail
        execution = verdict.executions[0]
        assert execution.status == "output_limit" and execution.truncated
        assert len(getattr(execution, stream)) == 1 << 16
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth < 50 << 10  # KiB


def test_o17_a_right_answer_that_was_cut_never_passes():
    with limited(output_bytes=1000) as pool:
        exact = StdioTests((("", "x" * 1000),))
        assert judge(pool, "import sys; sys.stdout.write('x' * 1000)", exact).passed
        verdict = judge(pool, "import sys; sys.stdout.write('x' * 1001)", exact)
        assert not verdict.passed and verdict.executions[0].truncated
        verdict = judge(pool, "def add(a, b):\n    print('x' * 600)\n    return a + b", ADD)
        assert not verdict.passed and not all(verdict.tests)


def test_reply_limit_follows_the_output_limit():
    with limited(output_bytes=1000) as pool:
        code = "def f(n): return 'x' * n"
        assert judge(pool, code, FunctionTests("f", (Call((15_000,), "x" * 15_000),))).passed
        assert not judge(pool, code, FunctionTests("f", (Call((16_100,), "x" * 16_100),))).passed


# ---- the tests themselves ----


def test_tests_that_could_not_fail_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        FunctionTests("f", ())
    with pytest.raises(ValueError, match="at least one"):
        StdioTests(())
    with pytest.raises(ValueError, match="entry"):
        FunctionTests("f()", (Call((), 1),))
    with pytest.raises(ValueError, match="tolerance"):
        FunctionTests("f", (Call((), 1),), tolerance=float("nan"))
    with pytest.raises(ValueError, match=r"calls\[0\].expected"):
        FunctionTests("f", (Call((), object()),))


def test_many_verdicts_come_in_order(pool):
    items = [(f"def f(): return {n}", FunctionTests("f", (Call((), n - n % 3),))) for n in range(20)]
    assert [verdict.passed for verdict in judge_many(pool, items)] == [n % 3 == 0 for n in range(20)]


def test_the_wall_clock_stands_still_between_an_answer_and_the_next_question():
    code = "import time\ndef solve(n):\n    time.sleep(0.25)\n    return n\n"
    slow = CheckTests(
        "import time\ndef check(candidate):\n    for n in range(3):\n"
        "        assert candidate(n) == n\n        time.sleep(0.6)\n",
        "solve",
    )
    with limited(wall_seconds=1.5) as pool:
        verdict = judge(pool, code, slow)
        assert verdict.passed, verdict.detail  # 0.75 s of its own, 2.5 s in all
        asleep = judge(pool, code.replace("0.25", "0.9"), slow)
        assert asleep.status == "timeout" and not asleep.passed
