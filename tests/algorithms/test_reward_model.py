"""Scores by place and not by id, and Bradley and Terry's loss: by hand, against NumPy, in other layouts, learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_posttrain.algorithms import reward_model
from rl_posttrain.algorithms.reward_model import completion_ends, completion_scores
from rl_posttrain.algorithms.update import UpdateConfig, init_state, make_optimizer, score_rewards, update
from rl_posttrain.batch import Batch
from rl_posttrain.data.packing import DTYPES, PADDING, Sample, Tree, pack
from rl_posttrain.model import heads, transformer
from rl_posttrain.model.transformer import ModelConfig

MODEL = ModelConfig(vocab_size=24, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32)
DECLARED = heads.declare_reward_model(MODEL)
END = 0  # of completions, and of the padding
OPTIMIZER = make_optimizer(UpdateConfig(learning_rate=1e-2), 20)


@functools.cache
def params():
    return transformer.init_tree(jax.random.key(0), MODEL, DECLARED)


def on_device(batch):
    return jax.tree.map(jnp.asarray, batch)


def pair(prompt, chosen, rejected, weight=1.0):
    sides = ((chosen, 1.0), (rejected, -1.0))
    return Tree(prompt, tuple(Sample(x, np.full(len(x), weight), advantage=a) for x, a in sides), whole=True)


def padded_left(batch, count):
    """The same rows behind `count` positions of padding."""
    width = lambda name: np.full((batch.tokens.shape[0], count), PADDING.get(name, 0), DTYPES[name])
    return Batch(**{name: np.concatenate([width(name), getattr(batch, name)], axis=1) for name in DTYPES})


def test_o06_the_score_is_read_at_the_last_token_though_ends_are_pads():
    """Ids [5, E, 7, E, E, E] under the mask 111100: the score is that of index 3, wherever the padding is."""
    tree = Tree((5,), (Sample((END, 7, END), (1.0, 1.0, 1.0)),))
    batch, _ = pack([tree], 6)
    np.testing.assert_array_equal(batch.tokens, [[5, END, 7, END, END, END]])
    np.testing.assert_array_equal(batch.segments > 0, [[1, 1, 1, 1, 0, 0]])
    ids = jnp.array([[5, END, 7, END]])
    row = (jnp.arange(4)[None], jnp.ones((1, 4), jnp.int32), jnp.full((1, 4), -1))
    by_index = heads.values(params(), transformer.forward(params(), MODEL, ids, *row))[0]
    assert len({round(float(x), 3) for x in by_index}) == 4  # each end would have another score
    for layout in (batch, pack([tree], 4)[0], padded_left(batch, 2)):
        layout = on_device(layout)
        (values,) = score_rewards(params(), layout, model_cfg=MODEL)
        scores = np.asarray(completion_scores(values, layout))
        (place,) = np.argwhere(np.asarray(completion_ends(layout)))
        assert scores[tuple(place)] == pytest.approx(float(by_index[3]), abs=1e-6)
        assert np.count_nonzero(scores) == 1


def test_an_end_is_the_last_trained_token_of_its_own_segment():
    observed = Sample((5, 6, 7, 8), (1.0, 0.0, 1.0, 0.0))  # the last token is an observation
    batch, _ = pack([Tree((3, 4), (observed, Sample((9,), (1.0,)), Sample((9, 9), (0.0, 0.0))))], 16)
    ends = np.asarray(completion_ends(batch))
    assert [batch.labels[tuple(place)] for place in np.argwhere(ends)] == [7, 9]
    values = np.arange(16.0)[None]
    scores = np.asarray(completion_scores(jnp.asarray(values), batch))
    # 1 of the prompt; 4 at index 1, 7 is the token of index 4; the next segment begins at 6, and 9 is at 7.
    np.testing.assert_array_equal(np.argwhere(ends)[:, 1], [3, 6])
    np.testing.assert_array_equal(scores[ends], [4, 7])


@functools.partial(jax.jit, static_argnames="margin")
def evaluated(values, batch, margin=0.0):
    return jax.value_and_grad(lambda x: reward_model.loss(x, batch, jnp.float32(1), margin=margin), has_aux=True)(
        values
    )


def test_hand_computed():
    batch, placements = pack([pair((3, 4), (5, END), (6, 7, END))], 8)
    values = np.full((1, 8), 100.0, np.float32)
    for p, score in zip(placements, (1.5, 0.5)):
        values[0, p.start + p.length] = score
    (value, metrics), gradient = evaluated(values, batch)
    assert float(value) == pytest.approx(0.3132617)  # log(1 + exp(-1))
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(
        {
            "loss/total": 0.3132617,
            "reward_model/margin": 1.0,
            "reward_model/accuracy": 1.0,
            "reward_model/chosen_score": 1.5,
            "reward_model/rejected_score": 0.5,
        }
    )
    assert float(evaluated(values, batch, margin=1.0)[0][0]) == pytest.approx(np.log(2))
    assert sorted(np.asarray(gradient)[np.asarray(gradient) != 0].tolist()) == pytest.approx([-0.2689414, 0.2689414])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 9999), st.sampled_from([0.0, 0.7]))
def test_value_and_gradient_are_numpys_in_any_layout(seed, margin):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(4, 2))
    lengths = rng.integers(1, 5, (4, 2))
    trees = [
        pair(rng.integers(3, 24, rng.integers(1, 4)), *(rng.integers(0, 24, n) for n in both), weight=0.25)
        for both in lengths
    ]

    def formula(scores):
        return np.mean(np.log1p(np.exp(-(scores[:, 0] - scores[:, 1] - margin))))

    for order, row_length in ((range(4), 16), ((2, 0, 3, 1), 32)):
        batch, placements = pack([trees[i] for i in order], row_length, 4)
        values = np.full(batch.tokens.shape, np.nan, np.float32)  # what no score is read from may be anything
        places = {(order[p.tree], p.sample): (p.row, p.start + p.length) for p in placements}
        for which, place in places.items():
            values[place] = scores[which]
        (value, _), gradient = evaluated(values, batch, margin=margin)
        assert float(value) == pytest.approx(formula(scores), rel=1e-5)
        for which, place in places.items():
            step = np.zeros((4, 2))
            step[which] = 1e-6
            expected = (formula(scores + step) - formula(scores - step)) / 2e-6
            assert float(gradient[place]) == pytest.approx(expected, rel=1e-4, abs=1e-7)
        assert np.count_nonzero(gradient) == 8


@functools.partial(jax.jit, static_argnames="micro_batches")
def step(state, batch, micro_batches=1):
    return update(
        state,
        batch,
        model_cfg=MODEL,
        loss=reward_model.loss,
        optimizer=OPTIMIZER,
        outputs=score_rewards,
        micro_batches=micro_batches,
        declared=DECLARED,
    )


def test_it_learns_which_completion_holds_a_seven_and_micro_batches_change_nothing():
    rng = np.random.default_rng(0)

    def pairs(count):
        made = []
        for _ in range(count):
            chosen, rejected = rng.integers(8, 24, (2, 3))
            chosen[rng.integers(3)] = 7
            made.append(pair(rng.integers(8, 24, 2), (*chosen, END), (*rejected, END), 1 / count))
        return pack(made, 48, rows=8)[0]

    batch, fresh = on_device(pairs(24)), on_device(pairs(24))
    state = init_state(params(), OPTIMIZER)
    first, metrics = step(state, batch)
    other, theirs = step(state, batch, micro_batches=4)
    for name, value in metrics.items():
        assert float(theirs[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    assert all(float(jnp.abs(a - b).max()) < 1e-4 for a, b in zip(*map(jax.tree.leaves, (first.params, other.params))))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), first.params, state.params)
    assert all(jax.tree.leaves(moved))  # the whole model, and the head
    state = first
    for _ in range(19):
        state, metrics = step(state, batch)
    _, unseen = reward_model.loss(*score_rewards(state.params, fresh, model_cfg=MODEL), fresh, jnp.float32(1))
    assert float(metrics["loss/total"]) < 0.3
    assert float(unseen["reward_model/accuracy"]) > 0.8
