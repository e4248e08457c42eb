"""What the loop does with the reference and the proximal policy, without a model."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain import loop, services
from rl_posttrain.algorithms.grpo import AlgorithmConfig
from rl_posttrain.batch import TrainState
from rl_posttrain.loop import RunState
from rl_posttrain.types import Rollout, Task, Verdict

LENGTHS = ((2, 5), (1, 3))
PASSED = ((True, False), (True, True))  # the second group has no signal but for a KL penalty
ENTROPY = 0.7  # that the updates measure
DOMAINS = ("strings/sort", "strings/reverse")


def groups():
    rng = np.random.default_rng(0)

    def rollout(group, sample):
        length = LENGTHS[group][sample]
        logprobs = tuple(rng.uniform(-2, -1, length).tolist())
        task = Task(DOMAINS[group], "train", group, "")
        return Rollout(task, sample, (5, 6, 7), (5 + sample,) * length, logprobs, "", "stop", 1.0, 0)

    return [[rollout(g, s) for s in range(2)] for g in range(2)]


GROUPS = groups()


def scored(params, batch):
    """Logprobs that depend on the parameters and the token."""
    return params["w"] - jnp.asarray(batch.labels, jnp.float32) / 4, None


def run(monkeypatch, **algorithm):
    """(metrics, collected, batches that reached the update, state) of one step."""
    config = services.parse(
        {
            "model": dict(embed_dim=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8),
            "tokenizer": dict(kind="byte"),
            "tasks": {name: {} for name in DOMAINS},
            "rollout": dict(prompts_per_step=2, group_size=2, max_tokens=8),
            "grpo": dict(row_length=16, epochs=2),
            "algorithm": algorithm,
        }
    )
    seen = []

    def update(state, batch):
        seen.append(batch)
        moved = replace(state, step=state.step + 1, params={"w": state.params["w"] + 1})
        return moved, {"policy/log_ratio_max": 0.0, "policy/entropy": ENTROPY}

    made = SimpleNamespace(
        config=config,
        policy=lambda params: params,
        tokenizer=None,
        domains={},
        place=lambda batch: batch,
        rows_multiple=lambda section: 1,
        score=scored,
        grpo_update=update,
        sandbox=SimpleNamespace(statistics=dict),
    )
    monkeypatch.setattr(loop, "draw_tasks", lambda services, state: [])
    monkeypatch.setattr(loop, "generate", lambda *arguments, **named: GROUPS)
    verdicts = [Verdict("pass" if passed else "wrong") for group in PASSED for passed in group]
    monkeypatch.setattr(loop, "verify", lambda domains, rollouts: verdicts)
    params = {"w": jnp.float32(3)}
    coefficients = (config.algorithm.kl_coefficient, config.algorithm.entropy_coefficient)
    state = RunState(0, TrainState(0, params, ()), {"w": jnp.float32(-1)}, {}, None, None, [], *coefficients)
    metrics, collected = loop.grpo_step(made, state)
    return metrics, collected, seen, state


def expected_kl():
    """k1 of each completion, against the reference's logprobs."""
    distance = lambda r: np.array(r.behaviour_logprobs) - (-1 - np.array(r.completion_tokens) / 4)
    return np.array([[distance(r).sum() for r in group] for group in GROUPS])


def test_a_kl_penalty_lowers_the_reward_of_each_completion(monkeypatch):
    metrics, collected, batches, _ = run(monkeypatch, advantage="mean", kl="k1", kl_in="reward", kl_coefficient=0.1)
    np.testing.assert_allclose(collected.kl, expected_kl(), rtol=1e-5)
    np.testing.assert_array_equal(collected.rewards, np.array(PASSED, np.float32))  # reported as they were earned
    penalised = np.array(PASSED) - 0.1 * expected_kl()
    np.testing.assert_allclose(collected.advantages, penalised - penalised.mean(axis=1, keepdims=True), rtol=1e-4)
    assert metrics["policy/kl"] == pytest.approx(expected_kl().sum() / 11, rel=1e-5)
    assert metrics["policy/kl_coefficient"] == 0.1
    assert (batches[0].reference_logprobs == 0).all()  # no term in the loss
    assert (batches[0].loss_weight > 0).sum() == 11  # both groups


def test_a_target_moves_the_coefficient(monkeypatch):
    penalty = dict(kl="k1", kl_in="reward", kl_coefficient=0.1)
    assert run(monkeypatch, **penalty)[3].kl_coefficient == 0.1
    assert run(monkeypatch, **penalty, kl_target=1e-3)[3].kl_coefficient == pytest.approx(0.102)
    assert run(monkeypatch, **penalty, kl_target=1e3)[3].kl_coefficient == pytest.approx(0.098)


