"""Configs are refused early, precisely and with the remedy; what is accepted has lost nothing."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import ml_collections
import pytest

from experiments import cli
from experiments import run as run_command
from rl_posttrain import config, services
from rl_posttrain.config import ConfigError

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
TINY = {
    "tokenizer": {"kind": "character", "alphabet": " abcdefghijklmnopqrstuvwxyz"},
    "model": {"embed_dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 32},
    "tasks": {"strings/reverse": {}},
    "sft": {"steps": 5},
}


@dataclass(frozen=True)
class Inner:
    rate: float = 1.0
    count: int = 1

    def __post_init__(self):
        if self.count < 1:
            raise ValueError(f"count={self.count} must be at least 1")


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    flag: bool = False
    limit: int | None = None
    name: str = "x"
    mode: Literal["fast", "slow"] = "fast"
    betas: tuple[float, float] = (0.9, 0.99)
    sizes: tuple[int, ...] = ()
    inners: dict[str, Inner] = field(default_factory=dict)


def built(**values) -> Outer:
    return config.build(Outer, values)


# ---- O28: types of overrides ----


@pytest.mark.parametrize("text, value", [(1e-6, 1e-6), ("1e-6", 1e-6), ("2e-5", 2e-5), (1, 1.0), ("1", 1.0)])
def test_o28_numbers_become_floats(text, value):
    rate = built(inner={"rate": text}).inner.rate
    assert rate == value and type(rate) is float


@pytest.mark.parametrize("text", [False, "False", "false", "FALSE", 0, "0"])
def test_o28_what_means_false_is_false(text):
    assert built(flag=text).flag is False


@pytest.mark.parametrize("text", [True, "True", "true", 1, "1"])
def test_o28_what_means_true_is_true(text):
    assert built(flag=text).flag is True


@pytest.mark.parametrize("text", ["maybe", "", "no", 2, -1, 0.0, None, []])
def test_o28_what_is_no_truth_value_is_refused(text):
    with pytest.raises(ConfigError, match="config.flag=.*must be of type bool"):
        built(flag=text)


@pytest.mark.parametrize("text, value", [(5, 5), ("5", 5), ("1e3", 1000), (8.0, 8), ("+7", 7), (10**20, 10**20)])
def test_o28_whole_numbers_become_ints(text, value):
    limit = built(limit=text).limit
    assert limit == value and type(limit) is int


@pytest.mark.parametrize("text", [1.5, "1.5", "abc", True, "", "nan", "inf", [1]])
def test_o28_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ConfigError, match="config.inner.count=.*must be of type int"):
        built(inner={"count": text})


@pytest.mark.parametrize("text", ["(0.9,0.95)", "(0.9, 0.95)", "[0.9, 0.95]", "0.9,0.95", (0.9, 0.95), [0.9, "0.95"]])
def test_o28_sequences_become_tuples(text):
    assert built(betas=text).betas == (0.9, 0.95)


@pytest.mark.parametrize("text", ["(0.9,)", "0.9", (0.9, 0.95, 0.99), (), "(0.9, x)", {"a": 1}, 3])
def test_o28_sequences_of_another_kind_are_refused(text):
    with pytest.raises(ConfigError, match="config.betas"):
        built(betas=text)


def test_o28_through_the_command_line():
    _, overrides = cli.split_overrides(["--config.update.learning_rate=2e-5", "--config.sft.steps", "1e1"])
    values = config.apply_overrides(TINY, overrides)
    parsed = services.parse(values)
    assert parsed.update.learning_rate == 2e-5 and parsed.sft.steps == 10


# ---- O29: None, and empty sequences ----


@pytest.mark.parametrize("value", [None, "None", "none", 5, "5"])
def test_o29_an_optional_int_takes_none_and_numbers(value):
    assert built(limit=value).limit in (None, 5)


@pytest.mark.parametrize("before", [None, 5])
def test_o29_an_optional_int_keeps_its_type_after_none(before):
    values: Any = ml_collections.ConfigDict({"limit": before}, type_safe=False)
    values.limit = None
    values.limit = "abc"
    with pytest.raises(ConfigError, match="config.limit='abc': must be of type int"):
        config.build(Outer, values)


@dataclass(frozen=True)
class Sequences:
    first: tuple[int, ...] = (1,)
    second: tuple[str, ...] = ("x",)
    extra: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize("first, second", [((), []), ([], ()), ([], []), ((), ())])
def test_o29_empty_sequences_in_either_order_freeze_and_round_trip(first, second):
    """`ml_collections.FrozenConfigDict` breaks on the first of these; our frozen form is the dataclass."""
    values: Any = ml_collections.ConfigDict(
        {"first": first, "second": second, "extra": {"a": second, "b": first}}
    ).lock()
    parsed = config.build(Sequences, values)
    assert parsed == Sequences((), (), {"a": [], "b": []})
    assert config.build(Sequences, json.loads(json.dumps(config.to_dict(parsed)))) == parsed
    overridden = config.build(Sequences, config.apply_overrides(values, {"second": "a,b", "extra.c": "1"}))
    assert overridden == Sequences((), ("a", "b"), {"a": [], "b": [], "c": "1"})
    assert values.second == second  # the original is as it was


# ---- O30: misspelt keys ----

MISSPELT = 'config.update.learnign_rate: unknown key; did you mean "learning_rate"?'


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.run", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_o30_a_misspelt_override_ends_the_command(tiny, tmp_path):
    workdir = tmp_path / "run"
    refused = command("--config", tiny, "--workdir", str(workdir), "--config.update.learnign_rate=1e-3")
    assert refused.returncode == 2
    assert MISSPELT in refused.stderr and "Traceback" not in refused.stderr
    assert not workdir.exists()


@pytest.fixture
def tiny(tmp_path) -> str:
    """A config file with a section that only an override will have: update."""
    file = tmp_path / "tiny.py"
    file.write_text(f"def get_config():\n    return {TINY!r}\n")
    return str(file)


@pytest.fixture
def no_model(monkeypatch):
    """Whoever builds anything before the config is accepted fails the test."""

    def build(*_):
        raise AssertionError("services were built from a config that should have been refused")

    monkeypatch.setattr(services, "build", build)
    monkeypatch.setattr(services, "tools", build)
    monkeypatch.setattr(services, "compiled", build)


@pytest.mark.parametrize("arguments", [[], ["--dry_run"]])
def test_o30_a_misspelt_override_is_refused_before_anything_is_built(no_model, tiny, tmp_path, arguments):
    with pytest.raises(ConfigError) as refused:
        run_command.main(
            ["--config", tiny, "--workdir", str(tmp_path / "run"), "--config.update.learnign_rate=1e-3", *arguments]
        )
    assert str(refused.value) == MISSPELT
    assert not (tmp_path / "run").exists()


def test_o30_a_misspelt_key_in_the_file_is_refused(no_model, tmp_path):
    file = tmp_path / "misspelt.py"
    file.write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config():\n    return ConfigDict({ {**TINY, 'update': {'learnign_rate': 1e-3}}!r}).lock()\n"
    )
    with pytest.raises(ConfigError) as refused:
        run_command.main(["--config", str(file), "--workdir", str(tmp_path / "run")])
    assert str(refused.value) == MISSPELT


@pytest.mark.parametrize(
    "key, message",
    [
        ("updat.learning_rate", 'config.updat: unknown key; did you mean "update"?'),
        ("seed.x", "config.seed.x: seed=0 is a value"),
        ("modl", 'config.modl: unknown key; did you mean "model"?'),
        ("sft.update.warmup", 'config.sft.update.warmup: unknown key; did you mean "warmup_steps"?'),
        ("sandbox.limits.cpu_second", 'config.sandbox.limits.cpu_second: unknown key; did you mean "cpu_seconds"?'),
        ("qqq", "config.qqq: unknown key; known: algorithm, checkpoint,"),
    ],
)
def test_o30_the_nearest_key_is_named(key, message):
    with pytest.raises(ConfigError) as refused:
        services.parse(config.apply_overrides({**TINY, "seed": 0}, {key: "1"}))
    assert message in str(refused.value)


# ---- ranges ----


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("seed", "-1", "seed=-1 must be at least 0"),
        ("update.learning_rate", "0", "learning_rate=0.0 must be above 0"),
        ("update.final_learning_rate_fraction", "0.1", "has no effect with schedule='constant'"),
        ("algorithm.aggregation", "tokens", "must be one of 'token_mean', 'sequence_mean', 'constant_length'"),
        ("algorithm.clip_low", "1.5", "clip_low=1.5 must be in (0, 1]"),
        ("rollout.group_size", "1", "group_size=1 gives no relative advantage"),
        ("rollout.temperature", "0", "temperature=0 in training"),
        ("grpo.row_length", "65", "grpo.row_length=65 cannot hold a prompt and a completion of rollout.max_tokens=64"),
        ("grpo.mini_batches", "1000", "exceeds rollout.prompts_per_step"),
        ("update.warmup_steps", "100000", "exceeds the stage's"),
        ("sft.update.warmup_steps", "100000", "exceeds the stage's"),
        ("rewards.partial", "2", "a wrong answer must earn less than a right one"),
        ("evaluation.samples", "4", "at temperature=0 would all be equal"),
        ("evaluation.top_k", "4", "has no effect at temperature=0"),
        ("evaluation.top_p", "0.9", "has no effect at temperature=0"),
        ("model.attention_block", "64", "has no effect with attention='dense'"),
        ("model.vocab_size", "4", "is below the tokenizer's"),
        ("model.head_dim", "31", "use an even width"),
        ("mesh.stage", "2", "does not split over stage"),
        ("checkpoint.keep", "0", "would delete the only checkpoint"),
        ("sandbox.limits.processes", "0", "processes=0: use at least 1"),
        ("tokenizer.kind", "byte", "has no effect with kind='byte'"),
    ],
)
def test_values_out_of_range_are_refused_with_the_remedy(key, value, message):
    with pytest.raises(ConfigError) as refused:
        services.parse(config.apply_overrides(TINY, {key: value}))
    assert message in str(refused.value)


def test_without_a_domain_of_positive_weight_there_is_nothing_to_train_on():
    parsed = services.parse(TINY)
    silent = {name: replace(task, weight=0.0) for name, task in parsed.tasks.items()}
    with pytest.raises(ValueError, match="at least one domain must have a weight above 0"):
        replace(parsed, tasks=silent)


# ---- sections ----


def test_sections_must_be_sections_and_leaves_leaves():
    with pytest.raises(ConfigError, match="config.inner=3: must be a section with keys"):
        built(inner=3)
    with pytest.raises(ConfigError, match="config.name=.*must be of type str"):
        built(name={"a": 1})
    with pytest.raises(ConfigError, match="config.mode='medium': must be one of 'fast', 'slow'"):
        built(mode="medium")
    with pytest.raises(ConfigError, match="config.inners.a.count=.x.: must be of type int"):
        built(inners={"a": {"count": "x"}})
    with pytest.raises(ConfigError, match="config.inners=3: must be a mapping"):
        built(inners="3")


def test_a_section_that_refuses_a_value_names_its_place():
    with pytest.raises(ConfigError, match="^config.inners.b: count=0 must be at least 1$"):
        built(inners={"a": {}, "b": {"count": 0}})


def test_a_missing_key_without_default_is_named():
    with pytest.raises(ConfigError, match="config.model: missing; it has no default"):
        services.parse({"tasks": {"strings/reverse": {}}, "tokenizer": {"kind": "byte"}})


def test_an_override_reaches_into_a_mapping_by_name():
    values = {"inners": {"strings/reverse": {"count": 2}}}
    tree = config.apply_overrides(values, {"inners.strings/reverse.rate": "3"})
    assert config.build(Outer, tree).inners == {"strings/reverse": Inner(rate=3.0, count=2)}
    assert values == {"inners": {"strings/reverse": {"count": 2}}}  # the original is as it was


@pytest.mark.parametrize("values", [TINY, cli.load_config_file(QUICKSTART)], ids=["tiny", "quickstart"])
def test_the_resolved_config_reads_back_as_itself(values):
    """What a resumed run is compared with: nothing may get lost on the way through config.json."""
    parsed = services.parse(values)
    again = services.parse(json.loads(json.dumps(config.to_dict(parsed))))
    assert again == parsed
    assert parsed.model.vocab_size == len(parsed.tokenizer.alphabet or "") + 3


@pytest.mark.parametrize("kind", [ml_collections.ConfigDict, ml_collections.FrozenConfigDict])
def test_a_config_dict_is_read_as_the_mapping_that_it_holds(kind):
    assert services.parse(kind(TINY)) == services.parse(TINY)


def test_an_alphabet_that_repeats_a_character_is_refused():
    with pytest.raises(ConfigError, match=r"config.tokenizer: alphabet='aba' .*repeated: \['a'\]"):
        services.parse({**TINY, "tokenizer": {"kind": "character", "alphabet": "aba"}})


@pytest.mark.parametrize("mesh", [{"data": 3}, {"data": 1, "tensor": 8}])
def test_a_mesh_that_does_not_fit_is_refused_before_the_run(mesh, tmp_path):
    with (
        pytest.raises(ConfigError, match="config.mesh: "),
        services.build(services.parse({**TINY, "mesh": mesh}), str(tmp_path / "run")),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_flatten_keeps_every_leaf():
    assert config.flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_a_config_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such Python file"):
        cli.load_config_file(str(tmp_path / "absent.py"))
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="must define get_config"):
        cli.load_config_file(str(tmp_path / "empty.py"))


def test_an_override_without_a_value_is_refused():
    with pytest.raises(ConfigError, match="--config.seed needs a value"):
        cli.split_overrides(["--config.seed"])
