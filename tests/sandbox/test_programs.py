"""Programs that read stdin and write stdout: how outputs are compared, and what is compiled and run when."""

import math

import pytest

from rl_posttrain.sandbox import languages
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.programs import _agree, _last_words

HUGE = "1" + "0" * 400  # beyond the range of floats
ECHO = "import sys\nsys.stdout.write(sys.stdin.read())\n"


@pytest.fixture(scope="module")
def pool():
    with Pool(PoolConfig(slots=1)) as pool:
        yield pool


def agree(got, expected, **how):
    return _agree(got, expected, StdioTests((("", expected),), **how))


def require(name):
    missing = languages.LANGUAGES[name].missing()
    if missing is not None:
        pytest.skip(missing)


# ---- comparison ----


@pytest.mark.parametrize(
    ("got", "expected", "lines", "exact", "tokens"),
    [
        ("1 2\n", "1 2\n", True, True, True),
        ("1 2", "1 2\n", True, False, True),
        ("1 2 \t\n\n\n", "1 2\n", True, False, True),
        ("1 2\r\n3\r\n", "1 2\n3\n", True, False, True),
        ("\n1 2\n", "1 2\n", False, False, True),
        (" 1 2\n", "1 2\n", False, False, True),
        ("1  2\n", "1 2\n", False, False, True),
        ("1\n2\n", "1 2\n", False, False, True),
        ("1\n\n2\n", "1\n2\n", False, False, True),
        ("12\n", "1 2\n", False, False, False),
        ("1 2 2\n", "1 2\n", False, False, False),
        ("1\n", "1 2\n", False, False, False),
        ("", "", True, True, True),
        ("\n \n", "", True, False, True),
        ("0\n", "", False, False, False),
        ("", "0\n", False, False, False),
        ("yes\n", "YES\n", False, False, False),
        ("1.0\n", "1\n", False, False, False),
        ("01\n", "1\n", False, False, False),
        ("-0\n", "0\n", False, False, False),
        ("e\u0301\n", "\u00e9\n", False, False, False),  # texts are compared, not what they look like
        ("a\u00a0\u3000\n", "a\n", True, False, True),  # no-break and ideographic space at the end are white space
        ("a\u00a0b\n", "a b\n", False, False, True),
        ("a\u2028b\n", "a\nb\n", False, False, True),  # "lines" end with \n alone
        ("a\x00\n", "a\n", False, False, False),
        ("a\u200b\n", "a\n", False, False, False),  # a space of no width is not white space
    ],
)
def test_the_three_comparisons(got, expected, lines, exact, tokens):
    found = [agree(got, expected, comparison=name) for name in ("lines", "exact", "tokens")]
    assert found == [lines, exact, tokens]


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("0.333333", "0.33333333", True),
        ("0.3334", "0.33333333", False),
        ("1e-9", "0", True),  # absolute
        ("2e-5", "0", False),
        ("1000000.5", "1000000", True),  # relative
        ("1000002", "1000000", False),
        ("-0.0", "0.0", True),
        ("+1", "1", True),
        (".5", "0.5", True),
        ("1e3", "1000", True),
        ("nan", "nan", True),
        ("NaN", "nan", True),
        ("nan", "0", False),
        ("0", "nan", False),
        ("inf", "inf", True),
        ("Infinity", "inf", True),
        ("-inf", "inf", False),
        ("1e308", "inf", False),
        ("inf", "1e308", False),
        (HUGE, HUGE, True),
        ("inf", HUGE, False),
        (HUGE, "inf", False),
        ("1e999", HUGE, False),
        (HUGE + "0", HUGE, False),
        ("0x10", "16", False),
        ("abc", "abc", True),
        ("abc", "abd", False),
        ("1.0,", "1.0", False),
        ("1.0 x 2.0000001", "1 x 2", True),
        ("1.0 2.0", "1.0", False),
        ("x", "0", False),
        ("0", "x", False),
    ],
)
def test_tokens_within_a_tolerance(got, expected, same):
    assert agree(got, expected, comparison="tokens", tolerance=1e-6) is same


def test_without_a_tolerance_numbers_are_words():
    assert not agree("1.0", "1", comparison="tokens")
    assert agree("nan", "nan", comparison="tokens") and not agree("NaN", "nan", comparison="tokens")