def test_the_proximal_policy_is_that_of_the_steps_start_in_every_epoch(monkeypatch):
    _, _, batches, state = run(monkeypatch, proximal="step_start")
    assert len(batches) == 2 and state.train.params["w"] == 5
    for batch in batches:
        np.testing.assert_array_equal(batch.proximal_logprobs, scored({"w": 3}, batch)[0])
    _, _, batches, _ = run(monkeypatch)
    assert (batches[0].proximal_logprobs == 0).all()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, -1.0), (dict(reference_every=2), -1.0), (dict(reference_every=1), 5.0),
     (dict(reference_every=1, reference_mixture=0.25), 0.5)],
)  # fmt: skip
def test_a_reference_is_frozen_replaced_or_moved(monkeypatch, fields, expected):
    _, _, batches, state = run(monkeypatch, kl_coefficient=0.1, **fields)
    assert state.reference["w"] == expected  # the policy went from 3 to 5
    np.testing.assert_array_equal(batches[1].reference_logprobs, scored({"w": -1}, batches[1])[0])


def test_domain_weights_shift_the_average_and_an_unknown_domain_is_refused(monkeypatch):
    weights = {"strings/sort": 3.0}
    _, _, batches, _ = run(monkeypatch, kl_coefficient=0.1, domain_weights=weights)
    trained = batches[0].loss_weight[batches[0].loss_weight > 0]
    np.testing.assert_allclose(np.unique(trained), [1 / 25, 3 / 25], rtol=1e-6)  # 7 tokens at 3, 4 at 1
    with pytest.raises(services.ConfigError, match="strings/srot"):
        run(monkeypatch, domain_weights={"strings/srot": 1.0})


def test_scales_reach_over_the_step(monkeypatch):
    _, collected, _, _ = run(monkeypatch, advantage="step_mean", advantage_scale="step")
    rewards = np.array(PASSED, float)
    np.testing.assert_allclose(collected.advantages, (rewards - rewards.mean()) / rewards.std(), rtol=1e-5)
    assert AlgorithmConfig().advantage_scale == "none"
    np.testing.assert_allclose(run(monkeypatch)[1].advantages, [[1, -1], [0, 0]], rtol=1e-5)


def test_an_entropy_bonus_reaches_every_token_of_every_group(monkeypatch):
    metrics, _, batches, state = run(monkeypatch, entropy_coefficient=0.25)
    for batch in batches:
        assert (batch.entropy_coefficient == 0.25).all() and (batch.loss_weight > 0).sum() == 11
    assert metrics["policy/entropy_coefficient"] == state.entropy_coefficient == 0.25
    metrics, _, batches, _ = run(monkeypatch)
    assert "policy/entropy_coefficient" not in metrics
    assert (batches[0].entropy_coefficient == 0).all() and (batches[0].loss_weight > 0).sum() == 7


@pytest.mark.parametrize(
    ("first", "target", "expected"), [(0.25, 0.8, 0.35), (0.25, 0.6, 0.15), (0.0, 0.8, 0.1), (0.05, 0.6, 0.0)]
)
def test_an_entropy_target_moves_the_coefficient_by_a_step(monkeypatch, first, target, expected):
    bonus = dict(entropy_coefficient=first, entropy_target=target, entropy_step=0.1)
    metrics, _, batches, state = run(monkeypatch, **bonus)
    assert metrics["policy/entropy_coefficient"] == first  # in this step
    assert all((batch.entropy_coefficient == np.float32(first)).all() for batch in batches)
    assert state.entropy_coefficient == pytest.approx(expected)


def test_where_nothing_was_trained_no_entropy_moves_the_coefficient(monkeypatch):
    monkeypatch.setattr(loop, "group_rewards", lambda group, *_: [None] * len(group))
    assert run(monkeypatch, entropy_coefficient=0.25, entropy_target=0.8)[3].entropy_coefficient == 0.25


@pytest.mark.parametrize("weight", [0.0, 0.5, 10.0])
def test_negative_advantages_have_a_weight(monkeypatch, weight):
    _, collected, batches, _ = run(monkeypatch, negative_weight=weight)
    np.testing.assert_allclose(collected.advantages, [[1, -weight], [0, 0]], rtol=1e-5)
    trained = batches[0].advantages[batches[0].loss_weight > 0]  # what has none now counts in the mean all the same
    np.testing.assert_allclose(np.sort(trained), [-weight] * 5 + [1] * 2, rtol=1e-5)
