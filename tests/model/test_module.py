"""The Flax module and the functions are one model, bit for bit."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rl_posttrain.model import transformer
from rl_posttrain.model.module import Transformer

CFG = transformer.ModelConfig(
    vocab_size=29,
    embed_dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=24,
    qk_norm=True,
    tie_embeddings=False,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 29, (2, 7)))


def assert_same_bits(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_init_gives_the_same_bits():
    expected = transformer.init(jax.random.key(5), CFG)
    assert_same_bits(Transformer(CFG).init(jax.random.key(5), TOKENS)["params"], expected)
    _, variables = Transformer(CFG).init_with_output(jax.random.key(5), TOKENS)
    assert_same_bits(variables["params"], expected)


def test_apply_gives_the_same_bits():
    params = transformer.init(jax.random.key(5), CFG)
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0], [1, 1, 2, 2, 2, 0, 0]])
    parents = jnp.array([[-1, -1, -1, 1, 1, 1, -1], [-1, -1, -1, -1, -1, -1, -1]])
    positions = jnp.array([[0, 1, 2, 3, 4, 3, 0], [0, 1, 0, 1, 2, 0, 0]])
    row = positions, segments, parents
    expected = transformer.logits(params, CFG, transformer.forward(params, CFG, TOKENS, *row))
    np.testing.assert_array_equal(Transformer(CFG).apply({"params": params}, TOKENS, *row), expected)


def test_defaults_are_one_sequence_per_row():
    params = transformer.init(jax.random.key(5), CFG)
    row = jnp.broadcast_to(jnp.arange(7), (2, 7)), jnp.ones((2, 7), int), jnp.full((2, 7), -1)
    module = Transformer(CFG)
    np.testing.assert_array_equal(
        module.apply({"params": params}, TOKENS), module.apply({"params": params}, TOKENS, *row)
    )


def test_two_models_inside_another_module_differ():
    class Pair(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return Transformer(CFG, name="left")(tokens) + Transformer(CFG, name="right")(tokens)

    params = Pair().init(jax.random.key(0), TOKENS)["params"]
    assert (np.asarray(params["left"]["embed"]) != np.asarray(params["right"]["embed"])).any()
    assert dataclasses.asdict(CFG)["vocab_size"] == params["left"]["embed"].shape[0]
