"""The stage of preference pairs in a run: step 0, learning, what is refused, and a run that is resumed."""

import dataclasses
import json
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain import evaluation, lifecycle, loop, services
from rl_posttrain.config import ConfigError, apply_overrides
from rl_posttrain.data.tokenizer import make_tokenizer
from rl_posttrain.sharding import mesh as mesh_lib

VALUES = dict(
    tokenizer=dict(kind="character", alphabet="abcdefghijklmnopqrstuvwxyz "),
    model=dict(embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64),
    mesh=dict(data=-1),
    tasks={"strings/reverse": dict(options=dict(min_length=2, max_length=2, letters=4))},
    lora=dict(rank=4, dropout=0.1),
    rollout=dict(prompts_per_step=2, group_size=2, max_tokens=4, prompt_bucket=16),
    sft=dict(steps=1, batch_size=4, examples=8, row_length=32),
    grpo=dict(steps=1, row_length=64),
    evaluation=dict(items=2, rows=4, every=2),
    checkpoint=dict(every=100),
)
WORDS = [a + b for a in "abcd" for b in "abcd" if a != b]


def written(path, pairs):
    path.write_text("".join(json.dumps(dict(prompt=p, chosen=c, rejected=r)) + "\n" for p, c, r in pairs))
    return str(path)


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """The config with pairs that prefer a word turned round; four of the twelve words are held out."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = [(word, word[::-1], word) for word in WORDS]
    section = dict(
        steps=3,
        batch_size=4,
        row_length=24,
        path=written(folder / "train.jsonl", pairs[:8]),
        heldout=written(folder / "heldout.jsonl", pairs[8:]),
        update=dict(learning_rate=1e-2),
    )
    return {**VALUES, "preference": section}


@cache
def compiled(flat):
    config = services.parse(json.loads(flat))
    return config, services.compiled(config, mesh_lib.make_mesh(config.mesh, jax.devices()[:1]))


@pytest.fixture
def on_mesh(values):
    with jax.set_mesh(mesh_lib.make_mesh(services.parse(values).mesh, jax.devices()[:1])):
        yield


def stage(values):
    """Services without sandboxes, and the state at the beginning of the stage."""
    config, made = compiled(json.dumps(values))
    tokenizer = make_tokenizer(config.tokenizer)
    built = SimpleNamespace(config=config, tokenizer=tokenizer, pairs=services.load_pairs(config, tokenizer), **made)
    # Adapters as the warm-up leaves them: neither matrix is 0, so that dropout would change the policy.
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), built.init_params())
    state = lifecycle.start(built)
    state.step, state.train, state.reference = 1, built.init_train_state(params), params
    loop.begin_stage(built, state)
    return built, state


def test_o05_the_stage_begins_at_log_2_though_adapters_have_dropout(values, on_mesh):
    measured = []
    for _ in range(2):
        built, state = stage(values)
        assert np.abs(loop.heldout_margins(built, state)).max() < 1e-5
        measured.append(loop.preference_step(built, state))
        assert int(state.train.step) == 1
    assert measured[0]["loss/total"] == pytest.approx(0.693147, abs=1e-6)
    assert measured[0]["preference/margin"] == pytest.approx(0.0, abs=1e-6)
    timed = lambda name: name.startswith(("time", "tokens"))
    first, again = ({n: x for n, x in metrics.items() if not timed(n)} for metrics in measured)
    assert first == again


def test_the_policy_learns_to_prefer_and_the_reference_stays(values, on_mesh):
    built, state = stage(values)
    before = jax.tree.map(jnp.copy, state.reference)
    for _ in range(40):
        metrics = loop.preference_step(built, state)
    assert metrics["preference/accuracy"] > 0.9 and metrics["loss/total"] < 0.5
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), before, state.reference)))
    margins = loop.heldout_margins(built, state)
    # Each margin again, from one pair by itself.
    for margin, pair in zip(margins, built.pairs[1], strict=True):
        alone = SimpleNamespace(**{**vars(built), "pairs": ([], [pair])})
        assert loop.heldout_margins(alone, state) == pytest.approx([margin], abs=1e-4)
    row = evaluation.pair_row(margins, 9)
    assert row["value"] == (margins > 0).mean() and row["n"] == 4 and row["low"] <= row["value"] <= row["high"]


def test_a_tie_is_right_half_the_time():
    row = evaluation.pair_row(np.array([0.0, 1.0, -1.0, 2.0]), 3)
    assert (row["step"], row["domain"], row["metric"]) == (3, "preference", "pair_accuracy")
    assert row["value"] == pytest.approx(2.5 / 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preference.path": None}, "path=None, heldout=.*: name two jsonl files of pairs, or steps=0"),
        ({"preference.steps": -1}, "steps=-1"),
        ({"preference.batch_size": 0}, "batch_size=0"),
        ({"preference.beta": 0.0}, "beta=0.0 must be above 0"),
        ({"preference.update.warmup_steps": 4}, "preference.update.warmup_steps=4 exceeds the stage's 3"),
        ({"preference.update.optimizer": "muon"}, "preference.update.optimizer='muon' and update.optimizer='adamw'"),
    ],
)
def test_configs_of_the_stage_that_make_no_sense_are_refused(values, changes, message):
    with pytest.raises(ConfigError, match=message):
        services.parse(apply_overrides(values, changes))


def test_pairs_that_cannot_be_trained_are_refused_before_anything_is(values, tmp_path):
    def load(**changes):
        config = services.parse(apply_overrides(values, {f"preference.{k}": v for k, v in changes.items()}))
        return services.load_pairs(config, make_tokenizer(config.tokenizer))

    assert [len(part) for part in load()] == [8, 4]
    assert services.load_pairs(services.parse(VALUES), make_tokenizer(services.parse(VALUES).tokenizer)) == ([], [])
    with pytest.raises(ConfigError, match="config.preference: .*train.jsonl, line 1: .* need 10 positions"):
        load(row_length=9)
    shared = written(tmp_path / "shared.jsonl", [("da", "a", "b"), (WORDS[2], "a", "b")])
    with pytest.raises(ConfigError, match=r"shared.jsonl, line 2: the prompt is in .*train.jsonl, line 3 too"):
        load(heldout=shared)
    with pytest.raises(ConfigError, match="absent.jsonl: there is no such file"):
        load(path=str(tmp_path / "absent.jsonl"))


@pytest.mark.slow
def test_a_run_with_all_stages_that_is_resumed_within_the_pairs_is_the_unbroken_one(values, tmp_path):
    config = services.parse(values)

    def run(workdir, stop_at=None):
        """Goes on from the last checkpoint; saves and ends after step `stop_at`, or at the end."""
        seen = []
        with services.build(config, str(workdir)) as built:
            state = lifecycle.resume(built) or lifecycle.start(built)

            def after(state, name, metrics, collected):
                seen.append((state.step, name, metrics["loss/total"]))
                if lifecycle.evaluation_due(config, state.step):
                    lifecycle.evaluate(built, state, name)
                if state.step in (stop_at, config.total_steps):
                    lifecycle.save(built, state, None)
                return state.step != stop_at

            loop.train(built, state, after)
            return seen, state

    whole, end = run(tmp_path / "whole")
    assert [name for _, name, _ in whole] == ["sft", "preference", "preference", "preference", "grpo"]
    assert whole[1][2] == pytest.approx(0.693147, abs=1e-6)
    pairs = [row for row in end.evaluations if row["metric"] == "pair_accuracy"]
    assert [(row["step"], row["stage"], row["n"]) for row in pairs] == [(2, "preference", 4), (4, "preference", 4)]
    broken, _ = run(tmp_path / "broken", stop_at=3)
    rest, resumed = run(tmp_path / "broken")
    assert broken + rest == whole
    for ours, theirs in zip(
        jax.tree.leaves(dataclasses.asdict(end.train)), jax.tree.leaves(dataclasses.asdict(resumed.train))
    ):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert resumed.evaluations == end.evaluations