@pytest.mark.parametrize("comparison", ["lines", "exact"])
def test_a_tolerance_that_would_do_nothing_is_refused(comparison):
    with pytest.raises(ValueError, match="use 'tokens'"):
        StdioTests((("", ""),), comparison=comparison, tolerance=1e-6)
    for tolerance in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="0 or a positive number"):
            StdioTests((("", ""),), comparison="tokens", tolerance=tolerance)


@pytest.mark.parametrize("comparison", ["lines", "exact", "tokens"])
def test_comparisons_of_what_a_program_really_wrote(pool, comparison):
    cases = (("1 2\n", "1 2\n"), ("1 2", "1 2\n"), (" 1 2\n", "1 2\n"), ("2 1\n", "1 2\n"))
    verdict = judge(pool, ECHO, StdioTests(cases, comparison=comparison))
    wanted = {"lines": (True, True, False, False), "exact": (True, False, False, False)}
    assert verdict.tests == wanted.get(comparison, (True, True, True, False))


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("Traceback\n  File x\nValueError: no\n", "ValueError: no"),
        ("x.js:1\nthrow new Error()\n^\n\nTypeError: no\n    at f (x.js:1)\n\nNode.js v20\n", "TypeError: no"),
        (
            'Exception in thread "main" java.lang.RuntimeException: no\n\tat Main.main(Main.java:1)\n',
            'Exception in thread "main" java.lang.RuntimeException: no',
        ),
        ("terminate called after throwing\n  what():  no\n", "what():  no"),
        ("panic: no\n\ngoroutine 1 [running]:\nmain.main()\n\t/tmp/main.go:1 +0x1\n", "panic: no"),
        ("thread 'main' panicked at main.rs:1:1:\nno\nnote: run with `RUST_BACKTRACE=1` to see\n", "no"),
        ("first\nlast\n", "last"),
        ("", ""),
        ("x" * 1000, "x" * 200),
    ],
)
def test_the_line_that_names_the_error(stderr, words):
    assert _last_words(stderr) == words


# ---- checkers ----

FACTORS = StdioTests(
    (("15\n", "3 5\n"), ("14\n", "2 7\n")),
    checker="""
def check(stdin, stdout, expected):
    factors = [int(word) for word in stdout.split()]
    product = 1
    for factor in factors:
        product *= factor
    return product == int(stdin) and 1 not in factors and len(factors) == len(expected.split())
""",
)


def test_a_checker_takes_every_right_answer(pool):
    right = "n = int(input())\nd = next(d for d in range(2, n) if n % d == 0)\nprint(n // d)\nprint(d)"
    assert judge(pool, right, FACTORS).passed  # in the other order, and on two lines
    verdict = judge(pool, "n = int(input())\nprint(3, n // 3)", FACTORS)
    assert verdict.status == "wrong" and verdict.outcomes == ("pass", "wrong")


def test_a_checker_is_not_asked_about_runs_that_failed(pool):
    verdict = judge(pool, "n = int(input())\nprint(3, 5)\nassert n != 14", FACTORS)
    assert verdict.outcomes == ("pass", "error") and "AssertionError" in verdict.detail
    always = StdioTests((("", ""),), checker="def check(stdin, stdout, expected): return True")
    assert judge(pool, "print('anything')", always).passed
    assert judge(pool, "raise SystemExit(3)", always).status == "error"


def test_an_answer_on_which_the_checker_stumbles_is_wrong(pool):
    verdict = judge(pool, "print('three', 'five')", FACTORS)
    assert verdict.status == "wrong" and verdict.outcomes == ("wrong", "wrong")


def test_a_checker_sees_programs_of_any_language(pool):
    require("c")
    code = '#include <stdio.h>\nint main(void){int n;scanf("%d",&n);printf("%d %d",n/(n%2?3:2),n%2?3:2);}'
    assert judge(pool, code, FACTORS, language="c").passed


# ---- what is run, and how often ----

SLEEPER = "import time\nn = int(input())\nprint(n, flush=True)\nif n == 2: time.sleep(60)"
CASES = tuple((f"{n}\n", f"{n}\n") for n in range(1, 5))


