import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_posttrain.data.packing import Sample, Tree, bucket, pack, unpack, untrained_samples


def sample(*tokens, weight=1.0, **fields):
    return Sample(tokens, (weight,) * len(tokens), **fields)


def visible(batch, row, query):
    """Tokens that a query sees, in order of position, by the rule of `Batch`."""
    segments, parents, positions = batch.segments[row], batch.parents[row], batch.positions[row]
    own = (segments == segments[query]) | (segments == parents[query])
    keys = np.flatnonzero(own & (segments > 0) & (segments[query] > 0) & (positions <= positions[query]))
    return list(batch.tokens[row][keys[np.argsort(positions[keys], kind="stable")]])


@st.composite
def forests(draw):
    tokens = st.integers(3, 99)
    completion = st.lists(tokens, max_size=6)
    trees = []
    for _ in range(draw(st.integers(1, 6))):
        samples = draw(st.lists(completion, min_size=1, max_size=5))
        trees.append(Tree(draw(st.lists(tokens, min_size=1, max_size=6)), tuple(sample(*tokens) for tokens in samples)))
    return trees


def test_a_group_is_laid_out_as_one_prompt_and_its_children():
    tree = Tree(
        (10, 11, 12),
        (
            Sample((5, 1), (0.5, 0.25), 2.0, (-0.1, -0.2), temperature=0.7, policy_version=4),
            Sample((6, 7, 1), (1, 0, 1), -1.0),
        ),
    )
    batch, placements = pack([tree], 12)
    expected = {
        "tokens": [10, 11, 12, 5, 1, 12, 6, 7, 1, 0, 0, 0],
        "labels": [11, 12, 5, 1, 0, 6, 7, 1, 0, 0, 0, 0],
        "positions": [0, 1, 2, 3, 4, 2, 3, 4, 5, 0, 0, 0],
        "segments": [1, 1, 2, 2, 2, 3, 3, 3, 3, 0, 0, 0],
        "parents": [-1, -1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1],
        "loss_weight": [0, 0, 0.5, 0.25, 0, 1, 0, 1, 0, 0, 0, 0],
        "advantages": [0, 0, 2, 2, 0, -1, -1, -1, 0, 0, 0, 0],
        "behaviour_logprobs": [0, 0, -0.1, -0.2, 0, 0, 0, 0, 0, 0, 0, 0],
        "reference_logprobs": [0] * 12,
        "temperature": [1, 1, 0.7, 0.7, 0.7, 1, 1, 1, 1, 1, 1, 1],
        "policy_version": [0, 0, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0],
    }
    assert [(p.row, p.start, p.length) for p in placements] == [(0, 2, 2), (0, 5, 3)]
    for name, row in expected.items():
        field = getattr(batch, name)
        assert field.dtype == (np.float32 if isinstance(field[0, 0], np.floating) else np.int32), name
        np.testing.assert_allclose(field, [row], rtol=1e-7, err_msg=name)


def test_a_whole_tree_shares_a_row_or_is_refused():
    samples = (sample(5, 6, 1), sample(7, 1))  # with the prompt before its last token: 2 + 4 + 3
    batch, placements = pack([Tree((3, 4, 9), samples, whole=True)], 9)
    assert [p.row for p in placements] == [0, 0] and batch.tokens.shape == (1, 9)
    with pytest.raises(ValueError, match=r"completions of \[3, 2\] need 9 positions in one row, and row_length=8: use"):
        pack([Tree((3, 4, 9), samples, whole=True)], 8)
    assert {p.row for p in pack([Tree((3, 4, 9), samples)], 8)[1]} == {0, 1}  # which others may


def test_a_prompt_of_one_token_needs_no_prompt_segment():
    batch, _ = pack([Tree((9,), (sample(8, 1), sample(7)))], 8)
    np.testing.assert_array_equal(batch.tokens, [[9, 8, 1, 9, 7, 0, 0, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 1, 0, 0, 0]])
    np.testing.assert_array_equal(batch.parents, [[1, 1, 1, 1, 1, -1, -1, -1]])  # siblings, of a parent without tokens
    assert 1 not in batch.segments
    assert visible(batch, 0, 4) == [9, 7]


@settings(deadline=None, max_examples=60)
@given(forests(), st.integers(12, 40))
def test_every_token_sees_its_prompt_and_its_own_past_and_nothing_else(trees, row_length):
    batch, placements = pack(trees, row_length)
    assert [(p.tree, p.sample) for p in placements] == [
        (i, j) for i, tree in enumerate(trees) for j in range(len(tree.samples))
    ]
    for p in placements:
        prompt, tokens = list(trees[p.tree].prompt), list(trees[p.tree].samples[p.sample].tokens)
        for i in range(p.length + 1):
            assert visible(batch, p.row, p.start + i) == prompt + tokens[:i]
            assert batch.positions[p.row, p.start + i] == len(prompt) - 1 + i
        assert not batch.loss_weight[p.row, p.start + p.length]
    trained = sum(len(s.tokens) for tree in trees for s in tree.samples)
    assert (batch.loss_weight > 0).sum() == trained
    assert not batch.loss_weight[batch.segments == 0].any()


