import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_posttrain.algorithms.losses import AGGREGATIONS, sample_weights

LENGTHS = np.array([2, 8, 0, 5, 10])
VALID = np.array([True, True, True, False, True])  # 3 samples count, with 20 tokens


@pytest.mark.parametrize(
    ("kind", "constant", "expected"),
    [
        ("token_mean", None, [1 / 20, 1 / 20, 0, 0, 1 / 20]),
        ("sequence_mean", None, [1 / 6, 1 / 24, 0, 0, 1 / 30]),
        ("constant_length", 16, [1 / 48, 1 / 48, 0, 0, 1 / 48]),
    ],
)
def test_sample_weights_hand_computed(kind, constant, expected):
    weights = sample_weights(LENGTHS, VALID, kind, constant)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "mean"),
    [
        ("token_mean", lambda terms: np.concatenate(terms).mean()),
        ("sequence_mean", lambda terms: np.mean([t.mean() for t in terms])),
        ("constant_length", lambda terms: np.mean([t.sum() / 12 for t in terms])),
    ],
)
def test_a_plain_sum_with_the_weights_is_the_named_mean(kind, mean):
    rng = np.random.default_rng(1)
    terms = [rng.normal(size=n) for n in (3, 1, 12, 7)]
    lengths = np.array([len(t) for t in terms])
    weights = sample_weights(lengths, np.ones(4, bool), kind, 12 if kind == "constant_length" else None)
    assert sum(w * t.sum() for w, t in zip(weights, terms, strict=True)) == pytest.approx(mean(terms), rel=1e-6)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_nothing_to_train_weighs_nothing(kind):
    constant = 4 if kind == "constant_length" else None
    assert (sample_weights(np.array([0, 3]), np.array([True, False]), kind, constant) == 0).all()
    assert sample_weights(np.zeros(0, int), np.zeros(0, bool), kind, constant).shape == (0,)


@pytest.mark.parametrize(
    ("kind", "constant", "message"),
    [
        ("constant_length", None, "constant_length=None"),
        ("constant_length", 0, "constant_length=0"),
        ("token_mean", 5, "no effect"),
    ],
)
def test_a_constant_length_is_needed_by_one_kind_alone(kind, constant, message):
    with pytest.raises(ValueError, match=message):
        sample_weights(LENGTHS, VALID, kind, constant)


def test_negative_lengths_are_refused():
    with pytest.raises(ValueError, match="-1"):
        sample_weights(np.array([3, -1]), np.ones(2, bool), "token_mean")


EMPHASIS = np.array([2.0, 1.0, 1.0, 5.0, 0.0])  # the samples that count have weights 2, 1, 0; lengths 2, 8, 10


@pytest.mark.parametrize(
    ("kind", "constant", "expected"),
    [
        ("token_mean", None, [2 / 12, 1 / 12, 0, 0, 0]),
        ("sequence_mean", None, [2 / 6, 1 / 24, 0, 0, 0]),
        ("constant_length", 16, [2 / 48, 1 / 48, 0, 0, 0]),
    ],
)
def test_domain_weights_hand_computed(kind, constant, expected):
    np.testing.assert_allclose(sample_weights(LENGTHS, VALID, kind, constant, EMPHASIS), expected, rtol=1e-6)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 9), st.sampled_from(sorted(AGGREGATIONS)))
def test_a_sample_of_weight_two_counts_as_the_sample_twice(lengths, seed, kind):
    rng = np.random.default_rng(seed)
    lengths, valid = np.array(lengths), rng.random(len(lengths)) < 0.8
    twice = rng.integers(1, 3, len(lengths))
    constant = 7 if kind == "constant_length" else None
    weighted = sample_weights(lengths, valid, kind, constant, twice.astype(float))
    repeated = sample_weights(lengths.repeat(twice), valid.repeat(twice), kind, constant)
    first = np.cumsum(twice) - twice
    np.testing.assert_allclose(weighted, repeated[first] * twice, rtol=1e-6)


def test_a_negative_emphasis_is_refused():
    with pytest.raises(ValueError, match="-1"):
        sample_weights(np.array([3, 1]), np.ones(2, bool), "token_mean", None, np.array([1.0, -1.0]))
