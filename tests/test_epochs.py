"""Several epochs and mini-batches on one rollout, with a real model: what is old stays old, and clipping sets in."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from rl_posttrain import loop, services
from rl_posttrain.data.tokenizer import make_tokenizer
from rl_posttrain.loop import RunState
from rl_posttrain.sharding import mesh as mesh_lib
from rl_posttrain.types import Task, Verdict

EPOCHS, MINI_BATCHES = 2, 2
CONFIG = {
    "model": dict(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16),
    "tokenizer": dict(kind="character", alphabet="abcdefgh "),
    "mesh": dict(data=2, fsdp=-1),
    "tasks": {"strings/reverse": {}},
    "rollout": dict(prompts_per_step=4, group_size=4, max_tokens=6, prompt_bucket=8, temperature=0.8),
    "grpo": dict(row_length=48, epochs=EPOCHS, mini_batches=MINI_BATCHES),
    "update": dict(learning_rate=0.03, gradient_clip=100.0),
    "algorithm": dict(clip_low=0.1, clip_high=0.1, entropy_coefficient=1e-3),
}
PROMPTS = ("abc", "de fg", "hag", "c")


@dataclass(frozen=True)
class Update:
    """What went into an optimizer step, and what it measured."""

    batch: Any
    metrics: dict[str, float]
    version: int


@pytest.fixture(scope="module")
def step() -> tuple[loop.Collected, dict[str, float], list[Update], RunState]:
    """One step of the loop: real rollouts, verdicts by the sample's number, real updates."""
    config = services.parse(CONFIG)
    mesh = mesh_lib.make_mesh(config.mesh)
    updates: list[Update] = []
    with jax.set_mesh(mesh), pytest.MonkeyPatch.context() as patch:
        made = services.compiled(config, mesh)
        compiled = made.pop("grpo_update")

        def update(state, batch):
            version, host = int(state.step), jax.device_get(batch)
            state, metrics = compiled(state, batch)
            updates.append(Update(host, {name: float(value) for name, value in metrics.items()}, version))
            return state, metrics

        tasks = [Task("strings/reverse", "train", i, prompt) for i, prompt in enumerate(PROMPTS)]
        patch.setattr(loop, "draw_tasks", lambda services, state: tasks)
        passes = lambda rollout: Verdict("pass" if rollout.sample % 2 else "wrong")
        patch.setattr(loop, "verify", lambda domains, rollouts: [passes(rollout) for rollout in rollouts])
        built = SimpleNamespace(
            **made,
            config=config,
            grpo_update=update,
            tokenizer=make_tokenizer(config.tokenizer),
            domains={},
            sandbox=SimpleNamespace(statistics=dict),
        )
        state = RunState(0, made["init_train_state"](made["init_params"]()), None, {}, None, None, [], 0.0, 1e-3)
        metrics, collected = loop.grpo_step(built, state)
    return collected, metrics, updates, state


def test_each_epoch_takes_a_step_on_each_mini_batch(step):
    _, metrics, updates, state = step
    assert [update.version for update in updates] == list(range(EPOCHS * MINI_BATCHES))
    assert int(state.train.step) == EPOCHS * MINI_BATCHES
    assert all(update.metrics["update/skipped"] == 0 for update in updates)
    assert metrics["policy/ratio_mean"] == pytest.approx(np.mean([u.metrics["policy/ratio_mean"] for u in updates]))
    first, second = updates[:MINI_BATCHES]
    assert not np.array_equal(first.batch.tokens, second.batch.tokens)


def test_behaviour_logprobs_stay_those_of_the_rollout(step):
    collected, _, updates, _ = step
    for earlier, later in zip(updates, updates[MINI_BATCHES:]):  # the same mini-batch, an epoch later
        jax.tree.map(np.testing.assert_array_equal, earlier.batch, later.batch)
    trained = [update.batch.behaviour_logprobs[update.batch.loss_weight > 0] for update in updates[:MINI_BATCHES]]
    sampled = [logprob for group in collected.groups for rollout in group for logprob in rollout.behaviour_logprobs]
    np.testing.assert_array_equal(np.sort(np.concatenate(trained)), np.sort(np.array(sampled, np.float32)))
    for update in updates:
        assert (update.batch.policy_version[update.batch.loss_weight > 0] == 0).all()


def test_the_ratio_is_one_at_the_first_update_alone(step):
    _, metrics, updates, _ = step
    first, *later = [update.metrics for update in updates]
    assert first["policy/log_ratio_max"] < 1e-5 and first["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/mismatch"] == first["policy/log_ratio_max"]  # what the alarm sees
    for update in later:  # the second mini-batch of the first epoch meets a policy that has moved already
        assert update["policy/log_ratio_max"] > 1e-3


def test_bounds_are_hit_later_and_not_at_first(step):
    _, _, updates, _ = step
    hits = [u.metrics["policy/clip_low_fraction"] + u.metrics["policy/clip_high_fraction"] for u in updates]
    assert hits[0] == 0 and all(hit > 0 for hit in hits[MINI_BATCHES:])
