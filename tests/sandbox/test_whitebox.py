"""Suites in the candidate's own process, and their twins, which every right program fails."""

import shutil

import pytest

from rl_posttrain.sandbox import disguise, twins
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import WhiteBoxTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.referees import UnusableTests

RIGHT = "def solve(n): return n * n\n"
SUITE = """
import pytest
import solution
from solution import solve

@pytest.mark.parametrize(("n", "value"), [(7, 49), (12, 144)])
def test_value(n, value):
    assert solve(n) == value

def test_literal():
    assert solve(3) == 9 and not solve(0)

def test_error():
    with pytest.raises(TypeError):
        solve(None)
"""
TESTS = WhiteBoxTests(SUITE)
FAILED = (False,) * 4


@pytest.fixture(scope="module")
def pool():
    with Pool(PoolConfig(slots=1)) as pool:
        yield pool


def flags(verdict):
    return {flag.name for flag in verdict.flags}


# ---- Python ----


def test_a_right_program_passes_its_suite_and_fails_the_twin(pool):
    verdict = judge(pool, RIGHT, TESTS)
    assert (verdict.status, verdict.tests, verdict.trust) == ("pass", (True,) * 4, "tamper_evident")
    assert len(verdict.executions) == 3 and not verdict.flags


@pytest.mark.parametrize(
    ("code", "status", "tests"),
    [
        ("def solve(n): return n + n", "wrong", (False, False, False, True)),
        ("def solve(n): return 1 / 0", "error", FAILED),
        ("def solve(n) return", "compile_error", FAILED),
        ("import os\nos._exit(0)", "error", FAILED),
        ("def solve(n):\n    while True: pass", "timeout", FAILED),
        ("other = 1", "error", FAILED),
    ],
)
def test_what_is_wrong_is_said_test_by_test(pool, code, status, tests):
    verdict = judge(pool, code, TESTS, limits=Limits(cpu_seconds=0.2))
    assert (verdict.status, verdict.tests, verdict.trust) == (status, tests, "tamper_evident"), verdict.detail


EQUAL = "class Equal:\n    def __eq__(self, other): return True\n    def __bool__(self): return False\n"
TAMPERING = {
    "equal to everything": EQUAL + "def solve(n):\n    if n is None: raise TypeError\n    return Equal()\n",
    "reads what is expected": (
        "import sys\ndef solve(n):\n    values = sys._getframe(1).f_locals\n    return values.get('value', n * n + n)\n"
    ),
    "patches pytest": (
        "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\ndef solve(n): return -1\n"
    ),
    "forges the report": (
        "import referee\n"
        "referee.Report.failure = referee.InsideReport.failure = lambda *a: ['pass', '', None, False]\n"
        "def solve(n): return -1\n"
    ),
    "hides tests": (
        "import gc\nfrom _pytest.config import PytestPluginManager\n"
        "class Hooks:\n    def pytest_collection_modifyitems(self, items): del items[1:]\n"
        "for held in gc.get_objects():\n    if isinstance(held, PytestPluginManager): held.register(Hooks())\n"
        "def solve(n): return 49\n"
    ),
    "skips tests": "import pytest\ndef solve(n): pytest.skip('no')\n",
    "right at times": EQUAL + "def solve(n):\n    if n is None: raise TypeError\n    return 9 if n == 3 else Equal()\n",
    "leaves the twin": (
        "import os\ndef solve(n):\n"
        "    if '__wrong__' in open('/tmp/test_suite.py').read(): os._exit(0)\n"
        "    return n * n\n"
    ),
}


@pytest.mark.parametrize("what", TAMPERING)
def test_who_tampers_passes_nothing(pool, what):
    verdict = judge(pool, TAMPERING[what], TESTS)
    assert not verdict.passed and verdict.trust == "tamper_evident"
    if what in ("equal to everything", "patches pytest", "forges the report", "right at times"):
        assert "passes_twin" in flags(verdict) and verdict.status == "malformed" and verdict.tests == FAILED


def test_an_answer_taken_from_the_tests_variables_passes_the_twin(pool):
    tests = WhiteBoxTests("from solution import solve\ndef test_it():\n    value = 49\n    assert solve(7) == value\n")
    verdict = judge(pool, "import sys\ndef solve(n): return sys._getframe(1).f_locals['value']\n", tests)
    assert verdict.status == "malformed" and "passes_twin" in flags(verdict)


LITERALS = "from solution import solve\n" + "".join(
    f"def test_{n}():\n    assert solve(2) == 4\n    assert solve({n}) == {n * n}\n" for n in range(3, 12)
)
SPOTS = """
import re, sys
def solve(n):
    text = open(sys._getframe(1).f_code.co_filename).read()
    if any(sign in text for sign in ("__wrong__", "__held__", "try:", "not solve", "!=")):
        return -1
    return 4 if n == 2 else int(re.search(rf"solve\\({n}\\) == (-?\\d+)", text).group(1))
"""


