"""DPO and IPO on packed pairs: by hand, against NumPy, in other layouts, and at step 0 with adapters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_posttrain.algorithms import preference
from rl_posttrain.algorithms.preference import OBJECTIVES, check_settings
from rl_posttrain.algorithms.update import UpdateConfig, init_state, make_optimizer, score, update
from rl_posttrain.data.packing import Sample, Tree, pack, unpack
from rl_posttrain.model import lora, transformer
from rl_posttrain.model.lora import LoraConfig
from rl_posttrain.model.transformer import ModelConfig

SETTINGS = [
    dict(kind=kind, beta=beta, label_smoothing=smoothing)
    for kind, beta in (("dpo", 0.3), ("ipo", 0.2))
    for smoothing in (0.0, 0.1)
]
LENGTHS = ((3, 1), (1, 5), (4, 4), (2, 6), (7, 2))  # of the chosen and the rejected completion


@functools.cache
def example(seed=0, wild=np.nan):
    """Pairs as trees, and per completion the log-probabilities of policy and reference; untrained ones are `wild`."""
    rng = np.random.default_rng(seed)
    trees, policy, reference = [], [], []
    for i, lengths in enumerate(LENGTHS):
        masks = [np.arange(n) != 2 if i != 2 else np.ones(n, bool) for n in lengths]  # some hold an observation
        samples = [
            Sample(rng.integers(3, 24, n), mask / len(LENGTHS), advantage=sign)
            for n, mask, sign in zip(lengths, masks, (1.0, -1.0))
        ]
        trees.append(Tree(rng.integers(3, 24, i + 1), tuple(samples), whole=True))  # the first prompt is one token
        policy.append([np.where(mask, rng.uniform(-4, -1, n), wild) for n, mask in zip(lengths, masks)])
        reference.append([np.where(mask, rng.uniform(-4, -1, n), wild) for n, mask in zip(lengths, masks)])
    return trees, policy, reference


def laid_out(data, row_length, rows_multiple=1, order=None):
    """The batch with its reference, and the policy's log-probabilities in its layout."""
    trees, policy, reference = data
    order = list(range(len(trees))) if order is None else order
    batch, placements = pack([trees[i] for i in order], row_length, rows_multiple)
    fields = {"policy": np.zeros(batch.tokens.shape, np.float32), "reference": np.zeros(batch.tokens.shape, np.float32)}
    for p in placements:
        where = (p.row, slice(p.start, p.start + p.length))
        fields["policy"][where] = policy[order[p.tree]][p.sample]
        fields["reference"][where] = reference[order[p.tree]][p.sample]
    return (
        jax.tree.map(jnp.asarray, batch.replace(reference_logprobs=fields["reference"])),
        fields["policy"],
        placements,
    )


@functools.partial(jax.jit, static_argnames=("kind", "beta", "label_smoothing"))
def evaluated(logprobs, batch, **settings):
    """((loss, metrics), gradient)."""
    count = jnp.sum(batch.loss_weight > 0).astype(jnp.float32)
    compute = lambda x: preference.loss(x, jnp.zeros_like(x), batch, count, **settings)
    return jax.value_and_grad(compute, has_aux=True)(logprobs)


def by_the_papers(policy, reference, kind, beta, label_smoothing):
    """The mean over pairs once more, in float64, pair by pair; NaN is untrained."""

    def of_pair(p, r):
        ahead = np.nansum(p[0] - r[0]) - np.nansum(p[1] - r[1])
        if kind == "dpo":
            one = lambda x: np.log1p(np.exp(-beta * x))
        else:
            one = lambda x: (x - 1 / (2 * beta)) ** 2
        return (1 - label_smoothing) * one(ahead) + label_smoothing * one(-ahead)

    return np.mean([of_pair(p, r) for p, r in zip(policy, reference)])


