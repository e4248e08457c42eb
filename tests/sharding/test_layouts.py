"""One loss, one gradient, whatever the layout over devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rl_posttrain.model.logprobs import chunked_logprobs
from rl_posttrain.model.transformer import ModelConfig, declare, forward, init, token_logprobs
from rl_posttrain.sharding.mesh import MeshConfig, batch_sharding, check, make_mesh, shardings

CFG = ModelConfig(
    vocab_size=60,
    embed_dim=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    mlp_dim=32,
    qk_norm=True,
    qkv_bias=True,
    tie_embeddings=False,
    remat="full",
    attention="blockwise",
    attention_block=8,
    logprob_chunk=8,
    vocab_multiple=8,
)


def rows():
    """Eight rows: a prompt with two children each, and padding whose length differs between rows."""
    rng = np.random.default_rng(0)
    B, T = 8, 24
    segments, positions, parents = np.zeros((3, B, T), "int32")
    parents -= 1
    for row in range(B):
        cut = [5, 5 + rng.integers(3, 9), 0]
        cut[2] = cut[1] + rng.integers(3, 9)
        for segment, (start, stop) in enumerate(zip([0, *cut], cut, strict=False), 1):
            segments[row, start:stop] = segment
            positions[row, start:stop] = np.arange(stop - start) + (5 if segment > 1 else 0)
            parents[row, start:stop] = 1 if segment > 1 else -1
    tokens, labels = rng.integers(0, CFG.vocab_size, (2, B, T))
    weight = rng.normal(size=(B, T)) * (segments > 1)
    ids = [np.asarray(x, "int32") for x in (tokens, labels, positions, segments, parents)]
    return *ids, np.asarray(weight, "float32"), rng.uniform(0.6, 1.3, (B, T)).astype("float32")


def loss(params, cfg, tokens, labels, positions, segments, parents, weight, temperature):
    hidden = forward(params, cfg, tokens, positions, segments, parents)
    logprobs, entropy = token_logprobs(params, cfg, hidden, labels, temperature)
    return (weight * (logprobs + 0.1 * entropy)).sum()


step = jax.jit(jax.value_and_grad(loss), static_argnums=1)


def params_of(cfg):
    noise = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: np.asarray(x) + 0.1 * noise.normal(size=x.shape).astype("float32"),
        init(jax.random.key(0), cfg),
    )


@pytest.fixture(scope="module")
def one_device():
    return jax.device_get(step(params_of(CFG), CFG, *map(jnp.asarray, rows())))


def assert_close(got, expected):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        scale = np.abs(b).max()
        assert np.abs(np.asarray(a) - b).max() <= 2e-5 * scale, jax.tree_util.keystr(path)


def check_layout(sizes, expected):
    count = int(np.prod(list(sizes.values())))
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[:count])
    check(CFG, mesh)
    placed = shardings(declare(CFG), mesh)
    params = jax.device_put(params_of(CFG), placed)
    batch = jax.device_put(rows(), batch_sharding(mesh))
    with jax.set_mesh(mesh):
        value, gradients = step(params, CFG, *batch)
    assert_close((value, gradients), expected)


@pytest.mark.parametrize(
    "sizes",
    [{"data": 2}, {"fsdp": 4}, {"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=str,
)
def test_loss_and_gradients_equal_one_device(sizes, one_device):
    check_layout(sizes, one_device)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 1},
        {"data": 4},
        {"data": 8},
        {"fsdp": 2},
        {"fsdp": 8},
        {"tensor": 2},
        {"tensor": 8},
        {"data": 2, "tensor": 4},
        {"fsdp": 4, "tensor": 2},
        {"data": 4, "fsdp": 2},
    ],
    ids=str,
)
def test_loss_and_gradients_equal_one_device_everywhere(sizes, one_device):
    check_layout(sizes, one_device)


def test_initial_values_do_not_depend_on_the_layout():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    sharded = jax.jit(init, static_argnums=1, out_shardings=shardings(declare(CFG), mesh))
    got = sharded(jax.random.key(0), CFG)
    whole = jax.jit(init, static_argnums=1)(jax.random.key(0), CFG)
    # The same draws. jax 0.10 gives the same bits; 0.12 vectorises the pieces otherwise and rounds the last digit so.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-7, atol=3e-8), got, whole)
    assert got["layers"]["query"].sharding.shard_shape((2, 16, 8, 4)) == (2, 8, 2, 4)


def test_the_table_gradient_is_reduced_between_devices_once():
    # A plain sum over rows inside the chunk loop would all-reduce the whole table once per chunk.
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    B, T, D, V = 8, 64, 32, 96
    rows = P(("data", "fsdp"))

    def total(hidden, table, labels, temperature):
        results = chunked_logprobs(hidden, table, labels, temperature, vocab_size=90, chunk=16)
        return sum(x.sum() for x in results)

    array = lambda shape, spec, dtype=jnp.float32: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, spec)
    )
    with jax.set_mesh(mesh):
        arguments = (
            array((B, T, D), rows),
            array((V, D), P("tensor")),
            array((B, T), rows, jnp.int32),
            array((B, T), rows),
        )
        text = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*arguments).compile().as_text()
    moved = re.findall(r"= f32\[([\d,]*)\]\S* (all-reduce|all-gather|reduce-scatter|all-to-all)\(", text)
    sizes = {tuple(map(int, dims.split(","))) for dims, _ in moved if dims}
    local_table, local_chunk = (V // 2, D), (B // 4, 16, D)
    assert moved.count((f"{V // 2},{D}", "all-reduce")) == 1
    # Everything else is at most one chunk of hidden states: rows never leave their device, nor do logits.
    assert all(np.prod(size) <= np.prod(local_chunk) for size in sizes - {local_table}), sizes
