import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_posttrain import services
from rl_posttrain.algorithms import sft
from rl_posttrain.algorithms.update import (
    UpdateConfig,
    decayed,
    init_state,
    make_optimizer,
    matrix_axes,
    schedule,
    state_shardings,
    update,
)
from rl_posttrain.batch import Batch
from rl_posttrain.config import ConfigError, build
from rl_posttrain.data.packing import Sample, Tree, pack
from rl_posttrain.model.lora import LoraConfig, init_adapters
from rl_posttrain.model.transformer import ModelConfig, declare, init, is_parameter

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
        {"optimizer": "sgd"},
        {"optimizer": "adafactor", "b1": 0.5},
        {"optimizer": "adafactor", "b2": 0.5},
        {"optimizer": "adafactor", "epsilon": 1e-3},
        {"rates": {"embed": -0.1}},
        {"rates": {"embed": float("inf")}},
    ],
)
def test_configs_out_of_range_or_without_effect_are_refused(values):
    with pytest.raises(ConfigError):
        build(UpdateConfig, values)


# ---- Adafactor, Muon, rates by name ----

MODEL = ModelConfig(
    vocab_size=8, embed_dim=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=12, tie_embeddings=False
)  # fmt: skip
MIXTURE = replace(MODEL, num_experts=3, experts_per_token=2, qkv_bias=True)


def few(cfg, *names):
    """Some of a model's parameters: fewer compile faster."""
    params = init(jax.random.key(0), cfg)
    top = {name: value for name, value in params.items() if name in names}
    return {**top, "layers": {name: value for name, value in params["layers"].items() if name in names}}


def steps_of(cfg, params, count=1, seed=0):
    """The step that the optimizer proposes after `count` random gradients, and these gradients."""
    optimizer = make_optimizer(cfg, 10)
    state, advance = optimizer.init(params), jax.jit(optimizer.update)
    rng = np.random.default_rng(seed)
    history = []
    for _ in range(count):
        history.append(jax.tree.map(lambda p: np.float32(rng.normal(size=p.shape)), params))
        updates, state = advance(history[-1], state, params)
    return updates, history


