from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.algorithms import grpo, sft
from rl_posttrain.algorithms.grpo import AlgorithmConfig
from rl_posttrain.batch import Batch
from rl_posttrain.config import ConfigError, build
from rl_posttrain.data.packing import DTYPES

CFG = AlgorithmConfig(clip_low=0.2, clip_high=0.28, kl_coefficient=0.05)


def make_batch(seed=0, shape=(3, 7), **fields):
    """Random per-token values; about a third of the tokens is not trained."""
    rng = np.random.default_rng(seed)
    values = {name: np.zeros(shape, dtype) for name, dtype in DTYPES.items()}
    values["loss_weight"] = (rng.uniform(0.01, 0.1, shape) * (rng.random(shape) < 0.7)).astype(np.float32)
    values["advantages"] = rng.normal(size=shape).astype(np.float32)
    values["behaviour_logprobs"] = rng.uniform(-3, -0.1, shape).astype(np.float32)
    values["reference_logprobs"] = rng.uniform(-3, -0.1, shape).astype(np.float32)
    values |= {name: np.asarray(value, DTYPES[name]) for name, value in fields.items()}
    return Batch(**{name: jnp.asarray(value) for name, value in values.items()})


def policy(batch, seed=1, spread=0.3):
    noise = np.random.default_rng(seed).normal(0, spread, batch.tokens.shape)
    return jnp.asarray(batch.behaviour_logprobs + noise, jnp.float32)


def reference_loss(logprobs, batch, cfg):
    """The formula once more, in float64 NumPy, token by token."""
    total = 0.0
    fields = (batch.loss_weight, batch.advantages, batch.behaviour_logprobs, batch.reference_logprobs)
    rows = np.stack([np.asarray(field, np.float64).ravel() for field in fields], axis=1)
    for logprob, (weight, advantage, behaviour, reference) in zip(logprobs.ravel(), rows, strict=True):
        ratio = np.exp(logprob - behaviour)
        clipped = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
        distance = reference - logprob
        kl = np.exp(distance) - distance - 1
        total += weight * (cfg.kl_coefficient * kl - min(ratio * advantage, clipped * advantage))
    return total


def with_bonus(batch, coefficient=0.3, cfg=CFG):
    """A batch and a config with an entropy bonus."""
    full = jnp.full(batch.tokens.shape, coefficient, jnp.float32)
    return batch.replace(entropy_coefficient=full), replace(cfg, entropy_coefficient=coefficient)


def evaluate(logprobs, batch, cfg=CFG, count=10.0):
    return grpo.loss(logprobs, jnp.full(logprobs.shape, 2.0), batch, cfg, jnp.asarray(count))


def test_loss_and_metrics_hand_computed():
    batch = make_batch(
        shape=(1, 4),
        loss_weight=[[0.5, 0.25, 0.25, 0.0]],
        advantages=[[1.0, 1.0, -2.0, 9.0]],
        behaviour_logprobs=[np.log([0.5, 0.5, 0.5, 0.5])],
        reference_logprobs=[np.log([0.5, 0.75, 0.25, 0.9])],
    )
    logprobs = jnp.log(jnp.array([[0.5, 0.75, 0.25, 0.001]]))  # ratios 1, 1.5 (clipped to 1.28), 0.5 (to 0.8)
    scalar, metrics = evaluate(logprobs, batch, count=3.0)
    assert metrics["loss/policy"] == pytest.approx(-(0.5 * 1 + 0.25 * 1.28 + 0.25 * -2 * 0.8), rel=1e-6)
    assert metrics["loss/kl"] == pytest.approx(0, abs=1e-8)  # the reference agrees wherever it counts
    assert scalar == metrics["loss/total"] == metrics["loss/policy"] + metrics["loss/kl"]
    assert metrics["policy/ratio_mean"] == pytest.approx((1 + 1.5 + 0.5) / 3, rel=1e-6)
    assert metrics["policy/clip_high_fraction"] == pytest.approx(1 / 3)
    assert metrics["policy/clip_low_fraction"] == pytest.approx(1 / 3)
    assert metrics["policy/entropy"] == pytest.approx(2.0)
    assert metrics["policy/log_ratio_max"] == pytest.approx(np.log(2), rel=1e-6)


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.05, 1.0])
def test_value_and_gradient_match_finite_differences_of_the_formula_in_float64(kl_coefficient):
    cfg = replace(CFG, kl_coefficient=kl_coefficient)
    batch = make_batch()
    logprobs = policy(batch)
    (scalar, _), gradient = jax.value_and_grad(evaluate, has_aux=True)(logprobs, batch, cfg)
    exact, gradient = np.asarray(logprobs, np.float64), np.asarray(gradient)
    assert scalar == pytest.approx(reference_loss(exact, batch, cfg), rel=1e-5)
    for index in np.ndindex(*exact.shape):
        step = np.zeros_like(exact)
        step[index] = 1e-6
        slope = (reference_loss(exact + step, batch, cfg) - reference_loss(exact - step, batch, cfg)) / 2e-6
        assert gradient[index] == pytest.approx(slope, rel=1e-4, abs=1e-7), index


