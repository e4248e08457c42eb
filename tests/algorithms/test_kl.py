"""KL estimators against the exact divergence, and its exact gradient, of small vocabularies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rl_posttrain.algorithms.kl import KL_VALUES, adapted_coefficient, kl_k1, kl_k2, kl_k3, kl_term

row = lambda *values, dtype=jnp.float32: jnp.array([values], dtype)
softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()


@pytest.mark.parametrize(
    ("distance", "expected"), [(0.0, 0.0), (0.1, 0.0051709181), (-0.1, 0.0048374180), (1.0, 0.7182818285)]
)
def test_o02_k3_hand_computed(distance, expected):
    value = kl_k3(row(-1.0), row(-1.0 + distance))[0, 0]
    assert value == pytest.approx(expected, rel=3e-5, abs=1e-9)


def test_k1_and_k2_hand_computed():
    np.testing.assert_allclose(kl_k1(row(-1.0, -3.0), row(-2.0, -1.0)), [[1.0, -2.0]])
    np.testing.assert_allclose(kl_k2(row(-1.0, -3.0), row(-2.0, -1.0)), [[0.5, 2.0]])


@pytest.mark.parametrize("kind", [*KL_VALUES, "k3_corrected"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("distance", [100.0, -100.0, 1e4])
def test_o02_far_log_ratios_stay_finite_in_value_and_gradient(kind, dtype, distance):
    reference, at = row(0.0, dtype=dtype), row(-distance, dtype=dtype)
    value, gradient = jax.value_and_grad(lambda x: kl_term(kind, x, reference, reference).sum())(at)
    assert value.dtype == jnp.float32 and np.isfinite(value) and np.isfinite(gradient).all()
    if kind in ("k2", "k3"):  # it still pulls the policy back
        assert value > 0 and np.sign(float(gradient[0, 0])) == -np.sign(distance)


@pytest.mark.parametrize(
    ("estimate", "near", "far", "slope"),
    [
        (
            lambda d: kl_k3(row(-d), row(0.0))[0, 0],
            np.exp(9.99) - 10.99,
            np.exp(10) - 11 + 2 * np.expm1(10),
            np.expm1(10),
        ),
        (lambda d: kl_k2(row(-d), row(0.0))[0, 0], 9.99**2 / 2, 50 + 2 * 10, 10),
        (lambda d: kl_k2(row(d), row(0.0))[0, 0], 9.99**2 / 2, 50 + 2 * 10, 10),
    ],
)
def test_k2_and_k3_continue_smoothly_along_their_tangent(estimate, near, far, slope):
    np.testing.assert_allclose(estimate(9.99), near, rtol=1e-5)
    np.testing.assert_allclose(estimate(12.0), far, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(estimate)(10.001), slope, rtol=1e-5)


@settings(deadline=None, max_examples=40)
@given(arrays(np.float32, (1, 20), elements=st.floats(-50, 0, width=32)), st.integers(0, 9))
def test_k2_and_k3_are_never_negative(logprobs, seed):
    reference = jnp.asarray(np.random.default_rng(seed).permuted(logprobs, axis=1))
    for estimate in (kl_k2, kl_k3):
        assert (estimate(jnp.asarray(logprobs), reference) >= -1e-6).all()


@pytest.mark.parametrize("kind", [*KL_VALUES, "k3_corrected"])
def test_no_gradient_flows_to_the_reference_or_the_behaviour_policy(kind):
    gradients = jax.grad(lambda *others: kl_term(kind, row(-1.0), *others).sum(), (0, 1))(row(-2.0), row(-1.5))
    assert all((gradient == 0).all() for gradient in gradients)


LOGITS, REFERENCE, BEHAVIOUR = np.random.default_rng(0).normal(size=(3, 7))
POLICY = softmax(LOGITS)
DIVERGENCE = (POLICY * np.log(POLICY / softmax(REFERENCE))).sum()


@pytest.mark.parametrize(("kind", "exact"), [("k1", True), ("k2", False), ("k3", True)])
def test_values_in_expectation(kind, exact):
    estimates = KL_VALUES[kind](jnp.asarray(np.log(POLICY))[None], jnp.asarray(np.log(softmax(REFERENCE)))[None])[0]
    mean = (POLICY * estimates).sum()
    assert (mean == pytest.approx(DIVERGENCE, rel=1e-5)) == exact
    assert mean == pytest.approx(DIVERGENCE, rel=0.2)


def exact_gradient(policy, reference):
    """Of KL(policy || reference) by the policy's logits, from its definition."""
    distance = np.log(policy / reference)
    return policy * (distance - (policy * distance).sum())


def expected_gradient(objective, sampled_from):
    """Of `objective(logprobs)` at tokens weighed by the probability of sampling them, by the policy's logits."""

    def mean(logits):
        return (jnp.asarray(sampled_from) * objective(jax.nn.log_softmax(logits)[None])[0]).sum()

    return jax.grad(mean)(jnp.asarray(LOGITS, jnp.float32))


@pytest.mark.parametrize(
    ("kind", "behaviour", "expected"),
    [
        ("k1", LOGITS, np.zeros(7)),
        ("k2", LOGITS, exact_gradient(POLICY, softmax(REFERENCE))),
        ("k3", LOGITS, POLICY - softmax(REFERENCE)),  # of KL(reference || policy)
        ("k3_corrected", LOGITS, exact_gradient(POLICY, softmax(REFERENCE))),
        ("k3_corrected", BEHAVIOUR, exact_gradient(POLICY, softmax(REFERENCE))),  # stale samples
    ],
)
def test_gradients_of_loss_terms_in_expectation(kind, behaviour, expected):
    reference, behaviour = softmax(REFERENCE), softmax(behaviour)
    log = lambda p: jnp.asarray(np.log(p), jnp.float32)[None]
    gradient = expected_gradient(lambda x: kl_term(kind, x, log(reference), log(behaviour)), behaviour)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize(("kind", "exact"), [("k1", True), ("k2", False), ("k3", False)])
def test_gradients_of_reward_penalties_in_expectation(kind, exact):
    reference = jnp.asarray(np.log(softmax(REFERENCE)), jnp.float32)[None]
    penalty = lambda x: jax.lax.stop_gradient(KL_VALUES[kind](x, reference)) * x  # REINFORCE
    gradient = expected_gradient(penalty, POLICY)
    assert np.allclose(gradient, exact_gradient(POLICY, softmax(REFERENCE)), atol=1e-6) == exact


def test_an_adapted_coefficient_follows_the_target():
    assert adapted_coefficient(0.5, 0.11, 0.1) == pytest.approx(0.5 * 1.01)
    assert adapted_coefficient(0.5, 9.0, 0.1) == pytest.approx(0.5 * 1.02)  # by 2% at most
    assert adapted_coefficient(0.5, -9.0, 0.1) == pytest.approx(0.5 * 0.98)
    assert adapted_coefficient(0.5, 0.1, 0.1) == 0.5