def test_after_a_time_limit_the_other_cases_are_skipped(pool):
    limits = Limits(wall_seconds=0.5)
    verdict = judge(pool, SLEEPER, StdioTests(CASES), limits=limits)
    assert verdict.status == "timeout" and verdict.tests == (True, False, False, False)
    assert verdict.outcomes == ("pass", "timeout", "skipped", "skipped")
    assert [each.status for each in verdict.executions] == ["ok", "time_limit"]


def test_after_a_time_limit_a_checker_judges_what_had_ended(pool):
    tests = StdioTests(CASES, checker="def check(stdin, stdout, expected): return stdout == expected")
    verdict = judge(pool, SLEEPER, tests, limits=Limits(wall_seconds=0.5))
    assert verdict.status == "timeout" and verdict.outcomes == ("pass", "timeout", "skipped", "skipped")


def test_other_failures_leave_the_other_cases(pool):
    code = "n = int(input())\nif n == 2: bytearray(1 << 30)\nif n == 3: print('x' * 100_000)\nprint(n)"
    verdict = judge(pool, code, StdioTests(CASES))
    assert verdict.outcomes == ("pass", "error", "error", "pass") and "memory limit" in verdict.detail
    assert [each.status for each in verdict.executions] == ["ok", "memory_limit", "output_limit", "ok"]
    assert [each.truncated for each in verdict.executions] == [False, False, True, False]


def counted(pool, *arguments, **keywords):
    """A verdict, with the number of runs it took and the containers that were started for them."""
    pool.statistics()
    verdict = judge(pool, *arguments, **keywords)
    found = pool.statistics()
    return verdict, found["runs"], found["containers"]


def test_a_program_is_compiled_once_and_run_as_often_as_there_are_cases():
    require("c")
    double = '#include <stdio.h>\nint main(void){int n;scanf("%d",&n);printf("%d\\n",2*n);}'
    doubled = StdioTests(tuple((f"{n}\n", f"{2 * n}\n") for n in range(5)))
    with Pool(PoolConfig(slots=1)) as pool:
        verdict, runs, containers = counted(pool, double, doubled, language="c")
        assert verdict.passed and (runs, containers) == (1 + 5, 1)
        assert len(verdict.executions) == 5  # the compiler's is shown when it failed
        assert pool.statistics().get("runs") == 0
        verdict, runs, containers = counted(pool, double, StdioTests((("7", "15"),)), language="c")
        assert verdict.status == "wrong" and (runs, containers) == (1, 0)
        verdict, runs, _ = counted(pool, double + "\n", doubled, language="c")
        assert verdict.passed and runs == 1 + 5  # another source


def test_a_failed_compilation_is_remembered():
    require("c")
    with Pool(PoolConfig(slots=1)) as pool:
        for wanted in (1, 0):
            verdict, runs, _ = counted(pool, "int main(void) { return x; }", StdioTests(CASES), language="c")
            assert verdict.status == "compile_error" and runs == wanted
            assert verdict.outcomes == ("compile_error",) * 4


@pytest.mark.slow
def test_a_right_program_is_not_compiled_for_another_language():
    require("c")
    require("cpp")
    both = '#include <stdio.h>\nint main(void){puts(sizeof(\'a\') == 1 ? "cpp" : "c");}'
    with Pool(PoolConfig(slots=1)) as pool:
        assert judge(pool, both, StdioTests((("", "c"),)), language="c").passed
        assert judge(pool, both, StdioTests((("", "cpp"),)), language="cpp").passed


@pytest.mark.parametrize("runs_per_slot", [1, 1000])
def test_cases_are_runs_of_their_own(runs_per_slot):
    code = "import os\nprint(os.path.exists('/tmp/left'), input())\nopen('/tmp/left', 'w').close()"
    with Pool(PoolConfig(slots=1, runs_per_slot=runs_per_slot)) as pool:
        tests = StdioTests((("1", "False 1"), ("2", "False 2")))
        verdict, runs, containers = counted(pool, code, tests)
        assert verdict.passed and runs == 2
        assert containers == 1 if runs_per_slot > 1 else containers >= 2


def test_function_calls_are_for_python(pool):
    require("c")
    with pytest.raises(ValueError, match="FunctionTests is for Python; language='c'"):
        judge(pool, "int f;", FunctionTests("f", (Call((), 1),)), language="c")