def test_at_an_unchanged_policy_the_ratio_is_one_and_the_gradient_is_reinforce():
    batch = make_batch()
    (_, metrics), gradient = jax.value_and_grad(evaluate, has_aux=True)(
        batch.behaviour_logprobs,
        batch,
        replace(CFG, kl_coefficient=0.0),
        float((batch.loss_weight > 0).sum()),
    )
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["policy/log_ratio_max"] == metrics["policy/clip_low_fraction"] == 0
    np.testing.assert_allclose(gradient, -batch.loss_weight * batch.advantages, rtol=1e-6, atol=1e-9)


def test_untrained_tokens_can_hold_anything():
    batch = make_batch()
    hidden = batch.loss_weight == 0
    logprobs = policy(batch)
    wild = {
        name: jnp.where(hidden, value, getattr(batch, name))
        for name, value in {"behaviour_logprobs": -1e9, "reference_logprobs": 1e9, "advantages": 1e30}.items()
    }
    compute = jax.value_and_grad(evaluate, has_aux=True)
    (expected, metrics), gradient = compute(logprobs, batch)
    (scalar, wild_metrics), wild_gradient = compute(logprobs, batch.replace(**wild))
    assert scalar == expected
    np.testing.assert_array_equal(gradient, wild_gradient)
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in wild_metrics.items()}


def test_a_policy_far_from_everything_gives_a_finite_gradient():
    batch = make_batch()
    for shift in (-200.0, 200.0):
        (scalar, _), gradient = jax.value_and_grad(evaluate, has_aux=True)(policy(batch) + shift, batch)
        assert np.isfinite(scalar) and np.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["grpo", "bonus", "sft"])
def test_everything_returned_is_additive_over_rows(name):
    batch, cfg = with_bonus(make_batch(shape=(6, 7)))
    logprobs = policy(batch)
    call = {
        "grpo": lambda x, rows: evaluate(x, rows),
        "bonus": lambda x, rows: evaluate(x, rows, cfg),
        "sft": lambda x, rows: sft.loss(x, jnp.full(x.shape, 2.0), rows, jnp.asarray(10.0)),
    }[name]
    whole, metrics = call(logprobs, batch)
    parts = [call(logprobs[i : i + 2], jax.tree.map(lambda x: x[i : i + 2], batch)) for i in (0, 2, 4)]  # noqa: B023
    assert whole == pytest.approx(sum(float(scalar) for scalar, _ in parts), rel=1e-5)
    for key, value in metrics.items():
        combine = max if key.endswith("_max") else sum
        assert value == pytest.approx(combine(float(part[key]) for _, part in parts), rel=1e-5), key


