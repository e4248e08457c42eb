"""Small programs, judged by the real sandbox where it matters."""

import random
import re
import shutil
from collections import Counter

import pytest

from rl_posttrain.config import ConfigError
from rl_posttrain.rewards.verifiers import tools
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.tasks import Tools, heldout, load
from rl_posttrain.tasks.code import _PARTS, Arithmetic, _apply, _arithmetic, _programs, _run
from rl_posttrain.types import Task, Verdict

BY_EXAMPLE = ["code/linear", "code/slices"]
NAMES = [*BY_EXAMPLE, "code/arithmetic"]


@pytest.fixture(scope="module")
def sandboxed():
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap: apt-get install bubblewrap")
    with Pool(PoolConfig(slots=2)) as pool:
        yield tools(pool)


def evaluate(pool, programs):
    """`Tools.judge` for programs that these tests wrote themselves, without a sandbox."""
    verdicts = []
    for code, check in programs:
        namespace: dict = {}
        try:
            exec(code, namespace)
            passed = tuple(namespace[check.entry](*arguments) == value for arguments, value in check.calls)
        except Exception:
            passed = (False,) * len(check.calls)
        verdicts.append(Verdict("pass" if all(passed) else "wrong", passed))
    return verdicts


TRUSTING = Tools(judge=evaluate)


def shown(task: Task) -> list[tuple[str, str]]:
    return [tuple(pair.replace(">", ":").split(":")) for pair in task.prompt.split(" ")[1:]]


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_pass_in_the_sandbox(name, sandboxed):
    domain = load(name, {}, sandboxed)
    tasks = domain.make(0, "train", range(40))
    verdicts = domain.score(tasks, [f"{task.demonstration}\n" for task in tasks])
    assert [verdict.status for verdict in verdicts] == ["pass"] * 40
    assert {verdict.tests for verdict in verdicts} == {(True,) * 8}


@pytest.mark.parametrize("name", BY_EXAMPLE)
def test_demonstrations_agree_with_what_is_shown(name):
    for task in load(name, {}, TRUSTING).make(0, "train", range(200)):
        f = eval(f"lambda x: {task.demonstration}")
        for given, result in shown(task):
            assert str(f(int(given) if name == "code/linear" else given)) == result


@pytest.mark.parametrize("name", BY_EXAMPLE)
def test_hidden_inputs_are_not_the_shown_ones(name):
    for task in load(name, {}, TRUSTING).make(0, "train", range(200)):
        hidden = [str(x) for x, _ in task.reference["calls"]]
        assert len(hidden) == 8
        assert not set(hidden) & {given for given, _ in shown(task)}


@pytest.mark.parametrize("name", NAMES)
def test_no_constant_program_pays(name):
    tasks = heldout(load(name, {}, TRUSTING), 0, 256)
    domain = load(name, {}, TRUSTING)
    programs = list({task.demonstration: None for task in tasks}) + ["x", "x+1", "x*2", "x[0]", "0", "''"]
    rates = {program: sum(v.passed for v in domain.score(tasks, [program] * len(tasks))) / 256 for program in programs}
    assert max(rates.values()) < 0.1, Counter(rates).most_common(3)


def test_single_slices_leave_no_constant_program_above_ten_percent():
    domain = load("code/slices", {"max_parts": 1, "max_length": 5}, TRUSTING)
    tasks = heldout(domain, 0, 256)
    best = max(sum(verdict.passed for verdict in domain.score(tasks, [part] * len(tasks))) for part in _PARTS)
    assert best < 26


@pytest.mark.parametrize("name", NAMES)
def test_prompt_space_is_large(name):
    make = load(name, {}, TRUSTING).make
    assert 2000 - len({task.prompt for task in make(0, "train", range(2000))}) < 30  # 20 for 100,000 prompts


def test_looking_the_shown_examples_up_is_not_enough(sandboxed):
    linear = load("code/linear", {}, sandboxed)
    (task,) = linear.make(0, "train", [0])
    table = {int(given): int(result) for given, result in shown(task)}
    (verdict,) = linear.score([task], [f"{table}.get(x)"])
    assert verdict.status == "wrong" and not any(verdict.tests)


def test_every_program_that_computes_the_function_is_right(sandboxed):
    slices = load("code/slices", {}, sandboxed)
    task = Task("code/slices", "train", 0, "", reference={"calls": [["abc", "ba"], ["wxyz", "yxw"]]})
    texts = ["x[-2::-1]", "x[::-1][1:]", "x[:-1][::-1]", "''.join(reversed(x[:-1]))", "x[::-1]"]
    verdicts = slices.score([task] * 5, texts)
    assert [verdict.status for verdict in verdicts] == ["pass"] * 4 + ["wrong"]


def test_partly_right_is_wrong_with_a_fraction(sandboxed):
    linear = load("code/linear", {}, sandboxed)
    task = Task("code/linear", "train", 0, "", reference={"calls": [[0, 3], [1, 5], [2, 7], [-1, 1]]})
    (verdict,) = linear.score([task], ["2*abs(x)+3"])
    assert verdict.status == "wrong"
    assert verdict.tests == (True, True, True, False) and verdict.fraction == 0.75


HOSTILE = [
    "",
    "x)\nimport os\nf=(lambda x: x",  # tries to leave the parentheses
    "0)\nf = type('F', (), {'__call__': lambda s, x: s, '__eq__': lambda s, o: True})(",
    "type('E', (int,), {'__eq__': lambda s, o: True})()",
    "__import__('os')._exit(0)",
    "exit(0)",
    "print(3*x+2)",
    "x #",
    "'''",
    "x\\",
    "(x",
    "x; x",
    "y := x",
    "\x00",
    "lambda: " * 20 + "x",
    "(" * 200,
    "9**9**9**9",
    "[x for x in iter(int, 1)]",
    "x" * 300,
    "é",
]