@settings(deadline=None, max_examples=60)
@given(forests(), st.integers(12, 40))
def test_unpack_reads_labels_back_as_the_completions(trees, row_length):
    batch, placements = pack(trees, row_length)
    read = unpack(batch.labels, placements)
    assert [[list(x) for x in tree] for tree in read] == [[list(s.tokens) for s in t.samples] for t in trees]


def test_a_group_that_fits_a_row_stays_in_one_row():
    trees = [Tree((3,) * 5, tuple(sample(*[4] * 4) for _ in range(3))) for _ in range(7)]  # 4 + 3 * 5 = 19
    _, placements = pack(trees, 32)
    for i in range(7):
        assert len({p.row for p in placements if p.tree == i}) == 1


def test_a_group_too_large_for_a_row_repeats_its_prompt():
    tree = Tree((10, 11, 12), tuple(sample(*[20 + i] * 3) for i in range(4)))  # 2 + 4 * 4 = 18
    batch, placements = pack([tree], 10)
    assert [p.row for p in placements] == [0, 0, 1, 1]
    np.testing.assert_array_equal(batch.tokens[:, :2], [[10, 11], [10, 11]])
    assert batch.tokens.shape == (2, 10)


def test_a_sample_that_fits_no_row_is_refused_with_its_lengths():
    with pytest.raises(ValueError, match=r"tree 1: a prompt of 4 tokens and a completion of 6 need 10 .*=9"):
        pack([Tree((3,), (sample(4),)), Tree((3,) * 4, (sample(4), sample(*[4] * 6)))], 9)
    assert pack([Tree((3,) * 4, (sample(*[4] * 6),))], 10)[0].tokens.shape == (1, 10)


def test_rows_are_filled_with_empty_ones_to_few_shapes():
    assert [bucket(n, 3) for n in (0, 1, 3, 4, 7, 12, 13)] == [3, 3, 3, 6, 12, 12, 24]
    trees = [Tree((3, 4), (sample(*[5] * 6),))] * 5
    batch, _ = pack(trees, 8, rows_multiple=2)
    assert batch.tokens.shape == (8, 8)
    assert not batch.segments[5:].any() and (batch.temperature[5:] == 1).all()
    assert (batch.parents[5:] == -1).all()


def test_rows_can_be_given_exactly():
    trees = [Tree((3, 4), (sample(*[5] * 6),))] * 5
    assert pack(trees, 8, rows=6, rows_multiple=3)[0].tokens.shape == (6, 8)
    with pytest.raises(ValueError, match="5 trees need 5 rows of 8 tokens, and rows=4"):
        pack(trees, 8, rows=4)
    with pytest.raises(ValueError, match="multiple"):
        pack(trees, 8, rows=5, rows_multiple=2)


def test_no_trees_give_empty_rows():
    batch, placements = pack([], 8, rows_multiple=4)
    assert batch.tokens.shape == (4, 8) and not batch.segments.any()
    assert placements == [] == unpack(batch.labels, placements)


def test_packing_is_dense_and_deterministic():
    rng = np.random.default_rng(0)
    trees = [Tree((3,) * 9, tuple(sample(*[4] * n) for n in rng.integers(2, 12, 4))) for _ in range(200)]
    batch, placements = pack(trees, 256)
    used = int((batch.segments > 0).sum())
    rows = 1 + max(p.row for p in placements)
    assert used / (rows * 256) > 0.95
    again, placed_again = pack(trees, 256)
    assert placements == placed_again
    np.testing.assert_array_equal(batch.tokens, again.tokens)


def test_o21_the_end_is_trained_once_per_sample_even_when_it_has_the_id_of_padding():
    end = 0  # what rows are padded with
    trees = [Tree((7, 2), (sample(5, end), sample(5, 6, 6, end))), Tree((2,), (sample(end),))]
    batch, placements = pack(trees, 16, rows=2)
    trained = batch.loss_weight > 0
    assert trained.sum() == 7 and (batch.labels[trained] == end).sum() == 3
    for read in unpack(np.where(trained, batch.labels, -1), placements):
        for labels in read:
            assert labels[-1] == end and end not in labels[:-1]


def test_samples_that_train_nothing_are_counted():
    trees = [
        Tree((3,), (sample(), sample(4), sample(4, 5, weight=0.0))),
        Tree((3,), (Sample((4, 5), (0, 1)),)),
    ]
    assert untrained_samples(trees) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": (1, 2), "weights": (1,)},
        {"tokens": (1,), "weights": (1,), "behaviour_logprobs": (-1.0, -2.0)},
        {"tokens": (1,), "weights": (-1,)},
        {"tokens": (1,), "weights": (float("nan"),)},
        {"tokens": (1,), "weights": (1,), "advantage": float("nan")},
        {"tokens": (1,), "weights": (1,), "behaviour_logprobs": (float("-inf"),)},
        {"tokens": (1,), "weights": (1,), "temperature": 0.0},
    ],
)
def test_samples_that_cannot_be_trained_are_refused(fields):
    with pytest.raises(ValueError, match="must be|one entry per"):
        Sample(**fields)


def test_trees_need_a_prompt_and_a_sample():
    with pytest.raises(ValueError, match="at least one token"):
        Tree((), (sample(4),))
    with pytest.raises(ValueError, match="at least one sample"):
        Tree((3,), ())
