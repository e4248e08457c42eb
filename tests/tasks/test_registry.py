"""Loading domains by name, and held-out sets."""

import subprocess
import sys
from pathlib import Path

import pytest

from rl_posttrain.config import ConfigError
from rl_posttrain.tasks import Domain, PromptSpaceError, Tools, heldout, load, names
from rl_posttrain.types import Task, Verdict

ROOT = Path(__file__).resolve().parents[2]


def test_names_are_complete_and_sorted():
    found = names()
    assert found == sorted(set(found))
    assert {"strings/reverse", "code/linear", "code/slices", "reasoning/spell_backward"} <= set(found)
    assert "reasoning/coin_flip" not in found


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("string/reverse", {}, r"no family 'string'.*did you mean \"strings\""),
        ("nothing", {}, "no family 'nothing'"),
        ("strings/revers", {}, r"did you mean \"reverse\""),
        ("strings/", {}, "known: .*reverse"),
        ("code/linea", {}, r"did you mean \"linear\""),
        ("reasoning/spell_backwards", {}, r"did you mean \"spell_backward\""),
        ("strings/reverse", {"max_lenght": 9}, r"max_lenght: unknown key.*did you mean \"max_length\""),
        ("strings/reverse", {"max_length": 1.5}, "must be of type int"),
        ("strings/reverse", {"min_length": 9, "max_length": 8}, "min_length=9, max_length=8"),
    ],
)
def test_mistakes_are_named(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load(name, options, Tools(judge=lambda pool, programs: []))


@pytest.mark.parametrize(("name", "tool"), [("code/linear", "judge"), ("reasoning/gcd", "confine")])
def test_a_missing_tool_is_refused_when_loading(name, tool):
    with pytest.raises(ConfigError, match=f"needs? Tools.{tool}|need Tools.{tool}"):
        load(name, {}, Tools())


def test_options_of_a_config_are_coerced():
    domain = load("strings/reverse", {"min_length": "3", "max_length": "3"}, Tools())
    assert len(domain.make(0, "train", [0])[0].prompt) == len("rev abc")


def test_heldout_is_distinct_in_order_and_repeatable():
    domain = load("strings/sort_digits", {"min_length": 2, "max_length": 2}, Tools())
    tasks = heldout(domain, 5, 12)
    assert len({task.prompt for task in tasks}) == 12
    assert [task.index for task in tasks] == sorted(task.index for task in tasks)
    assert {task.split for task in tasks} == {"heldout"}
    assert tasks == heldout(domain, 5, 12)
    assert tasks[:5] == heldout(domain, 5, 5)  # more tasks extend the set, they do not change it


def test_heldout_refuses_what_the_domain_does_not_have():
    domain = load("strings/sort_digits", {"min_length": 2, "max_length": 2}, Tools())
    with pytest.raises(PromptSpaceError, match=r"strings/sort_digits: 60 different.* gave only \d+: widen"):
        heldout(domain, 5, 60)


def test_heldout_skips_repeats():
    """Prompts a, a, b, b, c, c, ...: every second index is a repeat."""

    def make(seed, split, indices):
        return [Task("d/x", split, index, f"prompt {index // 2}") for index in indices]

    domain = Domain("d/x", make, lambda tasks, texts: [Verdict("pass")] * len(tasks))
    assert [task.index for task in heldout(domain, 0, 4)] == [0, 2, 4, 6]


def test_importing_tasks_is_light():
    """A CPU worker starts in tens of milliseconds: none of these may come along."""
    heavy = ("jax", "numpy", "reasoning_gym", "sympy")
    code = f"import sys, rl_posttrain.tasks; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
