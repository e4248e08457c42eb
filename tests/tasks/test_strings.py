"""Every text domain against answers worked out by hand or in another way."""

import re
import string
from collections import Counter

import pytest

from rl_posttrain.config import ConfigError
from rl_posttrain.tasks import Tools, heldout, load, names
from rl_posttrain.types import Task

NAMES = [name for name in names() if name.startswith("strings/")]


def solve(prompt: str) -> str:
    """An independent solution, character by character."""
    tag, *operands = prompt.split(" ")
    word = operands[-1]
    if tag == "rev":
        return "".join(word[len(word) - 1 - i] for i in range(len(word)))
    if tag == "sort":
        return "".join(c * word.count(c) for c in string.digits + string.ascii_lowercase)
    if tag == "zip":
        return "".join(operands[i % 2][i // 2] for i in range(2 * len(word)))
    if tag == "rot":
        return "".join(word[(i + int(operands[0])) % len(word)] for i in range(len(word)))
    if tag == "shift":
        return "".join(chr((ord(c) - 97 + int(operands[0])) % 26 + 97) for c in word)
    if tag == "dd":
        return re.sub(r"(.)\1+", r"\1", word)
    if tag == "rle":
        return re.sub(r"(.)\1*", lambda m: f"{m[1]}{len(m[0])}", word)
    if tag == "exp":
        return re.sub(r"(.)(\d)", lambda m: m[1] * int(m[2]), word)
    if tag == "del":
        return "".join(c for c in word if c != operands[0])
    raise AssertionError(prompt)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("rev abcd", "dcba"),
        ("sort dacd", "acdd"),
        ("zip abc xyz", "axbycz"),
        ("rot 2 abcde", "cdeab"),
        ("shift 3 xyza", "abcd"),
        ("dd aabbbca", "abca"),
        ("rle aabbbc", "a2b3c1"),
        ("exp a2b3c1", "aabbbc"),
        ("del a banana", "bnn"),
    ],
)
def test_the_independent_solution(prompt, answer):
    assert solve(prompt) == answer


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_are_right_and_pass(name):
    domain = load(name, {}, Tools())
    tasks = domain.make(0, "train", range(300))
    assert [task.demonstration for task in tasks] == [solve(task.prompt) for task in tasks]
    texts = [f" {task.demonstration}\n" for task in tasks]  # surrounding white space costs nothing
    assert {verdict.status for verdict in domain.score(tasks, texts)} == {"pass"}


@pytest.mark.parametrize("name", NAMES)
def test_other_answers_are_wrong(name):
    domain = load(name, {}, Tools())
    tasks = domain.make(0, "train", range(50))
    for change in (lambda a: "", lambda a: a + "a", lambda a: a[:-1], lambda a: f"the answer is {a}"):
        verdicts = domain.score(tasks, [change(task.demonstration) for task in tasks])
        assert {verdict.status for verdict in verdicts} == {"wrong"}
        assert all(verdict.fraction == 0 for verdict in verdicts)


def test_score_needs_one_text_per_task():
    domain = load("strings/reverse", {}, Tools())
    with pytest.raises(ValueError):
        domain.score(domain.make(0, "train", range(2)), ["a"])


@pytest.mark.parametrize("name", NAMES)
def test_no_constant_pays(name):
    tasks = heldout(load(name, {}, Tools()), 0, 256)
    assert max(Counter(task.demonstration for task in tasks).values()) <= 8  # 3%


@pytest.mark.parametrize("name", NAMES)
def test_prompt_space_is_large(name):
    """n draws from N equally likely prompts repeat about n * n / 2N times: 125 for 5,000 of 100,000."""
    make = load(name, {}, Tools()).make
    assert 5000 - len({task.prompt for task in make(0, "train", range(5000))}) < 160


@pytest.mark.parametrize("name", NAMES)
def test_alphabet(name):
    tasks = load(name, {}, Tools()).make(0, "train", range(500))
    used = {c for task in tasks for c in task.prompt + (task.demonstration or "")}
    assert used <= set(string.ascii_lowercase + string.digits + " ")


def operands(task: Task) -> str:
    return task.prompt.split(" ")[-1]


def test_every_option_has_its_effect():
    def words(name, **options):
        return [operands(task) for task in load(f"strings/{name}", options, Tools()).make(0, "train", range(400))]

    for name in ("reverse", "sort", "interleave", "rotate", "caesar", "remove"):
        found = words(name, min_length=3, max_length=7, letters=5)
        assert {len(word) for word in found} == {3, 4, 5, 6, 7}
        assert set("".join(found)) == set("abcde")
    assert {len(word) for word in words("sort_digits", min_length=3, max_length=4)} == {3, 4}
    found = words("run_length", min_runs=2, max_runs=3, max_repeat=4, letters=3)
    runs = [re.findall(r"((.)\2*)", word) for word in found]
    assert {len(r) for r in runs} == {2, 3}
    assert {len(run) for r in runs for run, _ in r} == {1, 2, 3, 4}
    assert set("".join(found)) == set("abc")

    def first(name, **options):
        tasks = load(f"strings/{name}", options, Tools()).make(0, "train", range(400))
        return {task.prompt.split(" ")[1] for task in tasks}

    assert first("rotate", max_amount=2) == {"1", "2"}
    assert first("rotate", max_amount=9, min_length=3, max_length=3) == {"1", "2"}  # fewer than the letters
    assert first("caesar", max_shift=5) == {"1", "2", "3", "4", "5"}


def test_caesar_is_cyclic_in_its_own_letters():
    tasks = load("strings/caesar", {"letters": 4}, Tools()).make(0, "train", range(200))
    for task in tasks:
        _, shift, word = task.prompt.split(" ")
        assert task.demonstration == "".join("abcd"[("abcd".index(c) + int(shift)) % 4] for c in word)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reverse", {"letters": 1}),
        ("reverse", {"min_length": 1}),
        ("sort_digits", {"max_length": 65}),
        ("rotate", {"max_amount": 10}),
        ("caesar", {"max_shift": 5, "letters": 5}),
        ("caesar", {"max_shift": 0}),
        ("dedupe", {"max_repeat": 1}),
        ("dedupe", {"min_runs": 4, "max_runs": 3}),
        ("dedupe", {"letters": 27}),
    ],
)
def test_ranges(name, options):
    with pytest.raises(ConfigError, match="must"):
        load(f"strings/{name}", options, Tools())