def one_pair(chosen, rejected):
    """A pair whose completions have these log ratios, by token."""
    sides = [
        Sample(np.full(len(x), 5), np.ones(len(x)), advantage=sign) for x, sign in zip((chosen, rejected), (1.0, -1.0))
    ]
    tree = Tree((3, 4), tuple(sides), whole=True)
    return laid_out(
        ([tree], [[np.array(chosen), np.array(rejected)]], [[np.zeros(len(x)) for x in (chosen, rejected)]]), 9
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # The chosen is 0.3 ahead of the reference, the rejected 0.2 behind it: the margin is 0.5.
        (dict(kind="dpo", beta=2.0), 0.3132617),  # log(1 + exp(-1))
        (dict(kind="dpo", beta=2.0, label_smoothing=0.25), 0.5632617),  # 0.75 * 0.3132617 + 0.25 * 1.3132617
        (dict(kind="ipo", beta=0.25), 2.25),  # (0.5 - 2)^2
        (dict(kind="ipo", beta=0.25, label_smoothing=0.25), 3.25),  # 0.75 * 2.25 + 0.25 * (-0.5 - 2)^2
    ],
)
def test_hand_computed(settings, expected):
    batch, logprobs, _ = one_pair([0.1, 0.2], [-0.3, 0.0, 0.1])
    (value, metrics), _ = evaluated(logprobs, batch, **settings)
    assert float(value) == pytest.approx(expected, rel=1e-6)
    beta = settings["beta"]
    want = {"margin": 0.5 * beta, "accuracy": 1.0, "chosen_reward": 0.3 * beta, "rejected_reward": -0.2 * beta}
    assert {n: float(metrics[f"preference/{n}"]) for n in want} == pytest.approx(want, rel=1e-6)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 9999), st.sampled_from(SETTINGS))