def test_an_entropy_bonus_is_the_formula_and_its_gradient_is_exact():
    batch, cfg = with_bonus(make_batch())
    logprobs = policy(batch)
    entropy = jnp.asarray(np.random.default_rng(2).uniform(0, 3, batch.tokens.shape), jnp.float32)
    value = lambda x, h: grpo.loss(x, h, batch, cfg, jnp.asarray(10.0))
    (scalar, metrics), (by_logprob, by_entropy) = jax.value_and_grad(value, (0, 1), has_aux=True)(logprobs, entropy)
    weight = np.asarray(batch.loss_weight, np.float64)
    bonus = -0.3 * (weight * np.asarray(entropy)).sum()
    assert scalar == pytest.approx(reference_loss(np.asarray(logprobs, np.float64), batch, cfg) + bonus, rel=1e-5)
    assert metrics["loss/entropy"] == pytest.approx(bonus, rel=1e-5)
    assert metrics["loss/total"] == scalar
    np.testing.assert_allclose(by_entropy, -0.3 * weight, rtol=1e-6)
    np.testing.assert_array_equal(by_logprob, jax.grad(lambda x: evaluate(x, batch)[0])(logprobs))


def test_an_entropy_bonus_of_logits_has_the_gradient_of_finite_differences():
    """Through the softmax: -p (log p + H) a logit, at the coefficient and weight of each token."""
    batch, cfg = with_bonus(make_batch())
    without = replace(cfg, entropy_coefficient=0.0)
    rng = np.random.default_rng(3)
    logits, weight = rng.normal(0, 2, (*batch.tokens.shape, 5)), np.asarray(batch.loss_weight, np.float64)

    def bonus(x):
        log_p = jax.nn.log_softmax(x)
        chosen, entropy = log_p[..., 0], -(jnp.exp(log_p) * log_p).sum(-1)
        whole, rest = (grpo.loss(chosen, entropy, batch, c, jnp.asarray(10.0))[0] for c in (cfg, without))
        return whole - rest

    def exactly(x):
        log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
        return 0.3 * (weight * (np.exp(log_p) * log_p).sum(-1)).sum()

    gradient = np.asarray(jax.grad(bonus)(jnp.asarray(logits, jnp.float32)))
    for index in [*zip(*(rng.integers(0, n, 20) for n in logits.shape), strict=True)]:
        step = np.zeros_like(logits)
        step[index] = 1e-6
        slope = (exactly(logits + step) - exactly(logits - step)) / 2e-6
        assert gradient[index] == pytest.approx(slope, rel=1e-3, abs=1e-6), index
    assert (gradient[weight == 0] == 0).all() and np.abs(gradient).max() > 1e-3


def test_untrained_tokens_have_no_part_in_the_bonus():
    batch, cfg = with_bonus(make_batch())
    wild = jnp.where(batch.loss_weight == 0, jnp.nan, 2.0)
    filled = batch.replace(entropy_coefficient=jnp.where(batch.loss_weight == 0, jnp.inf, 0.3))
    value = lambda h, rows: grpo.loss(policy(batch), h, rows, cfg, jnp.asarray(10.0))[0]
    expected, scalar = (
        jax.value_and_grad(value)(*given) for given in ((jnp.full_like(wild, 2), batch), (wild, filled))
    )
    assert scalar[0] == expected[0]
    np.testing.assert_array_equal(scalar[1], expected[1])


@pytest.mark.parametrize(
    ("coefficient", "entropy", "expected"), [(0.1, 0.5, 0.15), (0.1, 1.5, 0.05), (0.02, 1.5, 0.0), (0.0, 0.5, 0.05)]
)
def test_the_bonus_rises_below_the_target_and_falls_above_it(coefficient, entropy, expected):
    assert grpo.adapted_entropy_coefficient(coefficient, entropy, 1.0, 0.05) == pytest.approx(expected)


def test_a_target_alone_asks_for_the_bonus():
    assert grpo.uses_entropy(AlgorithmConfig(entropy_target=0.5))
    assert not grpo.uses_entropy(AlgorithmConfig())


def test_sft_hand_computed():
    batch = make_batch(shape=(1, 3), loss_weight=[[0.5, 0.5, 0.0]])
    logprobs = jnp.array([[-1.0, -3.0, -9.0]])
    (scalar, metrics), gradient = jax.value_and_grad(sft.loss, has_aux=True)(
        logprobs, jnp.array([[0.25, 0.75, 9.0]]), batch, jnp.asarray(2.0)
    )
    assert scalar == metrics["loss/total"] == 2.0
    assert metrics["policy/logprob_mean"] == -2.0 and metrics["policy/entropy"] == 0.5
    np.testing.assert_array_equal(gradient, [[-0.5, -0.5, 0]])


