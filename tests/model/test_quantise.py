"""Narrow bases: rounding by hand, bounded error, one layer wide at a time, and rollouts that agree with the trainer."""

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain import config as config_lib
from rl_posttrain import services
from rl_posttrain.config import ConfigError
from rl_posttrain.data import trees
from rl_posttrain.data.packing import pack
from rl_posttrain.data.tokenizer import make_tokenizer
from rl_posttrain.model import convert, lora, quantise, transformer
from rl_posttrain.model.lora import LoraConfig
from rl_posttrain.model.transformer import ModelConfig
from rl_posttrain.rollout.generate import generate
from rl_posttrain.rollout.sampling import Sampling
from rl_posttrain.sharding import mesh as mesh_lib
from rl_posttrain.sharding.mesh import MeshConfig
from rl_posttrain.types import Task

CFG = ModelConfig(
    vocab_size=37, embed_dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=96, qkv_bias=True
)
EXPERTS = dataclasses.replace(CFG, num_experts=4, experts_per_token=2)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 37, (2, 9)))
ROW = (jnp.broadcast_to(jnp.arange(9), (2, 9)), jnp.ones((2, 9), jnp.int32), jnp.full((2, 9), -1))
BASES = ("bfloat16", "int8", "int4")
# Root mean square of the logits' differences in the tiny model; the logits' own is about 1.
BOUNDS = {"bfloat16": 0.02, "int8": 0.04, "int4": 0.4}


@partial(jax.jit, static_argnums=1)
def logits(params, cfg):
    return transformer.logits(params, cfg, transformer.forward(params, cfg, TOKENS, *ROW))


@lru_cache
def narrow_model(cfg, base):
    return quantise.quantise_tree(transformer.init(jax.random.key(0), cfg), cfg, base)


