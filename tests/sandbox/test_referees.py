"""Trusted assertions in a sandbox of their own: what crosses to them, what cannot, and whose fault a failure is."""

import gzip
import importlib.util
import json
import re
from pathlib import Path

import pytest

from rl_posttrain.sandbox import referees
from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable
from rl_posttrain.sandbox.job import InfrastructureError
from rl_posttrain.sandbox.judge import judge, judge_many
from rl_posttrain.sandbox.kinds import CheckTests, PytestTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Place, Pool, PoolConfig
from rl_posttrain.sandbox.referees import UnusableTests

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SQUARES = CheckTests("def check(candidate):\n    assert candidate(7) == 49\n    assert candidate(12) == 144\n", "solve")
RIGHT = "def solve(n):\n    return n * n\n"


@pytest.fixture(scope="module")
def pool():
    with Pool(PoolConfig(slots=2, limits=Limits(cpu_seconds=2.0, wall_seconds=5.0))) as pool:
        yield pool


def check(body, entry="solve"):
    return CheckTests("def check(candidate):\n" + "".join(f"    {line}\n" for line in body.splitlines()), entry)


def suite(*lines):
    return PytestTests("import pytest\nimport solution\n" + "\n".join(lines) + "\n")


# ---- check(candidate) ----


def test_a_right_program_passes_one_test_decided_outside(pool):
    verdict = judge(pool, RIGHT, SQUARES)
    assert (verdict.status, verdict.tests, verdict.outcomes, verdict.trust) == ("pass", (True,), ("pass",), "outside")
    assert len(verdict.executions) == 1 and verdict.executions[0].status == "ok"


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("def solve(n): return n + n", "wrong", "assert candidate(7) == 49"),
        ("def solve(n): return 1 // 0", "error", "ZeroDivisionError"),
        ("def solve(n) return", "compile_error", "SyntaxError"),
        ("import nothing_of_the_kind", "error", "ModuleNotFoundError"),
        ("def other(n): pass", "error", "has no attribute 'solve'"),
        ("def solve(n):\n    while True: pass", "timeout", "time limit"),
        ("def solve(n): return bytes(1 << 30)", "error", "MemoryError"),
        ("def solve(n): return None", "wrong", "AssertionError"),
    ],
)
def test_what_is_wrong_is_said(pool, code, status, words):
    verdict = judge(pool, code, SQUARES, limits=Limits(cpu_seconds=0.5))
    assert (verdict.status, verdict.tests) == (status, (False,)) and words in verdict.detail


def test_an_errors_traceback_is_the_candidates_own(pool):
    verdict = judge(pool, "def inner(): return {}['key']\ndef solve(n): return inner()", SQUARES)
    trace = verdict.executions[0].traceback
    assert "line 1, in inner" in trace and "KeyError: 'key'" in trace and "objects.py" not in trace


def test_methods_get_a_fresh_instance(pool):
    code = "class Solution:\n    n = 0\n    def up(self, by=1):\n        self.n += by\n        return self.n\n"
    assert judge(pool, code, check("assert candidate() == 1\nassert candidate(by=5) == 5", "Solution.up")).passed


def test_helpers_of_the_candidates_are_found_by_name(pool):
    code = RIGHT + "def root(n):\n    return int(n ** 0.5)\nSIZE = 3\n"
    assert judge(pool, code, check("assert root(candidate(SIZE)) == 3\nassert solve(2) == 4")).passed


def test_every_plain_value_crosses_both_ways(pool):
    values = [None, True, 2**80, -1.5, "é\n", b"\x00\xff", (1, [2]), {(1, 2): {3}}, set(), 1j, [{"a": [1.0]}]]
    assert judge(pool, "def solve(v): return v", check(f"for v in {values!r}:\n    assert candidate(v) == v")).passed


# ---- pytest files ----

