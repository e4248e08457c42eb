"""Final answers in texts, equal numbers, and domains that read questions from files."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_posttrain.config import ConfigError
from rl_posttrain.tasks import PromptSpaceError, Tools, heldout, load
from rl_posttrain.tasks.answers import final_answer, last_number, number, same


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"first \boxed{2}, no: \boxed{3}", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"<answer>\boxed{42}</answer>", "42"),
        (r"it is \boxed{7} or \boxed{8", None),
        ("<answer> 5 </answer> <answer>6</answer>", "6"),
        ("3 + 4 = 7\n#### 7\nas said", "7"),
        ("#### ", None),
        ("It costs $1,234.50.", "1,234.50"),
        ("from 4 to -3", "-3"),
        ("a third, that is 1/3.", "1/3"),
        ("no idea", None),
    ],
)
def test_o20_the_last_answer_counts(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text, value",
    [
        ("1,234.5", Fraction(2469, 2)),
        ("-.5", Fraction(-1, 2)),
        ("$ 18", Fraction(18)),
        ("18.", Fraction(18)),
        ("1.5e3", Fraction(1500)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        ("-1 1/4", Fraction(-5, 4)),
        ("\uff11\uff12", Fraction(12)),
        ("\u22123", Fraction(-3)),
        ("1/0", None),
        ("1,23", None),
        ("nan", None),
        ("", None),
        ("__import__('os')", None),
    ],
)
def test_numbers_are_exact(text, value):
    assert number(text) == value


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_every_decimal_is_read_back(units, places):
    value = Fraction(units, 10**places)
    text = f"{'-' if units < 0 else ''}{abs(units) // 10**places:,}"
    text += f".{abs(units) % 10**places:0{places}d}" if places else ""
    assert number(text) == value and last_number(f"so it is {text}.") == text


def test_same_is_by_value_or_else_by_words():
    assert same("0.50", "1/2") and same("1,000", "1000") and same(" Monday ", "monday")
    assert not same("5", "5.01") and not same("5 m", "5") and not same("2021", "-2021")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def questions(kind, count):
    return [{"question": f"{kind} {i}?", "answer": f"so <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(count)]


@pytest.fixture
def files(tmp_path):
    return {
        "train": write(tmp_path / "train.jsonl", questions("train", 5)),
        "heldout": write(tmp_path / "heldout.jsonl", questions("heldout", 4)),
    }


def test_each_epoch_asks_every_question_once_in_an_order_of_its_own(files):
    domain = load("math/jsonl", files, Tools())
    first, second, other = (
        [task.prompt for task in domain.make(seed, "train", range(start, start + 5))]
        for seed, start in ((0, 0), (0, 5), (1, 0))
    )
    assert sorted(first) == sorted(second) == sorted(other) == [f"train {i}?" for i in range(5)]
    assert len({tuple(first), tuple(second), tuple(other)}) > 1
    assert {task.prompt for task in heldout(domain, 3, 4)} == {f"heldout {i}?" for i in range(4)}
    assert heldout(domain, 3, 4) == heldout(domain, 9, 4)
    with pytest.raises(PromptSpaceError, match="gave only 4"):
        heldout(domain, 0, 5)


def test_verdicts(files):
    domain = load("math/jsonl", files, Tools())
    (task,) = domain.make(0, "train", [0])
    right = task.reference["answer"]
    assert "<<" not in task.demonstration
    texts = [task.demonstration, rf"\boxed{{{right}.0}}", f"it is {right}", "it is 77", "no idea"]
    statuses = [verdict.status for verdict in domain.score([task] * 5, texts)]
    assert statuses == ["pass", "pass", "pass", "wrong", "malformed"]


def test_files_that_cannot_be_right_are_refused(files, tmp_path):
    def refused(message, **options):
        with pytest.raises(ConfigError, match=message):
            load("math/jsonl", {**files, **options}, Tools())

    refused("there is no such file", train=str(tmp_path / "absent.jsonl"))
    refused("4 questions are in both", train=files["heldout"])
    refused(r"line 2: must be an object", train=write(tmp_path / "a.jsonl", [*questions("a", 1), {"question": "b"}]))
    refused("holds no final answer", train=write(tmp_path / "b.jsonl", [{"question": "b", "answer": "who knows"}]))
    refused("holds no questions", train=write(tmp_path / "c.jsonl", []))