def trained(cfg, config):
    """Adapters as after some training: neither matrix is 0."""
    adapters = lora.init_adapters(jax.random.key(1), cfg, config)
    leaves, structure = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return jax.tree.unflatten(structure, [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


def test_int8_by_hand_one_scale_for_each_output():
    weight = jnp.asarray([[[1.0, -64.0], [0.5, 32.0], [-2.0, 0.0]]])  # [L=1, F=3, D=2]
    values, scale = quantise.quantise(weight, "down", CFG, "int8")
    assert values.dtype == jnp.int8 and scale.shape == (1, 1, 2)
    np.testing.assert_array_equal(scale[0, 0], [2 / 128, 0.5])  # the weight of largest magnitude becomes -128
    np.testing.assert_array_equal(values[0], [[64, -128], [32, 64], [-128, 0]])


def test_int4_by_hand_one_scale_for_each_group_of_32_inputs():
    weight = np.zeros((1, 64, 1), np.float32)
    weight[0, [0, 1, 2], 0] = [8.0, -7.9, 3.4]  # 8 is the extreme: the scale is -1, and -7.9 is clipped to 7
    weight[0, [40, 41], 0] = [-2.0, 1.0]
    values, scale = quantise.quantise(jnp.asarray(weight), "down", CFG, "int4")
    assert values.dtype == jnp.int4 and scale.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(scale, np.float32)[0, :, 0], [-1.0, 0.25])
    whole = np.asarray(values).astype(int)[0, :, 0]
    assert list(whole[:3]) == [-8, 7, -3] and list(whole[40:42]) == [-8, 4] and not whole[3:40].any()


@pytest.mark.parametrize("base", ["int8", "int4"])
def test_a_weight_is_off_by_half_a_step_at_most(base):
    params = transformer.init(jax.random.key(0), CFG)
    narrow = quantise.quantise_tree(params, CFG, base)
    wide = quantise.plain(narrow)["layers"]
    for name in ("query", "output", "down"):
        scale = jnp.abs(narrow["layers"][f"{name}_scale"].astype(jnp.float32))
        steps = quantise.widen(jnp.ones_like(params["layers"][name]), scale, jnp.dtype(jnp.float32))
        off = jnp.abs(wide[name] - params["layers"][name]) / steps
        # Only a weight beyond the most positive number is off by more: by one step, and what bfloat16 rounds of it.
        assert float(off.max()) <= (1.04 if base == "int4" else 1.0001)
        assert float((off > 0.5001).mean()) < 0.05 and 0.2 < float(off.mean()) < 0.3


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("cfg", [CFG, EXPERTS], ids=["mlp", "experts"])
def test_logits_stay_within_a_bound_of_float32(cfg, base):
    narrow = narrow_model(cfg, base)
    expected, got = logits(transformer.init(jax.random.key(0), cfg), cfg), logits(narrow, cfg)
    difference = float(jnp.sqrt(jnp.square(got - expected).mean()))
    assert BOUNDS[base] / 10 < difference < BOUNDS[base]
    np.testing.assert_allclose(got, logits(quantise.plain(narrow), cfg), atol=1e-5)  # widened within, or before


def test_what_is_not_multiplied_by_linear_stays():
    params = transformer.init(jax.random.key(0), EXPERTS)
    narrow = quantise.quantise_tree(params, EXPERTS, "int8")
    for name in ("embed", "final_norm"):
        np.testing.assert_array_equal(narrow[name], params[name])
    for name in ("router", "query_bias", "attention_norm", "mlp_norm"):
        np.testing.assert_array_equal(narrow["layers"][name], params["layers"][name])
    integers = {name for name, leaf in narrow["layers"].items() if leaf.dtype == jnp.int8}
    assert integers == {"query", "key", "value", "output", "gate", "up", "down"}
    assert narrow["layers"]["gate_scale"].shape == (3, 4, 1, 96)


def test_grouped_experts_equal_dense_ones():
    narrow = narrow_model(EXPERTS, "int4")
    grouped = dataclasses.replace(EXPERTS, experts="grouped")
    np.testing.assert_allclose(logits(narrow, grouped), logits(narrow, EXPERTS), atol=1e-5)


@pytest.mark.parametrize("base", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8", "int4"])
def test_gradients_of_adapters_equal_those_over_the_widened_base(base):
    config = LoraConfig(rank=2, base=base)
    narrow, adapters = narrow_model(CFG, base), trained(CFG, config)
    loss = lambda adapters, params: jnp.square(logits(lora.attach(params, adapters, config), CFG)).mean()
    gradients = jax.jit(jax.grad(loss))
    got, expected = gradients(adapters, narrow), gradients(adapters, quantise.plain(narrow))
    for name, gradient in expected["layers"].items():
        assert float(jnp.abs(gradient).max()) > 0
        np.testing.assert_allclose(got["layers"][name], gradient, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("base", BASES)
def test_the_backward_pass_keeps_no_layer_wide(base, remat):
    cfg, config = dataclasses.replace(CFG, remat=remat), LoraConfig(rank=2, base=base)
    narrow, adapters = narrow_model(cfg, base), lora.init_adapters(jax.random.key(1), cfg, config)
    loss = lambda adapters, params: jnp.square(logits(lora.attach(params, adapters, config), cfg)).mean()
    wide = "f32[3,64,96]"  # gate and up of all three layers
    assert wide in str(jax.make_jaxpr(jax.grad(loss))(adapters, quantise.plain(narrow)))
    assert wide not in str(jax.make_jaxpr(jax.grad(loss))(adapters, narrow))


@pytest.mark.parametrize("base", BASES)
def test_attached_adapters_and_the_plain_model_are_one_function(base):
    config = LoraConfig(rank=2, alpha=8.0, base=base, targets=("query", "o*", "down"))
    narrow = narrow_model(EXPERTS, base)
    attached = lora.attach(narrow, trained(EXPERTS, config), config)
    plain = quantise.plain(attached)
    assert jax.tree.structure(plain) == jax.tree.structure(transformer.init(jax.random.key(0), EXPERTS))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(plain))
    assert float(jnp.abs(logits(attached, EXPERTS) - logits(narrow, EXPERTS)).max()) > 0.05
    np.testing.assert_allclose(logits(plain, EXPERTS), logits(attached, EXPERTS), atol=1e-5)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="base='int8' has no effect with rank=0"):
        LoraConfig(base="int8")
    config = LoraConfig(rank=2, base="int8")
    narrow = narrow_model(CFG, "int8")
    with pytest.raises(ValueError, match="stored as int8: attach"):
        lora.merge(narrow, trained(CFG, config), config)
    odd = dataclasses.replace(CFG, mlp_dim=36)
    with pytest.raises(ValueError, match="groups down's inputs by 32, and 36 is no multiple of 8"):
        quantise.quantise_tree(transformer.init(jax.random.key(0), odd), odd, "int4")


# ---- under a mesh, from a directory, in a run ----

SMALL = {
    "tokenizer": {"kind": "character", "alphabet": "abcdefghijklmnopqrstuvwxyz "},
    "tasks": {"strings/reverse": {"weight": 1.0}},
    "model": dict(embed_dim=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=96),
    "lora": {"rank": 2},
    "rollout": {"max_tokens": 6},
}


@pytest.mark.parametrize("base", ["int8", "int4"])
def test_scales_are_split_with_their_weights_and_loading_equals_rounding(base, tmp_path):
    params = transformer.init(jax.random.key(0), CFG)
    convert.save_model(tmp_path / "model", params, CFG, length=64)
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=4, tensor=2))
    cfg = dataclasses.replace(CFG, vocab_multiple=2)
    loaded = quantise.beside(
        convert.load_params(tmp_path / "model", cfg, mesh, partial(quantise.quantise, cfg=cfg, base=base))
    )
    expected = quantise.quantise_tree(params, CFG, base)
    assert loaded["layers"].keys() == expected["layers"].keys()
    for name, leaf in expected["layers"].items():
        np.testing.assert_array_equal(np.asarray(loaded["layers"][name]), np.asarray(leaf), err_msg=name)
    pieces = lambda name: loaded["layers"][name].sharding.shard_shape(loaded["layers"][name].shape)
    assert pieces("query") == (3, 16, 2, 16) and pieces("down") == (3, 48, 16)
    if base == "int8":
        assert pieces("query_scale") == (3, 1, 2, 16) and pieces("down_scale") == (3, 1, 16)
    if base == "int4":  # two groups of inputs, which four devices cannot share; three, which two cannot
        assert pieces("query_scale") == (3, 2, 2, 16) and pieces("down_scale") == (3, 3, 16)
    wanted = np.asarray(logits(expected, CFG))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda params: logits(params, cfg))(loaded)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("base", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8", "int4"])
def test_the_trainer_scores_what_the_sampler_drew_to_rounding(base):
    """The policy has its adapters beside the narrow base, for merging would round them."""
    values = config_lib.apply_overrides(SMALL, {"lora.base": base, "mesh.fsdp": 8})
    config = services.parse(values)
    mesh = mesh_lib.make_mesh(config.mesh)
    tokenizer = make_tokenizer(config.tokenizer)
    with jax.set_mesh(mesh):
        made = services.compiled(config, mesh)
        adapters = jax.tree.map(
            lambda x: x + 0.1 * jax.random.normal(jax.random.key(5), x.shape), made["init_params"]()
        )
        policy = made["policy"](adapters)
        assert policy["layers"]["gate"].dtype == jnp.dtype(base) and "gate_b" in policy["layers"]
        groups = generate(
            policy,
            [Task("prompt", "train", 0, "abc"), Task("prompt", "train", 1, "bb c")],
            tokenizer=tokenizer,
            model_cfg=config.model,
            sampling=Sampling(1.0),
            width=4,
            max_tokens=6,
            prompt_bucket=8,
            rows=2,
            key=jax.random.key(3),
            policy_version=0,
        )
        ones = np.ones((2, 4), np.float32)
        batch, _ = pack(trees.from_groups(groups, ones, ones), 64, 8)
        logprobs, _ = made["score"](adapters, made["place"](batch))
    off = np.abs(np.asarray(logprobs) - batch.behaviour_logprobs)[batch.loss_weight > 0]
    assert off.size == sum(len(rollout.completion_tokens) for group in groups for rollout in group)
    assert off.max() < 1e-4


def test_a_config_without_adapters_refuses_a_narrow_base():
    with pytest.raises(ConfigError, match="config.lora.*base='int4' has no effect with rank=0"):
        services.parse(config_lib.apply_overrides(SMALL, {"lora.base": "int4", "lora.rank": 0}))