OBJECTS = """
import json
LIMIT = 3

class Refused(ValueError):
    def __init__(self, amount):
        super().__init__(f"refused {amount}")
        self.amount = amount

class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
    def last(self):
        return self.next.last() if self.next else self
    def __len__(self):
        return 1 + (len(self.next) if self.next else 0)
    def __iter__(self):
        node = self
        while node:
            yield node.value
            node = node.next
    def __getitem__(self, index):
        return list(self)[index]
    def __add__(self, other):
        return Node(self.value + other.value)
    def __contains__(self, value):
        return value in list(self)
    def __str__(self):
        return f"Node({self.value})"
    def __enter__(self):
        return self
    def __exit__(self, *details):
        return True

def total(node): return sum(node)
def arrange(values, *, by=None): values.sort(key=by)
def deepen(table): table["new"] = [1]; table["old"].append(2); table["set"].add(3)
def refuse(amount): raise Refused(amount)
def parse(text): return json.loads(text)
def hello(name): print("hello", name)
def forever():
    n = 0
    while True:
        yield n
        n += 1
def many(n): return (i for i in range(n))
def apply(function, values): return function(values)
"""


def test_objects_exceptions_iterators_and_output_of_the_candidates_can_be_tested(pool):
    tests = suite(
        "from solution import Node, Refused, LIMIT",
        "import itertools, json, math",
        "def test_object():",
        "    last = Node(2); node = Node(1, last)",
        "    assert len(node) == 2 and list(node) == [1, 2] and node[1] == 2 and node.next is last",
        "    assert node.last() is last and last.next is None and isinstance(last, Node) and not isinstance(3, Node)",
        "    last.value = 5",
        "    assert solution.total(node) == 6 and str(last) == 'Node(5)' and (node + last).value == 6",
        "    assert 5 in node and 7 not in node",
        "def test_arguments():",
        "    values = [3, 1, 2]; solution.arrange(values); assert values == [1, 2, 3]",
        "    words = ['b', 'aa']; solution.arrange(words, by=len); assert words == ['b', 'aa']",
        "    inner = []; table = {'old': inner, 'set': set()}; solution.deepen(table)",
        "    assert table == {'old': [2], 'new': [1], 'set': {3}} and inner == [2]",
        "    assert solution.apply(max, [1, 3]) == 3",
        "def test_exceptions():",
        "    with pytest.raises(Refused, match='refused 7') as error: solution.refuse(7)",
        "    assert error.value.amount == 7",
        "    with pytest.raises(ValueError): solution.refuse(7)",
        "    with pytest.raises(json.JSONDecodeError): solution.parse('{')",
        "    with pytest.raises(AttributeError): solution.nothing",
        "def test_iterators():",
        "    assert list(itertools.islice(solution.forever(), 3)) == [0, 1, 2]",
        "    numbers = solution.forever(); assert next(numbers) == 0 and next(numbers) == 1",
        "    assert sum(solution.many(3000)) == 2999 * 1500",
        "def test_output(capsys):",
        "    solution.hello('é'); assert capsys.readouterr().out == 'hello é\\n'",
        "def test_module(monkeypatch):",
        "    assert LIMIT == 3 and hasattr(solution, 'refuse') and not hasattr(solution, 'missing')",
        "    monkeypatch.setattr(solution, 'LIMIT', 4); assert solution.LIMIT == 4",
        "def test_context():",
        "    with Node(1) as node: assert node.value == 1",
    )
    verdict = judge(pool, OBJECTS, tests)
    assert verdict.passed, verdict.detail
    assert len(verdict.tests) == 7


def test_one_verdict_per_test_by_id(pool):
    tests = PytestTests(
        "import pytest\nfrom solution import solve\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_square(n): assert solve(n) == n * n\n"
        "class TestMore:\n    def test_zero(self): assert solve(0) == 0\n",
        ("TestMore::test_zero", "test_square[2]", "test_square[1]"),
    )
    assert judge(pool, RIGHT, tests).tests == (True, True, True)
    verdict = judge(pool, "def solve(n): return n", tests)
    assert verdict.outcomes == ("pass", "wrong", "pass") and verdict.status == "wrong"


