import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rl_posttrain.algorithms.kl import kl_k3
from rl_posttrain.algorithms.losses import AGGREGATIONS, sample_weights
from rl_posttrain.algorithms.ratios import log_ratio, token_ratio
from rl_posttrain.algorithms.surrogates import clipped_surrogate

row = lambda *values, dtype=jnp.float32: jnp.array([values], dtype)


def test_ratio_hand_computed():
    np.testing.assert_allclose(
        token_ratio(row(-1.0, -2.0, -0.5), row(-1.0, -1.0, -1.0)), [[1.0, np.exp(-1), np.exp(0.5)]], rtol=1e-6
    )


def test_ratio_and_its_gradient_stay_finite_at_any_distance():
    far, behaviour = row(0.0, -200.0, -1e30), row(-200.0, 0.0, -1.0)
    value, gradient = jax.value_and_grad(lambda x: token_ratio(x, behaviour).sum())(far)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    np.testing.assert_allclose(log_ratio(far, behaviour)[0, :2], [200, -200])  # reported as it is


def test_no_gradient_flows_to_the_behaviour_policy():
    gradient = jax.grad(lambda b: token_ratio(row(-1.0, -2.0), b).sum())(row(-1.5, -1.0))
    np.testing.assert_array_equal(gradient, [[0, 0]])


def test_surrogate_hand_computed():
    ratio = row(1.0, 0.5, 1.5, 0.5, 1.5, 1.1, 3.0)
    advantages = row(2.0, 1.0, 1.0, -1.0, -1.0, -2.0, 0.0)
    # The clip acts where it would raise the objective: above 1.28 if A > 0, below 0.8 if A < 0.
    expected = [[2.0, 0.5, 1.28, -0.8, -1.5, -2.2, 0.0]]
    np.testing.assert_allclose(clipped_surrogate(ratio, advantages, 0.2, 0.28), expected, rtol=1e-6)
    gradient = jax.grad(lambda r: clipped_surrogate(r, advantages, 0.2, 0.28).sum())(ratio)
    np.testing.assert_allclose(gradient, [[2, 1, 0, 0, -1, -2, 0]], atol=1e-6)


@pytest.mark.parametrize(
    ("distance", "expected"), [(0.0, 0.0), (0.1, 0.0051709181), (-0.1, 0.0048374180), (1.0, 0.7182818285)]
)
def test_o02_k3_hand_computed(distance, expected):
    value = kl_k3(row(-1.0), row(-1.0 + distance))[0, 0]
    assert value == pytest.approx(expected, rel=3e-5, abs=1e-9)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("distance", [100.0, -100.0, 1e4])
def test_o02_k3_stays_finite_in_value_and_gradient(dtype, distance):
    reference = row(0.0, dtype=dtype)
    value, gradient = jax.value_and_grad(lambda x: kl_k3(x, reference).sum())(row(-distance, dtype=dtype))
    assert value.dtype == jnp.float32 and np.isfinite(value) and value > 0
    assert np.isfinite(gradient).all()
    assert np.sign(float(gradient[0, 0])) == -np.sign(distance)  # it still pulls the policy back


def test_k3_continues_smoothly_along_its_tangent():
    value = lambda distance: kl_k3(row(-distance), row(0.0))[0, 0]
    np.testing.assert_allclose(value(9.99), np.exp(9.99) - 10.99, rtol=1e-5)
    np.testing.assert_allclose(value(12.0), np.exp(10) - 11 + 2 * (np.exp(10) - 1), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(value)(10.001), np.exp(10) - 1, rtol=1e-5)


@settings(deadline=None)
@given(arrays(np.float32, (1, 20), elements=st.floats(-50, 0, width=32)), st.integers(0, 9))
def test_k3_is_never_negative(logprobs, seed):
    reference = np.random.default_rng(seed).permuted(logprobs, axis=1)
    assert (kl_k3(jnp.asarray(logprobs), jnp.asarray(reference)) >= -1e-6).all()


def test_k3_in_expectation_is_the_exact_divergence():
    rng = np.random.default_rng(0)
    policy, reference = (np.exp(x) / np.exp(x).sum() for x in rng.normal(size=(2, 7)))
    estimates = kl_k3(jnp.asarray(np.log(policy))[None], jnp.asarray(np.log(reference))[None])[0]
    assert (policy * estimates).sum() == pytest.approx((policy * np.log(policy / reference)).sum(), rel=1e-5)


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
