import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_posttrain.algorithms import gae

generalised_advantages = jax.jit(gae.generalised_advantages, static_argnums=(4, 5))


def by_definition(rewards, values, discount, decay):
    """One sample's advantages, each as the sum over all later one-step differences."""
    following = np.append(values[1:], 0.0)
    deltas = rewards + discount * following - values
    return [sum((discount * decay) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


def test_hand_computed():
    rewards, values = jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[0.5, 0.25, 0.75]])
    everything, segments = jnp.ones((1, 3), bool), jnp.ones((1, 3), jnp.int32)
    # Differences, discount 0.5: 0.125 - 0.5, 0.375 - 0.25, 1 - 0.75; factor 0.5 * 0.8 = 0.4.
    advantages, returns = generalised_advantages(rewards, values, everything, segments, 0.5, 0.8)
    expected = [[-0.375 + 0.4 * 0.225, 0.125 + 0.4 * 0.25, 0.25]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    np.testing.assert_allclose(returns, np.array(expected) + values, rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 999), st.sampled_from([(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.7, 0.0)]))
def test_packed_samples_with_observations_have_the_advantages_of_each_alone(seed, discounts):
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(0, 5, (2, 16)), axis=1)[:, ::-1].astype(np.int32)  # padding last
    trained = (rng.random((2, 16)) < 0.7) & (segments > 0)
    rewards, values = (np.where(trained, x, np.nan).astype(np.float32) for x in rng.normal(size=(2, 2, 16)))
    arguments = (jnp.asarray(x) for x in (rewards, values, trained, segments))
    advantages, returns = map(np.asarray, generalised_advantages(*arguments, *discounts))
    assert (advantages[~trained] == 0).all() and (returns[~trained] == 0).all()
    for row in range(2):
        for segment in range(1, 5):
            own = trained[row] & (segments[row] == segment)
            expected = by_definition(rewards[row, own], values[row, own], *discounts)
            np.testing.assert_allclose(advantages[row, own], expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(returns[row, own], expected + values[row, own], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_the_extremes_are_one_step_differences_and_returns(decay):
    rewards, values = np.random.default_rng(0).normal(size=(2, 1, 6)).astype(np.float32)
    everything, segments = jnp.ones((1, 6), bool), jnp.ones((1, 6), jnp.int32)
    advantages, returns = generalised_advantages(
        jnp.asarray(rewards), jnp.asarray(values), everything, segments, 1.0, decay
    )
    togo = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
    if decay:
        np.testing.assert_allclose(returns, togo, rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_allclose(advantages[0, :-1], (rewards + np.roll(values, -1) - values)[0, :-1], rtol=1e-5)