def test_a_reference_is_needed_and_reported_only_with_a_kl_term():
    batch = make_batch()
    without = replace(CFG, kl_coefficient=0.0)
    _, metrics = evaluate(policy(batch), batch, without)
    assert "policy/kl" not in metrics and metrics["loss/kl"] == 0
    moved = batch.replace(reference_logprobs=batch.reference_logprobs + 1)
    assert evaluate(policy(batch), moved, without)[0] == evaluate(policy(batch), batch, without)[0]
    assert evaluate(policy(batch), moved)[0] != evaluate(policy(batch), batch)[0]


@pytest.mark.parametrize("change", [{"clip_low": 0.1}, {"clip_high": 0.5}, {"kl_coefficient": 0.2}])
def test_every_field_of_the_device_loss_has_an_effect(change):
    batch = make_batch()
    assert evaluate(policy(batch), batch)[0] != evaluate(policy(batch), batch, replace(CFG, **change))[0]


@pytest.mark.parametrize(
    "values",
    [
        {"clip_low": 0.0},
        {"clip_low": 1.5},
        {"clip_high": -0.1},
        {"clip_high": float("nan")},
        {"kl_coefficient": -1.0},
        {"aggregation": "constant_length"},
        {"constant_length": 100},
        {"advantage": "global"},
        {"advantage_scale": "step"},  # of mean_std, which is scaled
        {"domain_weights": {"strings/sort": -1.0}},
        {"dual_clip": 1.0},
        {"surrogate": "cispo", "dual_clip": 3.0},
        {"surrogate": "soft_gate", "clip_high": 0.3},
        {"surrogate": "soft_gate", "gate_positive": 0.0},
        {"gate_negative": 2.0},
        {"surrogate": "reinforce", "clip_low": 0.1},
        {"surrogate": "reinforce", "ratio": "sequence"},
        {"surrogate": "reinforce", "proximal": "step_start"},
        {"surrogate": "cispo", "ratio": "sequence_token"},
        {"correction": "importance"},  # of a ratio that corrects
        {"correction": "truncated", "proximal": "step_start"},
        {"correction_low": 0.5},
        {"kl": "k2"},  # without a coefficient
        {"kl_in": "reward"},
        {"reference_every": 2},
        {"kl_coefficient": 0.1, "kl": "k1"},
        {"kl_coefficient": 0.1, "kl": "k3_corrected", "kl_in": "reward"},
        {"kl_coefficient": 0.1, "kl_target": 0.1},
        {"kl_coefficient": 0.1, "kl_in": "reward", "kl_target": 0.0},
        {"kl_coefficient": 0.1, "reference_every": 0},
        {"kl_coefficient": 0.1, "reference_mixture": 0.5},
        {"kl_coefficient": 0.1, "reference_every": 1, "reference_mixture": 0.0},
        {"negative_weight": -0.1},
        {"negative_weight": float("inf")},
        {"entropy_coefficient": -0.1},
        {"entropy_coefficient": float("nan")},
        {"entropy_target": 0.0},
        {"entropy_step": 0.1},  # without a target
        {"entropy_target": 0.5, "entropy_step": 0.0},
    ],
)
def test_configs_out_of_range_or_without_effect_are_refused(values):
    with pytest.raises(ConfigError):
        build(AlgorithmConfig, values)


def test_weights_of_unknown_domains_are_refused():
    cfg = AlgorithmConfig(domain_weights={"strings/srot": 2.0})
    with pytest.raises(ValueError, match="strings/srot.*strings/sort"):
        cfg.check_domains(["strings/sort"])
    cfg.check_domains(["strings/sort", "strings/srot"])


def test_rows_of_another_shape_are_refused_in_tests():
    batch = make_batch()
    with pytest.raises(Exception, match="entropy"):
        grpo.loss(policy(batch), jnp.zeros((1, 7)), batch, CFG, jnp.asarray(1.0))
