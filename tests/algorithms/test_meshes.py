"""One optimizer step is the same step on any mesh: loss, gradients, parameters, against one device."""

from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rl_posttrain.algorithms import grpo, sft
from rl_posttrain.algorithms.grpo import AlgorithmConfig
from rl_posttrain.algorithms.update import UpdateConfig, init_state, make_optimizer, update
from rl_posttrain.batch import TrainState
from rl_posttrain.data.packing import Sample, Tree, pack
from rl_posttrain.model.transformer import ModelConfig, declare, init
from rl_posttrain.sharding.mesh import MeshConfig, batch_sharding, make_mesh, shardings

MODEL = ModelConfig(
    vocab_size=30, embed_dim=16, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=2, mlp_dim=32,
    vocab_multiple=8,
)  # fmt: skip
LOSSES = {
    "sft": sft.loss,
    "grpo": partial(grpo.loss, cfg=AlgorithmConfig(kl_coefficient=0.1)),
    # Reductions by sample, within rows that are spread over devices.
    "sequence": partial(
        grpo.loss,
        cfg=AlgorithmConfig(
            ratio="sequence", proximal="step_start", correction="sequence_mask", correction_low=0.7, correction_high=1.3
        ),
    ),
}
# A large epsilon: Adam's first step is else the sign of the gradient, and the sign of rounding where it is 0.
OPTIMIZER = make_optimizer(UpdateConfig(learning_rate=0.1, weight_decay=0.1, epsilon=1e-2), 10)
STEPS = 2

DEFAULT = {"data": 2, "fsdp": 2, "tensor": 2}
EXHAUSTIVE = [{axis: size} for axis in ("data", "fsdp", "tensor") for size in (2, 4, 8)] + [
    {"data": 2, "fsdp": 2},
    {"data": 2, "tensor": 2},
    {"fsdp": 2, "tensor": 2},
    {"fsdp": 2, "tensor": 4},
]


@cache
def make_batch():
    """Sixteen rows, four of them empty."""
    rng = np.random.default_rng(0)
    tokens = lambda low, high: tuple(int(i) for i in rng.integers(3, 30, rng.integers(low, high)))
    trees = []
    for _ in range(12):
        children = [tokens(1, 6) for _ in range(3)]
        samples = [
            Sample(c, (0.01,) * len(c), float(rng.normal()), tuple(rng.uniform(-4, -3, len(c)))) for c in children
        ]
        trees.append(Tree(tokens(5, 7), tuple(samples)))
    batch, _ = pack(trees, 24, rows=16)
    constant = lambda value: np.where(batch.loss_weight > 0, value, 0).astype(np.float32)
    return batch.replace(reference_logprobs=constant(-3.4), proximal_logprobs=constant(-3.45))


def run(loss, mesh_cfg, micro_batches=1):
    """(state, metrics of each step) after `STEPS` steps on the mesh, jitted as a run does it."""
    mesh = make_mesh(mesh_cfg, jax.devices()[: int(np.prod(mesh_cfg.sizes))])
    replicated, rows = NamedSharding(mesh, P()), batch_sharding(mesh)
    places = shardings(declare(MODEL), mesh)
    with jax.set_mesh(mesh):
        state = init_state(init(jax.random.key(0), MODEL), OPTIMIZER)
        moments = optax.tree_map_params(
            OPTIMIZER, lambda _, place: place, state.opt_state, places, transform_non_params=lambda _: replicated
        )
        placed = TrainState(replicated, places, moments)
        function = partial(update, model_cfg=MODEL, loss=LOSSES[loss], optimizer=OPTIMIZER, micro_batches=micro_batches)
        jitted = jax.jit(function, donate_argnums=0, out_shardings=(placed, replicated))
        state = jax.device_put(state, placed)
        batch = jax.device_put(make_batch(), rows)
        history = []
        for _ in range(STEPS):
            state, metrics = jitted(state, batch)
            history.append({name: float(value) for name, value in metrics.items()})
    assert jax.tree.map(lambda x: x.sharding, state.params) == places
    return jax.tree.map(np.asarray, state), history


@cache
def single(loss):
    return run(loss, MeshConfig())


def check(loss, sizes, micro_batches=1):
    state, history = run(loss, MeshConfig(**sizes), micro_batches)
    expected, expected_history = single(loss)
    for metrics, reference in zip(history, expected_history, strict=True):
        assert metrics == pytest.approx(reference, rel=1e-5, abs=1e-6)
    compare = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())
    for name in ("mu", "nu"):  # what the gradients of both steps left in the optimizer
        jax.tree.map(compare, *(optax.tree.get(s.opt_state, name) for s in (state, expected)))
    jax.tree.map(compare, state.params, expected.params)


def test_the_loss_falls():
    """Guards the comparisons below against comparing nothing."""
    _, history = single("sft")
    assert history[1]["loss/total"] < history[0]["loss/total"] - 0.05


@pytest.mark.parametrize("loss", ["sft", "grpo", pytest.param("sequence", marks=pytest.mark.slow)])
def test_a_step_on_eight_devices_over_three_axes_is_the_step_on_one(loss):
    check(loss, DEFAULT, micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sizes", EXHAUSTIVE, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
def test_a_step_on_any_mesh_is_the_step_on_one_device(loss, sizes):
    check(loss, sizes)
