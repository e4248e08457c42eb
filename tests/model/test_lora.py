"""Low-rank adapters: the same function attached and merged, the base at first, scales, dropout, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.model import lora, transformer
from rl_posttrain.model.lora import LoraConfig
from rl_posttrain.model.transformer import ModelConfig

CFG = ModelConfig(
    vocab_size=37, embed_dim=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24, qkv_bias=True
)
EXPERTS = dataclasses.replace(CFG, num_experts=4, experts_per_token=2)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 37, (2, 9)))
ROW = (jnp.broadcast_to(jnp.arange(9), (2, 9)), jnp.ones((2, 9), jnp.int32), jnp.full((2, 9), -1))


def logits(params, cfg):
    return transformer.logits(params, cfg, transformer.forward(params, cfg, TOKENS, *ROW))


def trained(cfg, config):
    """Adapters as after some training: neither matrix is 0."""
    adapters = lora.init_adapters(jax.random.key(1), cfg, config)
    leaves, structure = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return jax.tree.unflatten(structure, [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


@pytest.mark.parametrize("cfg", [CFG, EXPERTS], ids=["mlp", "experts"])
@pytest.mark.parametrize("config", [LoraConfig(rank=2), LoraConfig(rank=4, alpha=3.0, rslora=True)], ids=str)
def test_o11_attached_and_merged_adapters_are_one_function(cfg, config):
    params = transformer.init(jax.random.key(0), cfg)
    base = logits(params, cfg)
    fresh = lora.init_adapters(jax.random.key(1), cfg, config)
    np.testing.assert_array_equal(logits(lora.attach(params, fresh, config), cfg), base)
    adapters = trained(cfg, config)
    attached, merged = lora.attach(params, adapters, config), lora.merge(params, adapters, config)
    got = logits(attached, cfg)
    assert float(jnp.abs(got - base).max()) > 0.05
    np.testing.assert_allclose(logits(merged, cfg), got, atol=1e-5)
    negated = {"layers": {n: -x if n.endswith("_b") else x for n, x in adapters["layers"].items()}}
    np.testing.assert_allclose(logits(lora.merge(merged, negated, config), cfg), base, atol=1e-5)


def test_the_product_is_scaled_by_alpha_over_rank():
    config = LoraConfig(rank=2, alpha=8.0, targets=("down",))
    assert config.scale == 4.0 and LoraConfig(rank=4, alpha=8.0, rslora=True).scale == 4.0
    params = transformer.init(jax.random.key(0), CFG)
    adapters = trained(CFG, config)
    a, b = adapters["layers"]["down_a"], adapters["layers"]["down_b"]
    expected = params["layers"]["down"] + 4.0 * np.einsum("lir,lro->lio", a, b)
    np.testing.assert_allclose(lora.merge(params, adapters, config)["layers"]["down"], expected, atol=1e-6)


def test_targets_choose_by_name_and_shapes_follow_the_weight():
    declared = lora.declare_adapters(CFG, LoraConfig(rank=3, targets=("query", "o*", "down")))["layers"]
    assert {name: parameter.shape for name, parameter in declared.items()} == {
        "query_a": (3, 16, 3),
        "query_b": (3, 3, 4, 8),
        "output_a": (3, 4, 8, 3),
        "output_b": (3, 3, 16),
        "down_a": (3, 24, 3),
        "down_b": (3, 3, 16),
    }
    assert declared["query_b"].axes == (None, None, "heads", None)


def test_gradients_reach_the_adapters_alone():
    config = LoraConfig(rank=2)
    params, adapters = transformer.init(jax.random.key(0), CFG), trained(CFG, config)
    gradients = jax.grad(lambda x: jnp.square(logits(lora.attach(params, x, config), CFG)).sum())(adapters)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradients))


def test_dropout_needs_a_key_and_drops_the_adapters_inputs_alone():
    config = LoraConfig(rank=2, dropout=0.5)
    params, adapters = transformer.init(jax.random.key(0), CFG), trained(CFG, config)
    plain = logits(lora.attach(params, adapters, config), CFG)
    np.testing.assert_array_equal(plain, logits(lora.attach(params, adapters, LoraConfig(rank=2)), CFG))
    run = lambda key: logits(lora.attach(params, adapters, config, jax.random.key(key)), CFG)
    np.testing.assert_array_equal(run(0), run(0))
    assert float(jnp.abs(run(0) - run(1)).max()) > 1e-3
    fresh = lora.init_adapters(jax.random.key(1), CFG, config)
    with_dropout = logits(lora.attach(params, fresh, config, jax.random.key(0)), CFG)
    np.testing.assert_array_equal(with_dropout, logits(params, CFG))  # B is 0: dropping changes nothing


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": -1}, "rank=-1"),
        ({"rank": 2, "alpha": 0.0}, "alpha=0.0"),
        ({"rank": 2, "dropout": 1.0}, "dropout=1.0"),
        ({"rank": 2, "targets": ("q_proj",)}, "q_proj"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**fields)


def test_grouped_experts_refuse_adapters():
    cfg, config = dataclasses.replace(EXPERTS, experts="grouped"), LoraConfig(rank=2)
    params = transformer.init(jax.random.key(0), cfg)
    with pytest.raises(ValueError, match="targets without gate"):
        logits(lora.attach(params, trained(cfg, config), config), cfg)
    config = LoraConfig(rank=2, targets=("query",))
    dense = logits(lora.attach(params, trained(EXPERTS, config), config), EXPERTS)
    np.testing.assert_allclose(logits(lora.attach(params, trained(cfg, config), config), cfg), dense, atol=1e-5)