def test_hostile_texts_are_never_right(sandboxed):
    linear = load("code/linear", {"max_slope": 9}, sandboxed)
    (task,) = linear.make(0, "train", [1])
    good = task.demonstration
    verdicts = linear.score([task] * (len(HOSTILE) + 2), [good, *HOSTILE, good])
    statuses = [verdict.status for verdict in verdicts]
    assert statuses[0] == statuses[-1] == "pass"
    assert set(statuses[1:-1]) <= {"malformed", "wrong", "error", "timeout"}
    by_text = dict(zip(HOSTILE, statuses[1:-1], strict=True))
    assert by_text[""] == by_text[HOSTILE[1]] == by_text[HOSTILE[2]] == "malformed"
    assert by_text["x" * 300] == "malformed"
    assert by_text["9**9**9**9"] == "timeout"


def test_a_comment_does_not_swallow_the_wrapper(sandboxed):
    linear = load("code/linear", {}, sandboxed)
    (task,) = linear.make(0, "train", [1])
    (verdict,) = linear.score([task], [f"{task.demonstration} # done"])
    assert verdict.passed


def test_equal_programs_run_once():
    calls = []

    def judge(pool, programs):
        calls.append((pool, programs))
        return evaluate(pool, programs)

    domain = load("code/linear", {}, Tools(pool="the pool", judge=judge))
    one, two = domain.make(0, "train", range(2))
    verdicts = domain.score([one, one, two, one], ["x", " x", "x", "x("])
    ((pool, programs),) = calls
    assert pool == "the pool" and len(programs) == 2
    assert verdicts[0] is verdicts[1] and verdicts[3].status == "malformed"
    assert verdicts[3].tests == (False,) * 8


def test_programs_differ_as_functions():
    """The distinct functions of one and of two slices, counted another way: by brute force over texts."""
    words = ["abcdefghijklm"[:n] for n in range(3, 14)]
    tables = [tuple(_run(p, w) for w in words) for parts in (1, 2) for p in _programs(parts)]
    assert len(tables) == len(set(tables))
    one = {tuple(eval(part, {"x": w}) for w in words) for part in _PARTS}
    two = {tuple(eval(f"{a}+{b}", {"x": w}) for w in words) for a in _PARTS for b in _PARTS}
    assert len(_programs(1)) == len(one) == len(_PARTS)
    assert len(_programs(2)) == len(two - one)


def test_the_examples_determine_the_function():
    words = ["abcdefghijklm"[:n] for n in range(3, 14)]
    known = [p for parts in (1, 2) for p in _programs(parts)]
    for task in load("code/slices", {}, TRUSTING).make(3, "train", range(60)):
        fitting = [p for p in known if all(_run(p, given) == result for given, result in shown(task))]
        f = eval(f"lambda x: {task.demonstration}")
        assert len(fitting) == 1 and [f(w) for w in words] == [_run(fitting[0], w) for w in words]


def test_arithmetic_says_what_the_program_does():
    item = _arithmetic(Arithmetic(), random.Random(3))
    for prompt, program in [("do add 3 mul 4 sub 5", "(x+3)*4-5"), ("do mul 2 mul 3", "x*2*3")]:
        steps = [(name, int(number)) for name, number in re.findall(r"(\w+) (\d+)", prompt.removeprefix("do "))]
        assert [_apply(steps, x) for x in (-3, 0, 7)] == [eval(program) for x in (-3, 0, 7)]
    assert item.prompt.startswith("do ") and len(item.reference["calls"]) == 8
    tasks = load("code/arithmetic", {"min_steps": 1, "max_steps": 2, "max_number": 3}, TRUSTING).make(
        0, "train", range(99)
    )
    assert {len(task.prompt.split(" ")) for task in tasks} == {3, 5}
    assert {number for task in tasks for number in re.findall(r"\d+", task.prompt)} == {"2", "3"}


def test_every_option_has_its_effect():
    def make(name, **options):
        return load(f"code/{name}", options, TRUSTING).make(0, "train", range(300))

    tasks = make("linear", max_slope=3, max_offset=2, max_input=5, examples=3)
    assert {len(shown(task)) for task in tasks} == {3}
    assert {int(given) for task in tasks for given, _ in shown(task)} == {0, 1, 2, 3, 4, 5}
    assert {task.demonstration for task in tasks} == {f"{a}{b}" for a in ("x", "2*x", "3*x") for b in ("", "+1", "+2")}
    tasks = make("slices", max_parts=1, examples=3, min_length=3, max_length=5, letters=7)
    assert {len(shown(task)) for task in tasks} == {3}
    assert {len(given) for task in tasks for given, _ in shown(task)} == {3, 4, 5}
    assert set("".join(given for task in tasks for given, _ in shown(task))) == set("abcdefg")
    assert not any("+" in task.demonstration for task in tasks)
    assert any("+" in task.demonstration for task in make("slices", max_parts=2))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {"max_slope": 1}),
        ("linear", {"max_offset": 0}),
        ("linear", {"examples": 1}),
        ("linear", {"max_input": 1}),
        ("slices", {"max_parts": 3}),
        ("slices", {"examples": 1}),
        ("slices", {"min_length": 2}),
        ("slices", {"min_length": 4, "max_length": 4}),
        ("slices", {"letters": 5}),
        ("arithmetic", {"min_steps": 4}),
        ("arithmetic", {"max_steps": 9}),
        ("arithmetic", {"max_number": 2}),
    ],
)
def test_ranges(name, options):
    with pytest.raises(ConfigError, match="must"):
        load(f"code/{name}", options, TRUSTING)
