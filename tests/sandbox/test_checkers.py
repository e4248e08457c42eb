"""Trusted checkers: questions with many right answers, decided in a sandbox of their own."""

import pytest

from rl_posttrain.sandbox import referees
from rl_posttrain.sandbox.codec import Members, Opaque, Pairs
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.referees import Checker, UnusableTests

ANY_DIVISOR = (
    "def check(arguments, answer, expected):\n    return 1 < answer < arguments[0] and arguments[0] % answer == 0\n"
)
DIVISORS = FunctionTests("divisor", (Call((15,), 3), Call((91,), 7)), checker=ANY_DIVISOR)


@pytest.fixture(scope="module")
def pool():
    with Pool(PoolConfig(slots=1)) as pool:
        yield pool


def checked(pool, source, *cases):
    return [answer.outcome for answer in pool.use(lambda place: Checker(source).check(place, cases))]


def test_any_right_answer_passes_and_a_wrong_one_does_not(pool):
    assert judge(pool, "def divisor(n): return {15: 5, 91: 13}[n]", DIVISORS).passed
    verdict = judge(pool, "def divisor(n): return {15: 5, 91: 9}[n]", DIVISORS)
    assert verdict.outcomes == ("pass", "wrong") and verdict.status == "wrong"


def test_a_programs_output_can_be_checked(pool):
    source = "def check(stdin, stdout, expected):\n    return sum(map(int, stdout.split())) == int(stdin)\n"
    tests = StdioTests((("10", "4 6"), ("3", "1 2")), checker=source)
    assert judge(pool, "n = int(input())\nprint(1, n - 1)", tests).passed
    assert judge(pool, "print(1, 2)", tests).outcomes == ("wrong", "pass")


def test_plain_values_arrive_as_they_are_and_other_objects_equal_to_nothing(pool):
    source = (
        "def check(first, second, third):\n"
        "    if first == 'object':\n        return not (second == second) and second.name == 'solution.Thing'\n"
        "    return second == third and type(second) is type(third)\n"
    )
    plain = [
        ("", Pairs([("a", [1.5, None])]), {"a": [1.5, None]}),
        ("", Members([1, (2, "x")]), {1, (2, "x")}),
        ("", [b"\0", 2**70, 1j], [b"\0", 2**70, 1j]),
    ]
    assert checked(pool, source, *plain, ("object", Opaque("solution.Thing"), None)) == ["pass"] * 4
    assert checked(pool, source, ("", Pairs([([1], 2)]), {}), ("", 1, 1)) == ["malformed", "pass"]


@pytest.mark.parametrize("answer", ["None", "'many'", "[]", "object()", "10 ** 5000"])
def test_an_answer_that_the_checker_cannot_bear_is_wrong(pool, answer):
    verdict = judge(pool, f"def divisor(n): return {answer}", DIVISORS)
    assert verdict.status == "wrong" and verdict.tests == (False, False)


def test_an_answer_that_keeps_the_checker_busy_is_wrong_and_the_others_are_not_checked(pool, monkeypatch):
    monkeypatch.setattr(referees, "LIMITS", Limits(cpu_seconds=0.5, wall_seconds=20))
    source = "def check(first, second, third):\n    for i in range(second): pass\n    return True\n"
    assert checked(pool, source, (0, 3, 3), (0, 10**12, 3), (0, 1, 3)) == ["pass", "wrong", "skipped"]
    ended = "import os\ndef check(first, second, third):\n    if second != third: os._exit(0)\n    return True\n"
    assert checked(pool, ended, (0, 4, 3), (0, 3, 3)) == ["wrong", "skipped"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def check(first, second, third): return 1", "not a bool"),
        ("def check(first, second, third): return None", "not a bool"),
        ("def check(first, second, third): return missing", "NameError"),
        ("def check(first, second): return True", "TypeError"),
        ("import nothing_of_the_kind\ndef check(first, second, third): return True", "does not load"),
        ("raise SystemExit\ndef check(first, second, third): return True", "does not load"),
        ("import os\nos._exit(0)\ndef check(first, second, third): return True", "ended"),
        ("import os\ndef check(first, second, third): os._exit(0)", "ended"),
        ("def check(first, second, third):\n    while True: pass", "time limit"),
    ],
)
def test_a_checker_at_fault_is_an_error_that_names_it(pool, monkeypatch, source, words):
    monkeypatch.setattr(referees, "LIMITS", Limits(cpu_seconds=0.3, wall_seconds=20))
    with pytest.raises(UnusableTests, match=words) as raised:
        checked(pool, source, (1, 2, 3))
    assert "def check" in str(raised.value)


def test_the_candidate_never_meets_the_checker(pool):
    code = (
        "import gc\n"
        "def divisor(n):\n"
        "    words = ['kcehc'[::-1], 'rewsna'[::-1]]\n"
        "    texts = [held for held in gc.get_objects() if type(held) is dict and set(words) & set(map(str, held))]\n"
        "    return 3 if n == 15 and not texts else 7\n"
    )
    assert judge(pool, code, DIVISORS).passed


def test_what_cannot_be_decoded_never_reaches_the_checker(pool):
    code = "import codec\ncodec.encode = lambda value: b'{\"zz\":1}'\ndef divisor(n): return 3\n"
    verdict = judge(pool, code, DIVISORS)
    assert verdict.outcomes == ("malformed", "malformed")
