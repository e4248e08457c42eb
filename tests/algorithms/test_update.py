"""One optimizer step with the real model: micro-batches, packing, shared prefixes, steps that must not be."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.algorithms import RECIPES
from rl_posttrain.algorithms import grpo, sft
from rl_posttrain.algorithms.grpo import AlgorithmConfig
from rl_posttrain.algorithms.losses import AGGREGATIONS, sample_weights
from rl_posttrain.algorithms.update import UpdateConfig, init_state, make_optimizer, score, update
from rl_posttrain.batch import Batch
from rl_posttrain.config import build
from rl_posttrain.data.packing import DTYPES, PADDING, Sample, Tree, pack, unpack, untrained_samples
from rl_posttrain.model.transformer import ModelConfig, init

MODEL = ModelConfig(vocab_size=24, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32)
GRPO = partial(grpo.loss, cfg=AlgorithmConfig(kl_coefficient=0.1))
ADAMW = make_optimizer(UpdateConfig(learning_rate=1e-2, weight_decay=0.1), 10)
GRADIENT = optax.trace(decay=0.0)  # its state is the gradient that `update` computed
LENGTHS = (3, 1, 7, 4, 6, 2, 5, 3)  # of 8 completions, 2 for each of 4 prompts
ROW = 16  # each group gets a row of its own


@cache
def params():
    return init(jax.random.key(0), MODEL)


def make_trees(weights=None, temperatures=(1.0,), seed=0):
    rng = np.random.default_rng(seed)
    weights = np.full(len(LENGTHS), 1 / sum(LENGTHS)) if weights is None else weights
    tokens = lambda n: tuple(int(i) for i in rng.integers(3, 24, n))
    samples = [
        Sample(
            tokens(n),
            (float(weight),) * n,
            float(rng.normal()),
            tuple(rng.uniform(-4, -2.5, n)),
            temperature=temperatures[i % len(temperatures)],
        )
        for i, (n, weight) in enumerate(zip(LENGTHS, weights, strict=True))
    ]
    return [Tree(tokens(i + 1), tuple(samples[2 * i : 2 * i + 2])) for i in range(4)]


def with_reference(batch):
    """A reference that depends on the token alone, so that it does not depend on the layout."""
    return batch.replace(reference_logprobs=np.where(batch.loss_weight > 0, -2.5 - batch.labels / 24, 0))


@partial(jax.jit, static_argnames=("loss", "optimizer", "micro_batches"))
def step(state, batch, loss=GRPO, optimizer=GRADIENT, micro_batches=1):
    return update(state, batch, model_cfg=MODEL, loss=loss, optimizer=optimizer, micro_batches=micro_batches)


scores = jax.jit(partial(score, model_cfg=MODEL))


def gradient_and_metrics(batch, loss=GRPO, micro_batches=1):
    state, metrics = step(init_state(params(), GRADIENT), batch, loss, GRADIENT, micro_batches)
    return state.opt_state.trace, metrics


def assert_same(actual, expected, rtol=1e-5):
    """Gradients to `rtol` of each array's largest entry, metrics to `rtol`."""
    for (path, x), y in zip(jax.tree.leaves_with_path(actual[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * float(jnp.abs(y).max()), err_msg=str(path))
    assert actual[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(actual[1][name], value, rtol=rtol, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_o01_accumulation_changes_neither_gradient_nor_loss(kind):
    weights = sample_weights(np.array(LENGTHS), np.ones(8, bool), kind, 8 if kind == "constant_length" else None)
    batch, _ = pack(make_trees(weights), ROW, rows=4)
    assert all((batch.loss_weight > 0).any(axis=1))  # tokens are spread unevenly over the parts
    batch = with_reference(batch)
    unsplit = gradient_and_metrics(batch)
    for micro_batches in (2, 4):
        assert_same(gradient_and_metrics(batch, micro_batches=micro_batches), unsplit)


def test_o01_accumulation_of_sft():
    batch, _ = pack(make_trees(), ROW, rows=4)
    assert_same(gradient_and_metrics(batch, sft.loss, 4), gradient_and_metrics(batch, sft.loss))


def test_rows_that_do_not_divide_are_refused():
    batch, _ = pack(make_trees(), ROW, rows=4)
    with pytest.raises(ValueError, match="4 rows .*micro_batches=3"):
        gradient_and_metrics(batch, micro_batches=3)


def test_packing_padding_and_order_change_nothing():
    trees = make_trees(temperatures=(1.0, 0.7, 1.3))
    expected = gradient_and_metrics(with_reference(pack(trees, ROW, rows=4)[0]))
    turned = [Tree(tree.prompt, tree.samples[::-1]) for tree in trees[::-1]]
    for other, row_length, rows in ((trees, 64, 1), (trees, ROW, 8), (turned, ROW, 4)):
        batch = with_reference(pack(other, row_length, rows=rows)[0])
        assert_same(gradient_and_metrics(batch), expected)


def naive(trees):
    """Each sample alone in a row, with a prompt of its own: plain causal language modelling, [8, ROW]."""
    flat = [(list(tree.prompt), sample) for tree in trees for sample in tree.samples]
    shape = (len(flat), ROW)
    fields = {name: np.full(shape, PADDING.get(name, 0), dtype) for name, dtype in DTYPES.items()}
    for row, (prompt, sample) in enumerate(flat):
        sequence = prompt + list(sample.tokens)
        first, last = len(prompt) - 1, len(sequence) - 1
        fields["tokens"][row, : len(sequence)] = sequence
        fields["labels"][row, :last] = sequence[1:]
        fields["positions"][row, : len(sequence)] = np.arange(len(sequence))
        fields["segments"][row, : len(sequence)] = 1
        fields["loss_weight"][row, first:last] = sample.weights
        fields["advantages"][row, first:last] = sample.advantage
        fields["behaviour_logprobs"][row, first:last] = sample.behaviour_logprobs
        fields["temperature"][row, first:last] = sample.temperature
    return Batch(**fields)


@pytest.mark.parametrize("loss", [GRPO, sft.loss], ids=["grpo", "sft"])
def test_a_shared_prompt_gives_the_loss_and_gradient_of_prompts_repeated(loss):
    trees = make_trees(temperatures=(1.0, 0.7, 1.3))
    packed, _ = pack(trees, ROW, rows=4)
    alone = naive(trees)
    assert (packed.segments > 0).sum() < (alone.segments > 0).sum()
    assert_same(gradient_and_metrics(with_reference(packed), loss), gradient_and_metrics(with_reference(alone), loss))


def test_scores_of_packed_samples_are_those_of_the_samples_alone():
    trees = make_trees(temperatures=(1.0, 0.7, 1.3))
    batch, placements = pack(trees, ROW, rows=4)
    packed = [unpack(values, placements) for values in scores(params(), batch)]
    alone = scores(params(), naive(trees))
    flat = [(i, j) for i, tree in enumerate(trees) for j in range(len(tree.samples))]
    for row, (i, j) in enumerate(flat):
        first = len(trees[i].prompt) - 1
        for values, expected in zip(packed, alone, strict=True):
            read = values[i][j]
            np.testing.assert_allclose(read, expected[row, first : first + len(read)], rtol=1e-5)


def on_policy(trees):
    """The batch of the same trees, as if the current parameters had sampled them, and were the reference."""
    batch, placements = pack(trees, ROW, rows=4)
    logprobs, _ = scores(params(), batch)
    read = unpack(logprobs, placements)
    sampled = [
        Tree(
            tree.prompt,
            tuple(replace(s, behaviour_logprobs=x) for s, x in zip(tree.samples, values, strict=True)),
        )
        for tree, values in zip(trees, read, strict=True)
    ]
    batch, _ = pack(sampled, ROW, rows=4)
    return batch.replace(reference_logprobs=batch.behaviour_logprobs, proximal_logprobs=batch.behaviour_logprobs)


@pytest.mark.parametrize(
    "name", ["default", "gspo", *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES if n != "gspo")]
)
def test_at_an_unchanged_policy_every_recipe_is_reinforce(name):
    """The contract of step 0, with the sampling temperatures that training allows."""
    cfg = build(AlgorithmConfig, RECIPES[name] if name in RECIPES else {"kl_coefficient": 0.1})
    batch = on_policy(make_trees(temperatures=(1.0, 0.7)))
    gradient, metrics = gradient_and_metrics(batch, partial(grpo.loss, cfg=cfg))
    assert float(metrics["policy/log_ratio_max"]) < 1e-5
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics.get("policy/kl", 0.0) == pytest.approx(0, abs=1e-6)
    assert all(value == 0 for key, value in metrics.items() if key.endswith("_fraction"))

    def reinforce(logprobs, entropy, batch, token_count):
        return -(batch.loss_weight * batch.advantages * logprobs).sum(), {}

    expected, _ = gradient_and_metrics(batch, reinforce)
    assert_same((gradient, {}), (expected, {}))


def test_a_step_raises_what_it_rewards():
    batch = on_policy(make_trees())
    state = init_state(params(), ADAMW)
    for _ in range(3):
        state, metrics = step(state, batch, GRPO, ADAMW)
    change = scores(state.params, batch)[0] - batch.behaviour_logprobs
    assert (batch.loss_weight * batch.advantages * change).sum() > 0
    assert int(state.step) == 3 and metrics["update/learning_rate"] == pytest.approx(1e-2)
    assert metrics["update/tokens"] == sum(LENGTHS) and metrics["update/skipped"] == 0


def assert_unchanged(after, before):
    jax.tree.map(np.testing.assert_array_equal, after, before)


def moving_state():
    """A state with momentum, so that a step with a gradient of 0 would move it."""
    batch, _ = pack(make_trees(), ROW, rows=4)
    return step(init_state(params(), ADAMW), batch, sft.loss, ADAMW)[0]


def empty_examples(count):
    """Prompts that fill the row: nothing is left of the completion."""
    return [Tree((5,) * ROW, (Sample((), ()),)) for _ in range(count)]


def test_o03_a_step_without_a_trainable_token_changes_nothing_and_says_so():
    trees = empty_examples(2)
    batch, _ = pack(trees, ROW, rows=4)
    state = moving_state()
    for loss in (sft.loss, GRPO):
        after, metrics = step(state, batch, loss, ADAMW)
        assert_unchanged(after, state)
        assert metrics["update/skipped"] == 1 and metrics["update/tokens"] == 0
        assert metrics["update/nonfinite"] == 0
        assert all(np.isfinite(value) for value in metrics.values())
    assert untrained_samples(trees) == 2


def test_o03_a_mixed_batch_equals_the_batch_without_its_empty_samples():
    trees = make_trees()
    mixed = trees[:2] + empty_examples(3) + trees[2:]
    assert untrained_samples(mixed) == 3
    lengths = np.array([len(s.tokens) for tree in mixed for s in tree.samples])
    for kind in ("token_mean", "sequence_mean"):
        weights = sample_weights(lengths, np.ones(len(lengths), bool), kind)
        alone = sample_weights(np.array(LENGTHS), np.ones(8, bool), kind)
        np.testing.assert_array_equal(weights[lengths > 0], alone)
    assert_same(
        gradient_and_metrics(pack(mixed, ROW, rows=8)[0], sft.loss),
        gradient_and_metrics(pack(trees, ROW, rows=4)[0], sft.loss),
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_says_so(bad):
    batch, _ = pack(make_trees(), ROW, rows=4)
    broken = batch.replace(advantages=np.where(batch.advantages, np.float32(bad), 0))
    state = moving_state()
    after, metrics = step(state, broken, GRPO, ADAMW)
    assert_unchanged(after, state)
    assert metrics["update/nonfinite"] == metrics["update/skipped"] == 1
    recovered, metrics = step(after, batch, GRPO, ADAMW)
    assert metrics["update/nonfinite"] == 0 and int(recovered.step) == int(state.step) + 1


def test_clipping_reports_the_norm_before_it():
    batch, _ = pack(make_trees(), ROW, rows=4)
    gradient, _ = gradient_and_metrics(batch, sft.loss)
    norm = float(optax.tree.norm(gradient))
    limit = norm * 0.5
    optimizer = make_optimizer(UpdateConfig(gradient_clip=limit), 10)
    for scale, clipped in ((1.0, 1), (0.25, 0)):
        scaled = batch.replace(loss_weight=batch.loss_weight * np.float32(scale))
        state, metrics = step(init_state(params(), optimizer), scaled, sft.loss, optimizer)
        assert metrics["update/gradient_norm"] == pytest.approx(norm * scale, rel=1e-5)
        assert metrics["update/clipped"] == clipped
        moment = optax.tree.norm(optax.tree.get(state.opt_state, "mu"))
        assert moment == pytest.approx(0.1 * min(norm * scale, limit), rel=1e-4)


def test_bfloat16_compute_keeps_float32_masters_and_gradients():
    batch, _ = pack(make_trees(), ROW, rows=4)
    function = partial(update, model_cfg=replace(MODEL, compute_dtype="bfloat16"), loss=sft.loss, optimizer=GRADIENT)
    state, metrics = jax.jit(partial(function, micro_batches=2))(init_state(params(), GRADIENT), batch)
    leaves = jax.tree.leaves((state.params, state.opt_state.trace))
    assert all(leaf.dtype == jnp.float32 for leaf in leaves)
    assert all(value.dtype == jnp.float32 for value in metrics.values())
    expected, _ = gradient_and_metrics(batch, sft.loss)
    assert_same((state.opt_state.trace, {}), (expected, {}), rtol=0.05)