def test_unittest_classes_fixtures_and_star_imports_work(pool):
    tests = PytestTests(
        "import pytest, unittest\nfrom solution import *\n"
        "@pytest.fixture\ndef nine(): return solve(3)\n"
        "def test_fixture(nine, tmp_path): assert nine == 9\n"
        "class TestOld(unittest.TestCase):\n"
        "    def test_it(self):\n        self.assertEqual(solve(3), 9)\n"
        "        with self.assertRaises(TypeError): solve(None)\n"
    )
    assert judge(pool, RIGHT, tests).tests == (True, True)


def test_a_name_that_the_candidate_lacks_fails_the_tests_that_use_it(pool):
    tests = suite(
        "from solution import solve, other",
        "def test_solve(): assert solve(3) == 9",
        "def test_other(): assert other(3) == 9",
    )
    assert judge(pool, RIGHT, tests).outcomes == ("pass", "error")


def test_skipped_tests_and_expected_failures_are_not_passed(pool):
    tests = suite(
        "def test_one(): assert solution.solve(3) == 9",
        "def test_skip(): solution.solve(3); pytest.skip('no')",
        "@pytest.mark.xfail\ndef test_xfail(): assert solution.solve(3) == 8",
    )
    assert judge(pool, RIGHT, tests).outcomes == ("pass", "skipped", "skipped")


@pytest.mark.parametrize("code", ["def solve(n) return", "1 / 0", "import os; os._exit(0)"])
def test_what_does_not_load_fails_every_named_test(pool, code):
    tests = PytestTests(
        "from solution import solve\ndef test_a(): pass\ndef test_b(): solve(1)\n", ("test_a", "test_b")
    )
    assert judge(pool, code, tests).tests == (False, False)


# ---- a candidate that would rather not be tested ----

EQUAL = """
class Equal(int if {number} else object):
    def always(self, *others): return True
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = always
    def __ne__(self, other): return False
    def __hash__(self): return 49
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __abs__ = __sub__
    def __exit__(self, *details): return True
    def __enter__(self): return self
    startswith = endswith = issubset = isdisjoint = always
    def count(self, value): return 1
    index = count
def solve(n): return Equal()
"""


@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize(
    "assertion",
    [
        "assert got == 49",
        "assert not got != 49",
        "assert 49 == got",
        "assert got >= 49 and got <= 49",
        "assert got in [49]",
        "assert 49 in got",
        "assert [got] == [49]",
        "assert {got} == {49}",
        "assert abs(got - 49) < 1e-6",
        "assert got + 0 == 49",
        "assert got.startswith('49')",
        "assert got.count(49) == 1",
        "assert {49}.issubset(got)",
        "assert isinstance(got, int) and got == 49",
        "with got: assert False",
        "import pytest; assert got == pytest.approx(49)",
    ],
)
def test_objects_cannot_answer_for_themselves(pool, assertion, number):
    source = PytestTests(f"from solution import solve\ndef test_it():\n    got = solve(7)\n    {assertion}\n")
    assert judge(pool, EQUAL.format(number=number), source).tests == (False,)


RAISED = ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "StopIteration", "StopAsyncIteration", "BaseException"]


@pytest.mark.parametrize("name", [*RAISED, "unittest.SkipTest", "AssertionError", "Skipped", "Exit"])
def test_no_exception_ends_or_skips_the_tests(pool, name):
    code = "import unittest\nclass Skipped(BaseException): pass\nclass Exit(Exception): returncode = 0\n"
    code += f"Skipped.__module__ = Exit.__module__ = '_pytest.outcomes'\ndef solve(n): raise {name}('0')\n"
    tests = suite(
        "def test_call(): assert solution.solve(7) == 49",
        "def test_map():\n    for got in map(solution.solve, [7]): assert got == 49",
        "def test_list(): assert list(map(solution.solve, [7])) == [49]",
        "def test_after(): assert hasattr(solution, 'solve')",
    )
    verdict = judge(pool, code, tests)
    assert verdict.outcomes == ("error", "error", "error", "pass"), verdict.detail


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "ctypes.string_at(0)", "while_forever()"])
def test_the_end_of_the_candidate_is_no_exception_that_a_test_may_expect(pool, end):
    code = f"import os, ctypes\ndef while_forever():\n    while True: pass\ndef solve(n): {end}\n"
    tests = suite(
        "def test_raises():\n    with pytest.raises(Exception): solution.solve(7)",
        "def test_caught():\n    try: solution.solve(7)\n    except BaseException: pass",
    )
    verdict = judge(pool, code, tests, limits=Limits(cpu_seconds=0.3))
    assert verdict.tests == (False, False)
    assert verdict.status == ("timeout" if "while" in end else "error")