def polynomial(matrix):
    """Muon's Newton-Schulz of one matrix [in, out], from its author's page, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(5):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x.T if transposed else x


@pytest.mark.parametrize("cfg", [MODEL, MIXTURE], ids=["dense", "experts"])
def test_muon_matches_numpy_matrix_by_matrix(cfg):
    """Two steps: momentum with Nesterov's look-ahead, each layer's and expert's matrix alone, then the scale."""
    lengths = {"query": 8, "output": 16, "gate": 8, "down": 12}  # of the input
    params = few(cfg, *lengths)
    updates, history = steps_of(UpdateConfig("muon", 1.0, gradient_clip=math.inf), params, count=2)
    for name, inputs in lengths.items():
        first, second = (np.asarray(g["layers"][name], np.float64) for g in history)
        momentum = 0.95 * 0.05 * first + 0.05 * second
        ahead = 0.95 * momentum / (1 - 0.95**3) + 0.05 * second / (1 - 0.95**2)
        lead = 2 if cfg.num_experts and name in ("gate", "up", "down") else 1
        matrices = ahead.reshape(-1, inputs, math.prod(ahead.shape[lead:]) // inputs)
        expected = np.stack([polynomial(m) * 0.2 * max(m.shape) ** 0.5 for m in matrices])
        np.testing.assert_allclose(-updates["layers"][name], expected.reshape(ahead.shape), atol=2e-4, err_msg=name)
        assert 0.1 < np.sqrt(np.mean(np.square(expected))) < 0.25, name  # what the scale is for


def test_muon_leaves_all_but_the_layers_matrices_to_adam():
    params = init(jax.random.key(0), MIXTURE)
    found = {
        name: matrix_axes(path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        for name in ["/".join(part.key for part in path)]
    }
    by_muon = {name.removeprefix("layers/") for name, axes in found.items() if axes is not None}
    assert by_muon == {"query", "key", "value", "output", "gate", "up", "down"}
    some = few(MIXTURE, "embed", "final_norm", "router", "query_bias", "value")
    muon, adam = (steps_of(UpdateConfig(kind, 0.1, b1=0.7), some)[0] for kind in ("muon", "adamw"))
    for (path, one), (_, other) in zip(*map(jax.tree_util.tree_leaves_with_path, (muon, adam)), strict=True):
        assert bool((one == other).all()) == (path[-1].key != "value"), path


@pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["dense", "experts"])
def test_an_adapter_is_two_matrices(model):
    """The axes before a matrix's own are of layers and experts; the rank is the output of A and the input of B."""
    adapters = init_adapters(jax.random.key(0), model, LoraConfig(rank=3))
    for path, leaf in jax.tree_util.tree_leaves_with_path(adapters):
        axes = matrix_axes(path, leaf)
        assert axes is not None
        name = path[-1].key
        lead = 2 if model.num_experts and name[:-2] in ("gate", "up", "down") else 1
        assert [*axes[0], *axes[1]] == list(range(lead, leaf.ndim))
        rank = axes[1] if name.endswith("_a") else axes[0]
        assert [leaf.shape[axis] for axis in rank] == [3]


def test_adafactor_matches_numpy():
    """After two steps, by the paper's formulas. Matrices of 128 rows and columns are factored, smaller ones are not."""
    rng = np.random.default_rng(1)
    params = {"gate": jnp.float32(rng.normal(size=(2, 128, 160))), "up": jnp.float32(rng.normal(size=(2, 4, 6)))}
    updates, history = steps_of(UpdateConfig("adafactor", 1.0, gradient_clip=math.inf), params, count=2)
    for name in params:
        rows = columns = whole = 0.0
        for step, gradient in enumerate(history, start=1):
            g = np.asarray(gradient[name], np.float64)
            squares, decay = g**2 + 1e-30, 1 - step**-0.8
            rows = decay * rows + (1 - decay) * squares.mean(-1, keepdims=True)
            columns = decay * columns + (1 - decay) * squares.mean(-2, keepdims=True)
            whole = decay * whole + (1 - decay) * squares
        mean = rows * columns / rows.mean(-2, keepdims=True) if name == "gate" else whole
        expected = g / np.sqrt(mean)
        expected /= max(1.0, np.sqrt(np.mean(expected**2)))
        np.testing.assert_allclose(-updates[name], expected, rtol=2e-4, atol=1e-5)


def test_adafactor_keeps_a_sum_where_adam_keeps_a_product():
    params = {"gate": jnp.zeros((2, 256, 512))}
    size = lambda kind: sum(leaf.size for leaf in jax.tree.leaves(make_optimizer(UpdateConfig(kind), 1).init(params)))
    assert size("adamw") > 2 * params["gate"].size
    assert size("adafactor") < 2 * (256 + 512) + 20


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon"])
def test_rates_scale_the_steps_of_the_parameters_that_they_name(kind):
    params = few(MODEL, "embed", "head", "attention_norm", "mlp_norm", "query")
    cfg = UpdateConfig(kind, 0.1, weight_decay=0.5)
    plain, _ = steps_of(cfg, params)
    scaled, _ = steps_of(replace(cfg, rates={"embed": 0.25, "layers/*_norm": 0.0, "layers/query": 3.0}), params)
    expected = {"embed": 0.25, "attention_norm": 0.0, "mlp_norm": 0.0, "query": 3.0}
    for (path, one), (_, other) in zip(*map(jax.tree_util.tree_leaves_with_path, (plain, scaled)), strict=True):
        np.testing.assert_allclose(other, expected.get(path[-1].key, 1.0) * one, rtol=1e-6)
        assert bool(one.any())


@pytest.mark.parametrize(
    "rates, message",
    [
        ({"embd": 0.1}, "'embd' matches no parameter: there are embed, final_norm, head, layers/attention_norm"),
        ({"query": 0.1}, "'query' matches no parameter"),  # the whole path is meant
        ({"layers/*": 0.1, "*norm": 0.2}, "'layers/*' and '*norm' both match layers/attention_norm"),
    ],
)
def test_rates_without_effect_or_of_unclear_effect_are_refused(rates, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_optimizer(UpdateConfig(rates=rates), 1).init(init(jax.random.key(0), MODEL))


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon"])
def test_moments_lie_as_their_parameters_and_the_rest_everywhere(kind):
    declared = declare(replace(MODEL, embed_dim=128, mlp_dim=256))
    params = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), declared, is_leaf=is_parameter)
    places = jax.tree_util.tree_map_with_path(lambda path, _: "/".join(part.key for part in path), params)
    optimizer = make_optimizer(UpdateConfig(kind, rates={"embed": 0.5}), 1)
    state = state_shardings(lambda: params, optimizer, places, "everywhere")
    made = jax.eval_shape(lambda: init_state(params, optimizer))
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(made.opt_state)
    shapes = {name: leaf.shape for name, leaf in zip(jax.tree.leaves(places), jax.tree.leaves(params), strict=True)}
    found = list(zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(made.opt_state), strict=True))
    assert all(place == "everywhere" or leaf.shape == shapes[place] for place, leaf in found)
    factored = {"layers/gate", "layers/up", "layers/down"} if kind == "adafactor" else set()
    assert {place for place, _ in found} == {"everywhere", *shapes} - factored
    assert (state.step, state.params) == ("everywhere", places)


@pytest.mark.parametrize("kind", ["muon", *(pytest.param(k, marks=pytest.mark.slow) for k in ("adamw", "adafactor"))])
def test_every_optimizer_learns_and_says_how_far_it_went(kind):
    """The step's norm is the distance that the parameters moved; a skipped step has none."""
    rows, _ = pack([Tree([5, 2], (Sample([3, 1], np.full(2, 0.5)),))], row_length=8)
    batch = Batch(**{name: jnp.asarray(getattr(rows, name)) for name in Batch.__dataclass_fields__})
    optimizer = make_optimizer(UpdateConfig(kind, 0.02), 20)
    step = jax.jit(lambda s, b: update(s, b, model_cfg=MODEL, loss=sft.loss, optimizer=optimizer))
    state = init_state(init(jax.random.key(0), MODEL), optimizer)
    losses = []
    for _ in range(20):
        before = state.params
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss/total"]))
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, state.params, before))
        np.testing.assert_allclose(metrics["update/update_norm"], moved, rtol=1e-3)
    assert losses[-1] < 0.2 * losses[0]
    _, metrics = step(state, batch.replace(loss_weight=0 * batch.loss_weight))
    assert metrics["update/skipped"] == 1 and metrics["update/update_norm"] == 0


def test_stages_of_a_run_share_the_kind_of_optimizer():
    """Both stages' moments are in the checkpoints of one run."""
    values = dict(
        tokenizer=dict(kind="byte"),
        model=dict(embed_dim=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=8),
        tasks={"strings/reverse": {}},
        update=dict(optimizer="muon"),
        sft=dict(steps=2),
    )
    with pytest.raises(ConfigError, match="sft.update.optimizer='adamw' and update.optimizer='muon'"):
        services.parse(values)
    assert services.parse(values | {"sft": dict(steps=2, update=dict(optimizer="muon"))}).sft.update.optimizer == "muon"
    assert services.parse(values | {"sft": {}}).update.optimizer == "muon"