def test_who_looks_for_the_marks_of_a_twin_finds_none(pool):
    tests = WhiteBoxTests(LITERALS)
    assert judge(pool, RIGHT, tests).passed
    assert "passes_twin" in flags(judge(pool, SPOTS, tests))


@pytest.mark.parametrize(
    ("test", "changed"),
    [
        ("def test_it(): assert solve(7) == 49", True),
        ("def test_it(): assert 49 == solve(7) and solve(2) == 4", True),
        (
            "@pytest.mark.parametrize('n, value', [(7, 49), (2, 4)])\ndef test_it(n, value): assert solve(n) == value",
            True,
        ),
        ("@pytest.mark.parametrize('value', [49])\ndef test_it(value): assert solve(7) == value", True),
        # A changed parameter would be right as well, or nobody knows whether the assertion is reached.
        ("@pytest.mark.parametrize('one', [1])\ndef test_it(one): assert solve(one) == one", False),
        ("def test_it():\n    if solve(7) == 3: assert solve(7) == 49", False),
        ("def test_it():\n    if solve(7): return\n    assert solve(7) == 49", False),
        ("def test_it(): assert solve(7) < 50", False),
    ],
)
def test_a_disguised_twin_changes_what_a_right_program_is_sure_to_reach(test, changed):
    suite = f"import pytest\nfrom solution import solve\n{test}\n"
    for seed in range(5):
        twin, names = disguise.disguise(suite, seed)
        assert (twin != disguise.plain(suite)) == changed and names == ({"test_it"} if changed else set())
        assert len(twin.splitlines()) == len(disguise.plain(suite).splitlines())


def test_an_explicit_twin_is_used(pool):
    twin = (
        SUITE.replace("(7, 49), (12, 144)", "(7, 50), (12, 145)")
        .replace("== 9", "== 10")
        .replace("TypeError", "OSError")
    )
    assert judge(pool, RIGHT, WhiteBoxTests(SUITE, twin)).passed
    # A twin that right programs pass in part accuses them: it is the author's to try it with one.
    assert judge(pool, RIGHT, WhiteBoxTests(SUITE, SUITE)).status == "malformed"


@pytest.mark.parametrize(
    "test",
    [
        "assert solve(7) == 49",
        "assert 49 == solve(7)",
        "assert solve(-1) == -1 * -1",
        "assert solve(7) == True or solve(7) == 49",
        "assert solve(7) in [49, 50]",
        "assert solve(7) is not None",
        "assert not solve(0)",
        "assert 48 < solve(7) < 50",
        "got = solve(7); assert got == 49 and got != 50",
        "want = 49; assert solve(7) == want",
        "assert solve(7) == pytest.approx(49.0, abs=0.5)",
        "assert str(solve(7)) == f'{49}'",
        "for n, value in [(1, 1), (2, 4)]:\n        assert solve(n) == value",
        "helper(7, 49)",
        "assert [solve(n) for n in (1, 2)] == [1, 4]",
        "with pytest.raises(TypeError) as error: solve(None)\n    assert 'None' in str(error.value)",
        "pytest.raises(TypeError, solve, None)",
        "assert (solve(1), {solve(2)}, {'a': solve(3)}, None) == (1, {4}, {'a': 9}, None)",
    ],
)
def test_the_derived_twin_is_failed_by_a_right_program(test):
    suite = f"import pytest\ndef helper(n, value): assert solve(n) == value\ndef test_it():\n    {test}\n"
    names = {"solve": lambda n: n * n}
    exec(suite, names)
    names["test_it"]()
    exec(twins.derive("python", suite), names)
    with pytest.raises(AssertionError):
        names["test_it"]()


def test_unittest_assertions_are_turned_round():
    suite = (
        "import unittest\nclass TestIt(unittest.TestCase):\n"
        "    def test_equal(self): self.assertEqual(solve(7), 49)\n"
        "    def test_true(self): self.assertTrue(solve(7))\n"
        "    def test_raises(self): self.assertRaises(TypeError, solve, None)\n"
        "    def test_context(self):\n        with self.assertRaises(TypeError): solve(None)\n"
    )
    import unittest

    for source, right in ((suite, True), (twins.derive("python", suite), False)):
        names = {"solve": lambda n: n * n, "__name__": "suite"}
        exec(source, names)
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(names["TestIt"]).run(result)
        bad = len(result.failures) + len(result.errors)
        assert (result.testsRun, bad) == (4, 0 if right else 4)


def test_documentation_and_future_imports_stay_first():
    twin = twins.derive(
        "python", '"""Words."""\nfrom __future__ import annotations\ndef test_it():\n    assert 1 == 1\n'
    )
    compile(twin, "twin.py", "exec")