def test_answers_before_their_questions_void_everything(pool):
    forged = 'import os, struct\nd = b\'{"id":"","result":["value",49,null,""]}\'\n'
    verdict = judge(pool, forged + "os.write(4, struct.pack('>I', len(d)) + d)\n" + RIGHT, SQUARES)
    assert verdict.status == "malformed" and verdict.tests == (False,)
    flags = {flag.name for flag in verdict.flags}
    assert flags & {"unsolicited_frame", "forged_frame"}


SENT = """
import objects
def solve(n):
    objects.perform = lambda request, module, handles: {answer}
    raise ValueError
"""


@pytest.mark.parametrize(
    "answer",
    [
        "['value', {'o': '999999999999 function'}, None]",
        "['value', {'d': [[[1], 2]]}, None]",
        "['value', {'s': [{'d': []}]}, None]",
        "['error', [['E', 'm', 't'], [[None, 'SystemExit']], [], {'o': 'x'}], None]",
        "['error', [['E\\0', 'm', 't'], [[{'o': '1'}, 'a\\0b'], [None, 'StopIteration']], [], {'o': ''}], None]",
        "['error', [], None]",
        "['class', [[None, 'BaseExceptionGroup']], None]",
        "['class', 7, None]",
        "['items', 7, None]",
        "['passed', True, None]",
        "['value', 1, [[[1, 2]], {'d': []}]]",
        "['value', 1, 7]",
        "{}",
        "[[[]]] * 3",
    ],
)
def test_whatever_bytes_come_the_failure_is_the_candidates(pool, answer):
    source = "def check(candidate):\n    try: candidate(7)\n    except Exception: pass\n    assert candidate(7) == 49\n"
    verdict = judge(pool, SENT.format(answer=answer), CheckTests(source, "solve"))
    assert verdict.tests == (False,) and verdict.status in ("wrong", "error", "malformed")


def test_a_huge_answer_is_the_candidates_failure(pool):
    verdict = judge(pool, "def solve(n): return 'x' * (1 << 24)", SQUARES)
    assert verdict.status == "error" and "output limit" in verdict.detail


@pytest.mark.parametrize(
    ("answer", "body"),
    [("10 ** 12", "for i in range(candidate(7)): pass"), ("10 ** 11", "assert bytes(candidate(7)) == b''")],
)
def test_tests_that_an_answer_keeps_busy_are_the_candidates_failure(pool, monkeypatch, answer, body):
    monkeypatch.setattr(referees, "LIMITS", Limits(cpu_seconds=0.5, wall_seconds=20))
    verdict = judge(pool, f"def solve(n): return {answer}", check(body))
    assert verdict.tests == (False,) and verdict.status in ("wrong", "error")


def test_tests_that_the_candidate_makes_disappear_fail(pool):
    source = (
        "import pytest\nimport solution\n@pytest.mark.parametrize('case', solution.CASES)\ndef test_it(case): pass\n"
    )
    names = ("test_it[1]", "test_it[2]")
    assert judge(pool, "CASES = [1, 2]", PytestTests(source, names)).passed
    for cases in ("[1]", "[]", "[1, 2, 3]", "None", "type('Any', (), {'__iter__': lambda s: iter([])})()"):
        verdict = judge(pool, f"CASES = {cases}", PytestTests(source, names))
        assert verdict.tests == (False, False), cases