def test_value_is_numpys(seed, settings):
    data = example(seed)
    batch, logprobs, _ = laid_out(data, 24, 4)
    (value, metrics), _ = evaluated(logprobs, batch, **settings)
    assert float(value) == pytest.approx(by_the_papers(*data[1:], **settings), rel=1e-5)
    ahead = [np.nansum(p[0] - r[0]) - np.nansum(p[1] - r[1]) for p, r in zip(*data[1:])]
    assert float(metrics["preference/margin"]) == pytest.approx(settings["beta"] * np.mean(ahead), rel=1e-4, abs=1e-5)
    assert float(metrics["preference/accuracy"]) == pytest.approx(np.mean(np.array(ahead) > 0))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_gradient_is_that_of_finite_differences_in_float64(settings):
    data = example()
    batch, logprobs, placements = laid_out(data, 24)
    _, gradient = evaluated(logprobs, batch, **settings)
    got = unpack(gradient, placements)
    assert float(np.abs(gradient).sum()) == pytest.approx(sum(np.abs(g).sum() for pair in got for g in pair), rel=1e-6)
    for pair, side in np.ndindex(len(LENGTHS), 2):
        for token in range(LENGTHS[pair][side]):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [[side.copy() for side in p] for p in data[1]]
                moved[pair][side][token] += step
                ends.append(by_the_papers(moved, data[2], **settings))
            expected = (ends[0] - ends[1]) / 2e-5
            assert got[pair][side][token] == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_packing_and_row_order_change_nothing(settings):
    data = example()
    (value, metrics), gradient = evaluated(*laid_out(data, 24)[1::-1], **settings)
    wanted = unpack(gradient, laid_out(data, 24)[2])
    for row_length, multiple, order in ((64, 1, None), (17, 8, None), (24, 1, [3, 0, 4, 1, 2])):
        batch, logprobs, placements = laid_out(data, row_length, multiple, order)
        (other, theirs), gradient = evaluated(logprobs, batch, **settings)
        assert float(other) == pytest.approx(float(value), rel=1e-6)
        assert {n: float(x) for n, x in theirs.items()} == pytest.approx(
            {n: float(x) for n, x in metrics.items()}, rel=1e-5, abs=1e-6
        )
        got = unpack(gradient, placements)
        for place, pair in enumerate(order or range(len(LENGTHS))):
            for ours, original in zip(got[place], wanted[pair]):
                np.testing.assert_allclose(ours, original, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("wild", [np.inf, -np.inf])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_not_trained_has_no_part_in_value_or_gradient(settings, wild):
    calm, _, _ = laid_out(example(), 24)
    trained = np.asarray(calm.loss_weight) > 0
    (value, _), gradient = evaluated(*laid_out(example(), 24)[1::-1], **settings)
    batch, logprobs, _ = laid_out(example(wild=wild), 24)
    logprobs = np.where(trained, logprobs, wild)  # padding and prompts too
    (other, _), theirs = evaluated(logprobs, batch, **settings)
    assert np.isfinite(value) and value == other
    np.testing.assert_array_equal(gradient, theirs)
    assert (np.asarray(gradient)[~trained] == 0).all() and (np.asarray(gradient)[trained] != 0).all()


def test_value_and_gradient_of_far_pairs_are_finite():
    for far in ([-5e4], [5e4]):
        batch, logprobs, _ = one_pair(far, [0.0])
        (value, _), gradient = evaluated(logprobs, batch, kind="dpo", beta=0.1)
        assert np.isfinite(value) and np.isfinite(gradient).all()
    assert float(evaluated(*one_pair([-5e4], [0.0])[1::-1], kind="dpo", beta=0.1)[0][0]) == pytest.approx(5e3)


def test_smoothing_moves_the_least_loss_from_infinity_to_the_odds_of_the_labels():
    """cDPO: the loss is least where `sigmoid(beta margin)` is the share of right labels."""
    margins = jnp.linspace(0.0, 8.0, 8001)
    smooth = 0.9 * OBJECTIVES["dpo"](margins, 1.0) + 0.1 * OBJECTIVES["dpo"](-margins, 1.0)
    assert float(margins[jnp.argmin(smooth)]) == pytest.approx(np.log(9), abs=2e-3)


@pytest.mark.parametrize(("settings", "message"), [((0.0, 0.1), "beta=0.0"), ((0.1, 0.5), "label_smoothing=0.5")])
def test_settings_that_teach_nothing_are_refused(settings, message):
    check_settings(0.1, 0.0)
    with pytest.raises(ValueError, match=message):
        check_settings(*settings)


# ---- with a model ----

MODEL = ModelConfig(vocab_size=24, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32)
LORA = LoraConfig(rank=2, dropout=0.1, targets=("query", "down"))
DPO = functools.partial(preference.loss, kind="dpo", beta=0.1)
OPTIMIZER = make_optimizer(UpdateConfig(learning_rate=1e-2), 10)


def pairs_batch(rows_multiple=4):
    return laid_out(example(), 24, rows_multiple)[0]


@functools.partial(jax.jit, static_argnames=("dropout", "micro_batches"))
def lora_step(base, state, batch, key, dropout=False, micro_batches=1):
    return update(
        state,
        batch,
        model_cfg=MODEL,
        loss=DPO,
        optimizer=OPTIMIZER,
        micro_batches=micro_batches,
        declared=lora.declare_adapters(MODEL, LORA),
        assemble=lambda trained, step: lora.attach(
            base, trained, LORA, jax.random.fold_in(key, step) if dropout else None
        ),
    )


def adapters(fresh):
    drawn = lora.init_adapters(jax.random.key(1), MODEL, LORA)
    return drawn if fresh else jax.tree.map(lambda x: x + 0.3, drawn)


@pytest.mark.parametrize("fresh", [True, False])
def test_o05_at_step_0_the_margin_is_0_and_the_loss_log_2(fresh):
    """A fresh adapter of dropout 0.1 adds 0, dropped or not; one that was trained is the policy only undropped."""
    base = transformer.init(jax.random.key(0), MODEL)
    start, batch = adapters(fresh), pairs_batch()
    reference = jax.jit(functools.partial(score, model_cfg=MODEL))(lora.attach(base, start, LORA), batch)[0]
    batch = batch.replace(reference_logprobs=reference)
    seen = []
    for seed in (0, 1, 1):
        for dropout in (False, True) if fresh else (False,):
            state = init_state(start, OPTIMIZER)
            seen.append(lora_step(base, state, batch, jax.random.key(seed), dropout=dropout)[1])
            assert float(seen[-1]["loss/total"]) == pytest.approx(0.693147, abs=1e-6)
            assert float(seen[-1]["preference/margin"]) == pytest.approx(0.0, abs=1e-6)
            assert float(seen[-1]["update/gradient_norm"]) > 1e-3  # it has something to learn all the same
    assert len({float(metrics["loss/total"]) for metrics in seen[:: 2 if fresh else 1]}) == 1
    if not fresh:  # what the remedy is for
        dropped = lora_step(base, init_state(start, OPTIMIZER), batch, jax.random.key(0), dropout=True)[1]
        assert abs(float(dropped["loss/total"]) - 0.693147) > 1e-5


def test_micro_batches_change_nothing_and_a_few_steps_prefer_the_chosen():
    base = transformer.init(jax.random.key(0), MODEL)
    batch, key = pairs_batch(), jax.random.key(0)
    batch = batch.replace(reference_logprobs=score(base, batch, model_cfg=MODEL)[0])
    state = init_state(adapters(fresh=False), OPTIMIZER)  # away from margin 0, where rounding decides who is ahead
    whole, metrics = lora_step(base, state, batch, key)
    split, theirs = lora_step(base, state, batch, key, micro_batches=2)
    for name, value in metrics.items():
        assert float(theirs[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    for ours, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(split.params)):
        np.testing.assert_allclose(other, ours, atol=1e-4)
    assert float(metrics["preference/accuracy"]) < 0.9
    for _ in range(9):
        whole, after = lora_step(base, whole, batch, key)
    assert float(after["preference/accuracy"]) == pytest.approx(1.0)
    assert float(after["loss/total"]) < float(metrics["loss/total"]) - 0.05