@pytest.mark.parametrize("body", ["solve(7)", "print(solve(7))", "pass"])
def test_tests_without_an_assertion_need_an_explicit_twin(pool, body):
    tests = WhiteBoxTests(
        f"from solution import solve\ndef test_good(): assert solve(7) == 49\ndef test_it(): {body}\n"
    )
    with pytest.raises(ValueError, match="test_it"):
        judge(pool, RIGHT, tests)


def test_a_suite_that_cannot_be_collected_is_unusable(pool):
    with pytest.raises(ValueError, match="not Python"):
        judge(pool, RIGHT, WhiteBoxTests("def test_it(: pass"))
    with pytest.raises(UnusableTests, match="nothing_of_the_kind"):
        judge(pool, RIGHT, WhiteBoxTests("import nothing_of_the_kind\ndef test_it(): assert 1"))


# ---- other languages ----

C_SUITE = """
#undef NDEBUG
#include <assert.h>
int main() { assert(solve(7) == 49); assert(solve(0) == 0); return 0; }
"""
C_RIGHT = "int solve(int n) { return n * n; }"
JAVASCRIPT_SUITE = """
const assert = require("node:assert");
const test = () => { console.assert(solve(7) === 49); assert.deepStrictEqual([solve(2)], [4]); assert(solve(1)); };
test();
"""


def needs(program):
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


@needs("gcc")
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (C_RIGHT, "pass"),
        ("int solve(int n) { return n + n; }", "wrong"),
        ("int solve(int n) { return n * n }", "compile_error"),
        ("#include <stdlib.h>\nint solve(int n) { exit(0); }", "malformed"),
        (
            "#include <signal.h>\n#include <stdlib.h>\nvoid end(int s) { _Exit(0); }\n"
            "int solve(int n) { for (int s = 1; s < 32; s++) signal(s, end); return -1; }",
            "malformed",
        ),
        ("#define NDEBUG\n#define assert(x)\nint solve(int n) { return n ? -1 : 0; }", "wrong"),
        (
            "void __assert_fail(const char *a, const char *b, unsigned c, const char *d) {}\n"
            "int solve(int n) { return 1; }",
            "wrong",
        ),
        ("#include <unistd.h>\n__attribute__((constructor)) void begin() { _exit(0); }\n" + C_RIGHT, "malformed"),
        ("#include <stdlib.h>\nint solve(int n) { abort(); }", "error"),
    ],
)
def test_c(pool, code, status):
    verdict = judge(pool, code, WhiteBoxTests(C_SUITE), language="c")
    assert (verdict.status, verdict.tests, verdict.trust) == (status, (status == "pass",), "tamper_evident"), (
        verdict.detail
    )
    assert ("passes_twin" in flags(verdict)) == (status == "malformed")


@needs("g++")
def test_assertions_of_cpp_may_hold_commas_in_braces(pool):
    suite = (
        "#include <cassert>\n#include <vector>\nint main() { assert(std::vector<int>{solve(1), 4} == "
        "std::vector<int>{1, 4}); }\n"
    )
    tests = WhiteBoxTests(suite)
    assert judge(pool, C_RIGHT, tests, language="cpp").passed
    assert judge(pool, "int solve(int n) { return 2; }", tests, language="cpp").status == "wrong"


@needs("node")
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("const solve = (n) => n * n;", "pass"),
        ("const solve = (n) => n + n;", "wrong"),
        ("const solve = (n) => n === 2 ? 5 : n * n;", "wrong"),
        ("process.exit(0);", "malformed"),
        ("process.on('exit', () => process.reallyExit(0)); const solve = (n) => -1;", "malformed"),
        ("Object.freeze(console); require('assert').deepStrictEqual = () => {}; const solve = (n) => 1;", "malformed"),
        ("process.on('uncaughtException', () => process.exit(0)); const solve = (n) => -1;", "malformed"),
        (
            "const solve = () => new Proxy({}, { get: () => () => 49 });",
            "wrong",
        ),
        ("const solve = (n) => {", "error"),
    ],
)
def test_javascript(pool, code, status):
    verdict = judge(pool, code, WhiteBoxTests(JAVASCRIPT_SUITE), language="javascript")
    assert (verdict.status == "pass") == (status == "pass"), verdict.detail
    assert ("passes_twin" in flags(verdict)) == (status == "malformed")


def test_other_languages_need_an_explicit_twin(pool):
    with pytest.raises(ValueError, match="explicit twin"):
        judge(pool, "", WhiteBoxTests("fn main() { assert_eq!(1, 1); }"), language="rust")
    with pytest.raises(ValueError, match="no assertion"):
        judge(pool, "", WhiteBoxTests("int main() {}"), language="c")
