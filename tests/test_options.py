"""No inert option: each one that a domain takes changes its questions."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from experiments import cli
from rl_posttrain import services, tasks
from rl_posttrain.config import ConfigError
from rl_posttrain.tasks import code, strings
from rl_posttrain.tasks.registry import Tools

QUICKSTART = cli.load_config_file(str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.py"))
DOMAINS = [
    (f"{family}/{member}", options, option.name)
    for family, members in (("strings", strings._DOMAINS), ("code", code._DOMAINS))
    for member, (options, _) in members.items()
    for option in dataclasses.fields(options)
]


def prompts(name: str, options: dict[str, Any]) -> list[str]:
    domain = tasks.load(name, options, Tools(judge=lambda pool, programs: []))
    return [task.prompt for task in domain.make(0, "train", range(100))]


@pytest.mark.parametrize("name, options, option", DOMAINS, ids=[f"{name}-{option}" for name, _, option in DOMAINS])
def test_an_option_of_a_domain_changes_its_questions(name, options, option):
    default = getattr(options(), option)
    refusals = []
    for value in (default + 1, default - 1):
        try:
            assert prompts(name, {option: value}) != prompts(name, {})
        except ConfigError as error:
            refusals.append(str(error))
        else:
            return
    pytest.fail(f"both neighbours of {option}={default} are refused: {refusals}")


def test_options_that_the_quickstart_sets_are_known_to_their_domains():
    """A misspelt option, or one of another domain, is refused; what is accepted is tested above."""
    config = services.parse(QUICKSTART)
    with services.tools(config) as tools:
        for name, task in config.tasks.items():
            with pytest.raises(ConfigError, match="unknown key"):
                tasks.load(name, {**task.options, "no_such_option": 1}, tools)