# ---- tests that are at fault themselves ----


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (check("assert 1 == 2"), "before it has asked"),
        (check("import nothing_of_the_kind"), "nothing_of_the_kind"),
        (check("assert candidate(7) == 49\nimport nothing_of_the_kind"), "nothing_of_the_kind"),
        (check("pass"), "never asks"),
        (check("candidate(lambda: 3)"), "hands the candidate a function"),
        (check("candidate(7); candidate(lambda: 3)"), "hands the candidate a function"),
        (check("while True: pass"), "time limit"),
        (suite("def test_a(): assert 1 == 2", "def test_b(missing_fixture): pass"), "before it has asked"),
        (suite("import nothing_of_the_kind", "def test_a(): solution.solve(7)"), "nothing_of_the_kind"),
        (suite("def helper(): pass"), "finds no tests"),
        (suite("def test_a(): pass"), "never asks"),
        (PytestTests("def test_a(): pass\n", ("test_b",)), "unusable"),
    ],
)
def test_unusable_tests_are_an_error_of_their_authors(pool, monkeypatch, tests, words):
    monkeypatch.setattr(referees, "LIMITS", Limits(cpu_seconds=1.0, memory_bytes=1 << 30, output_bytes=1 << 20))
    with pytest.raises(UnusableTests, match=words):
        judge(pool, RIGHT, tests)


def test_a_failure_of_the_referees_container_is_tried_again(pool, monkeypatch):
    run, failures = Place.run_referee, []

    def fail_once(self, job, driver):
        if not failures:
            failures.append(1)
            raise InfrastructureError("the container is gone")
        return run(self, job, driver)

    monkeypatch.setattr(Place, "run_referee", fail_once)
    assert judge(pool, RIGHT, SQUARES).passed and failures


def test_without_pytest_the_remedy_is_said(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pluggy" else find(name))
    with Pool(PoolConfig(slots=1)) as pool, pytest.raises(SandboxUnavailable, match="pip install pytest"):
        judge(pool, RIGHT, suite("def test_a(): assert solution.solve(1) == 1"))


# ---- right programs of public data sets ----


def human_eval(indices):
    path = DATA / "humaneval" / "HumanEval.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here: the HumanEval data set")
    tasks = [json.loads(line) for line in gzip.open(path, "rt")]
    chosen = [tasks[index] for index in indices or range(len(tasks))]
    return [(t["prompt"] + t["canonical_solution"], CheckTests(t["test"], t["entry_point"])) for t in chosen]


@pytest.mark.parametrize(
    "indices",
    [
        pytest.param((0, 4, 32, 33, 38, 50, 53, 115, 137, 151), id="ten"),
        pytest.param((), id="all", marks=pytest.mark.slow),
    ],
)
def test_canonical_solutions_of_human_eval_pass(pool, indices):
    verdicts = judge_many(pool, human_eval(indices), limits=Limits(cpu_seconds=10.0, wall_seconds=30.0))
    assert [(index, v.detail) for index, v in enumerate(verdicts) if not v.passed] == []


@pytest.mark.slow
def test_solutions_of_mbpp_pass(pool):
    path = DATA / "mbpp" / "sanitized-mbpp.json"
    if not path.exists():
        pytest.skip(f"{path} is not here: the MBPP data set")
    tasks, items = json.loads(path.read_text()), []
    for task in tasks:
        entry = re.findall(r"^def (\w+)", task["code"], re.MULTILINE)[-1]
        lines = [f"{entry} = candidate", *(line for text in task["test_list"] for line in text.splitlines())]
        imports = "\n".join(task["test_imports"])
        items.append((task["code"], CheckTests(f"{imports}\n{check(chr(10).join(lines)).source}", entry)))
    verdicts = judge_many(pool, items, limits=Limits(cpu_seconds=10.0, wall_seconds=30.0))
    assert [(task["task_id"], v.detail) for task, v in zip(tasks, verdicts) if not v.passed] == []
