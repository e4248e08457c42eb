import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.algorithms.surrogates import (
    cispo,
    cispo_hits,
    clipped_hits,
    clipped_surrogate,
    reinforce,
    soft_gate,
)

row = lambda *values, dtype=jnp.float32: jnp.array([values], dtype)
gradient = lambda function, x: jax.grad(lambda y: function(y).sum())(x)

RATIO = row(1.0, 0.5, 1.5, 0.5, 1.5, 1.1, 3.0, 7.0)
ADVANTAGES = row(2.0, 1.0, 1.0, -1.0, -1.0, -2.0, 0.0, -1.0)


def test_clip_hand_computed():
    # The clip acts where it would raise the objective: above 1.28 if A > 0, below 0.8 if A < 0.
    expected = [[2.0, 0.5, 1.28, -0.8, -1.5, -2.2, 0.0, -7.0]]
    objective = lambda r: clipped_surrogate(r, ADVANTAGES, 0.2, 0.28)
    np.testing.assert_allclose(objective(RATIO), expected, rtol=1e-6)
    np.testing.assert_allclose(gradient(objective, RATIO), [[2, 1, 0, 0, -1, -2, 0, -1]], atol=1e-6)


def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely():
    objective = lambda r: clipped_surrogate(r, ADVANTAGES, 0.2, 0.28, dual_clip=3.0)
    np.testing.assert_allclose(objective(RATIO), [[2.0, 0.5, 1.28, -0.8, -1.5, -2.2, 0.0, -3.0]], rtol=1e-6)
    np.testing.assert_allclose(gradient(objective, RATIO), [[2, 1, 0, 0, -1, -2, 0, 0]], atol=1e-6)


def test_hits_are_where_the_gradient_is_gone():
    rng = np.random.default_rng(0)
    ratio, advantages = jnp.asarray(rng.uniform(0, 5, (1, 500))), jnp.asarray(rng.normal(size=(1, 500)))
    bounds = (0.2, 0.28, 3.0)
    hits = clipped_hits(ratio, advantages, *bounds)
    hit = hits["clip_low"] | hits["clip_high"] | hits["dual_clip"]
    np.testing.assert_array_equal(hit, gradient(lambda r: clipped_surrogate(r, advantages, *bounds), ratio) == 0)
    assert all(one.sum() > 20 for one in hits.values())


def test_without_a_dual_clip_none_is_reported():
    assert clipped_hits(RATIO, ADVANTAGES, 0.2, 0.28).keys() == {"clip_low", "clip_high"}


@pytest.mark.parametrize(("probability", "expected"), [(0.3, 0.7), (0.05, 0.95)])
def test_cispo_raises_what_it_rewards_at_any_probability(probability, expected):
    """A weight that is not detached turns the update round below 1 / e: -0.14 and -1.90 here."""
    logit = jnp.log(probability / (1 - probability))[None, None]
    behaviour = jax.nn.log_sigmoid(logit)

    def objective(x):
        logprob = jax.nn.log_sigmoid(x)
        return cispo(jnp.exp(logprob - behaviour), logprob, row(1.0), 1.0, 4.0)

    assert gradient(objective, logit)[0, 0] == pytest.approx(expected, rel=1e-5)


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    logprobs = jnp.log(row(0.1, 0.5, 0.9))
    ratio, advantages = row(0.1, 1.0, 9.0), row(1.0, -1.0, 2.0)
    objective = lambda x: cispo(ratio, x, advantages, 0.5, 4.0)
    np.testing.assert_allclose(objective(logprobs), np.log([[0.1, 0.5, 0.9]]) * [[0.5, -1, 10]], rtol=1e-6)
    np.testing.assert_allclose(gradient(objective, logprobs), [[0.5, -1.0, 10.0]])
    assert (gradient(lambda r: cispo(r, logprobs, advantages, 0.5, 4.0), ratio) == 0).all()
    hits = cispo_hits(ratio, 0.5, 4.0)
    np.testing.assert_array_equal(hits["clip_low"], [[True, False, False]])
    np.testing.assert_array_equal(hits["clip_high"], [[False, False, True]])


def test_soft_gate_hand_computed():
    ratio, advantages = row(1.0, 1.0, 2.0, 2.0), row(1.0, -1.0, 3.0, -3.0)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    expected = [[2.0, -2 / 1.05, 3 * 4 * sigmoid(1.0), -3 * 4 / 1.05 * sigmoid(1.05)]]
    objective = lambda r: soft_gate(r, advantages, 1.0, 1.05)
    np.testing.assert_allclose(objective(ratio), expected, rtol=1e-6)
    slope = lambda tau: 4 * sigmoid(tau) * (1 - sigmoid(tau))
    np.testing.assert_allclose(gradient(objective, ratio), [[1, -1, 3 * slope(1.0), -3 * slope(1.05)]], rtol=1e-5)


def test_soft_gate_fades_and_stays_finite():
    far = row(0.0, 50.0, 4.9e8)
    slopes = gradient(lambda r: soft_gate(r, row(1.0, 1.0, 1.0), 1.0, 1.0), far)
    assert np.isfinite(slopes).all() and slopes[0, 0] > 0.5 and (slopes[0, 1:] < 1e-6).all()


def test_reinforce_is_the_weighted_likelihood():
    np.testing.assert_allclose(reinforce(row(-1.0, -2.0), row(0.5, -1.0)), [[-0.5, 2.0]])
