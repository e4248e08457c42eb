import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_posttrain.algorithms.update import UpdateConfig, decayed, make_optimizer, schedule
from rl_posttrain.config import ConfigError, build
from rl_posttrain.model.transformer import ModelConfig, declare, init

CFG = UpdateConfig(
    learning_rate=0.1,
    warmup_steps=2,
    schedule="cosine",
    final_learning_rate_fraction=0.1,
    weight_decay=0.5,
    b1=0.8,
    b2=0.9,
    epsilon=1e-3,
    gradient_clip=3.0,
)
PARAMS = {"query": np.array([[1.0, -2.0], [0.5, 3.0]]), "final_norm": np.array([1.0, 2.0])}
TOTAL = 6


def gradients(steps):
    rng = np.random.default_rng(0)
    draw = lambda p: rng.normal(0, 2, p.shape)
    return [{name: draw(p) for name, p in PARAMS.items()} for _ in range(steps)]


def run(cfg, steps=4):
    optimizer = make_optimizer(cfg, TOTAL)
    params = jax.tree.map(jnp.float32, PARAMS)
    state = optimizer.init(params)
    for gradient in gradients(steps):
        updates, state = optimizer.update(jax.tree.map(jnp.float32, gradient), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_rates_hand_computed():
    rates = lambda cfg: [float(schedule(cfg, TOTAL)(step)) for step in range(TOTAL + 2)]
    linear = UpdateConfig(learning_rate=1.0, warmup_steps=2, schedule="linear")
    np.testing.assert_allclose(rates(linear), [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0], atol=1e-6)
    floored = replace(linear, final_learning_rate_fraction=0.2)
    np.testing.assert_allclose(rates(floored), [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2], atol=1e-6)
    cosine = replace(linear, schedule="cosine")
    half = 0.5 * (1 + math.cos(math.pi / 4))
    np.testing.assert_allclose(rates(cosine), [0.5, 1, 1, half, 0.5, 1 - half, 0, 0], atol=1e-6)
    constant = UpdateConfig(learning_rate=1.0, warmup_steps=4)
    np.testing.assert_allclose(rates(constant), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1], atol=1e-6)
    assert rates(UpdateConfig(learning_rate=3e-4)) == pytest.approx([3e-4] * 8)


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="total_steps=6 .*warmup_steps=7"):
        schedule(UpdateConfig(warmup_steps=7), 6)


def test_steps_match_adamw_written_out_in_numpy():
    params, state = run(CFG)
    expected = {name: p.copy() for name, p in PARAMS.items()}
    first, second = ({name: np.zeros_like(p) for name, p in PARAMS.items()} for _ in range(2))
    rates = [0.05, 0.1, 0.1, 0.1 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))]
    clipped = []
    for step, (gradient, rate) in enumerate(zip(gradients(4), rates, strict=True), start=1):
        norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
        clipped.append(norm > 3.0)
        for name, raw in gradient.items():
            g = raw * min(1.0, 3.0 / norm)
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.9 * second[name] + 0.1 * g**2
            direction = (first[name] / (1 - 0.8**step)) / (np.sqrt(second[name] / (1 - 0.9**step)) + 1e-3)
            decay = 0.5 * expected[name] if name == "query" else 0.0  # norms do not decay
            expected[name] = expected[name] - rate * (direction + decay)
    for name in PARAMS:
        np.testing.assert_allclose(params[name], expected[name], rtol=2e-5)
    assert any(clipped) and optax.tree.get(state, "clipped") == float(clipped[-1])
    assert optax.tree.get(state, "learning_rate") == pytest.approx(rates[-1])


def test_no_clipping_with_an_infinite_norm():
    params, state = run(replace(CFG, gradient_clip=math.inf))
    assert optax.tree.get(state, "clipped") == 0
    assert all(np.isfinite(p).all() for p in params.values())


def test_a_gradient_of_zero_is_not_divided_by():
    optimizer = make_optimizer(CFG, TOTAL)
    zero = jax.tree.map(jnp.zeros_like, jax.tree.map(jnp.float32, PARAMS))
    updates, _ = optimizer.update(zero, optimizer.init(zero), zero)
    assert all((u == 0).all() for u in updates.values())


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.2},
        {"warmup_steps": 3},
        {"schedule": "linear"},
        {"final_learning_rate_fraction": 0.5},
        {"weight_decay": 0.1},
        {"b1": 0.5},
        {"b2": 0.5},
        {"epsilon": 0.1},
        {"gradient_clip": 1.0},
    ],
)
def test_every_field_moves_the_parameters(change):
    before, after = run(CFG)[0], run(replace(CFG, **change))[0]
    assert not np.array_equal(before["query"], after["query"])


def test_weight_decay_spares_norms_biases_and_the_embedding():
    cfg = ModelConfig(
        vocab_size=8, embed_dim=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2, mlp_dim=4,
        qk_norm=True, qkv_bias=True, tie_embeddings=False,
    )  # fmt: skip
    mask = decayed(init(jax.random.key(0), cfg))
    spared = {name for name, value in {**mask, **mask["layers"]}.items() if value is False}
    assert spared == {"embed", "final_norm"} | {
        name for name, p in declare(cfg)["layers"].items() if p.initialiser != "normal"
    }


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"warmup_steps": -1},
        {"micro_batches": 0},
        {"schedule": "cosine", "final_learning_rate_fraction": 1.5},
        {"final_learning_rate_fraction": 0.1},
        {"weight_decay": -0.1},
        {"b1": 1.0},
        {"b2": -0.1},
        {"epsilon": 0.0},
        {"gradient_clip": 0.0},
        {"schedule": "step"},
    ],
)
def test_configs_out_of_range_or_without_effect_are_refused(values):
    with pytest.raises(ConfigError):
        build(UpdateConfig, values)
