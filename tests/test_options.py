"""No inert option: each one that a domain takes, or that the quickstart sets, changes its questions."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from experiments import cli
from rl_posttrain import services, tasks
from rl_posttrain.config import ConfigError, apply_overrides, flatten
from rl_posttrain.tasks import code, strings
from rl_posttrain.tasks.registry import Tools

QUICKSTART = cli.load_config_file(str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.py"))
OPTIONS = [
    (f"{family}/{member}", option.name, option.default)
    for family, members in (("strings", strings._DOMAINS), ("code", code._DOMAINS))
    for member, (options, _) in members.items()
    for option in dataclasses.fields(options)
]
SET = [
    (name, option, value)
    for name, task in QUICKSTART["tasks"].items()
    for option, value in flatten(task.get("options", {})).items()
]


def prompts(name: str, options: dict[str, Any], tools: Tools) -> list[str]:
    return [task.prompt for task in tasks.load(name, options, tools).make(0, "train", range(100))]


def assert_acts(name: str, option: str, value: Any, given: dict[str, Any], tools: Tools) -> None:
    """One of the option's neighbouring values is accepted and changes the questions."""
    neighbours = (
        [not value] if isinstance(value, bool) else [f"{value}s"] if isinstance(value, str) else [value + 1, value - 1]
    )
    refusals = []
    for other in neighbours:
        try:
            changed = prompts(name, apply_overrides(given, {option: other}), tools)
        except ConfigError as error:
            refusals.append(str(error))
        else:
            assert changed != prompts(name, given, tools), f"{name}: {option}={other!r} changes nothing"
            return
    pytest.fail(f"{name}: all neighbours of {option}={value!r} are refused: {refusals}")


@pytest.mark.parametrize("name, option, default", OPTIONS, ids=[f"{name}-{option}" for name, option, _ in OPTIONS])
def test_an_option_of_a_domain_changes_its_questions(name, option, default):
    assert_acts(name, option, default, {}, Tools(judge=lambda pool, programs: []))


def test_an_option_that_the_quickstart_sets_changes_the_questions():
    config = services.parse(QUICKSTART)
    with services.tools(config) as tools:
        for name, option, value in SET:
            assert_acts(name, option, value, config.tasks[name].options, tools)


@pytest.mark.parametrize("name", QUICKSTART["tasks"])
def test_a_domain_of_the_quickstart_refuses_an_option_it_does_not_know(name):
    config = services.parse(QUICKSTART)
    with services.tools(config) as tools, pytest.raises(ConfigError, match="no_such_option: unknown key"):
        tasks.load(name, {**config.tasks[name].options, "no_such_option": 1}, tools)
