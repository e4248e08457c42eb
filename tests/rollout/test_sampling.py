"""Draws follow the distribution they claim, and the recorded logprob is of that distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.rollout.generate import RolloutConfig
from rl_posttrain.rollout.sampling import Sampling, sample, truncate


def test_o12_logprob_is_at_the_temperature_of_the_draw():
    token, logprob = sample(jnp.float32(0.5), jnp.array([2.0, 0.0]), Sampling(temperature=0.5))
    assert int(token) == 0
    # Logits / T = [4, 0]: log softmax of the first is -log(1 + e^-4). Dividing after the softmax gives -0.25386.
    np.testing.assert_allclose(logprob, -0.01815, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_o13_greedy_is_the_argmax_with_a_finite_logprob(dtype):
    logits = jax.random.normal(jax.random.key(0), (64, 17)).astype(dtype)
    token, logprob = sample(jnp.zeros(64), logits, Sampling(temperature=0))
    np.testing.assert_array_equal(token, np.argmax(np.asarray(logits, np.float32), -1))
    np.testing.assert_array_equal(logprob, 0.0)  # a certain draw


def test_o13_greedy_and_truncation_are_refused_in_training():
    with pytest.raises(ValueError, match="temperature=0"):
        RolloutConfig(temperature=0.0)
    with pytest.raises(ValueError, match="top_p=0.9"):
        Sampling(1.0, top_p=0.9).check_for_training()
    with pytest.raises(ValueError, match="top_k=5"):
        Sampling(1.0, top_k=5).check_for_training()


@pytest.mark.parametrize(("top_p", "dtype"), [(0.0, jnp.float32), (1e-8, jnp.float32), (1e-3, jnp.bfloat16)])
def test_o13_tiny_top_p_keeps_the_argmax(top_p, dtype):
    logits = jax.random.normal(jax.random.key(1), (32, 50)).astype(dtype)
    uniform = jax.random.uniform(jax.random.key(2), (32,))
    token, logprob = sample(uniform, logits, Sampling(1.0, top_p=top_p))
    np.testing.assert_array_equal(token, np.argmax(np.asarray(logits, np.float32), -1))
    np.testing.assert_allclose(logprob, 0.0, atol=1e-6)


def test_o13_top_k_above_the_vocabulary_filters_nothing():
    logits = jax.random.normal(jax.random.key(3), (8, 11))
    np.testing.assert_array_equal(truncate(logits, Sampling(1.0, top_k=12)), logits)
    np.testing.assert_array_equal(truncate(logits, Sampling(1.0, top_k=11)), logits)
    assert (np.isfinite(truncate(logits, Sampling(1.0, top_k=3))).sum(-1) == 3).all()


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    logits = jnp.log(jnp.array([0.1, 0.5, 0.15, 0.25]))
    kept = np.isfinite(truncate(logits, Sampling(1.0, top_p=0.7)))
    np.testing.assert_array_equal(kept, [False, True, False, True])  # 0.5 + 0.25 is the first sum above 0.7


def test_frequencies_match_the_distribution():
    logits = jnp.array([0.0, 1.0, -2.0, 2.0, -jnp.inf])
    uniform = (jnp.arange(20_000) + 0.5) / 20_000  # the whole range of the uniform number, evenly
    token, logprob = sample(uniform, jnp.broadcast_to(logits, (20_000, 5)), Sampling(0.7))
    scaled = np.exp(np.array([0.0, 1.0, -2.0, 2.0]) / 0.7)
    expected = scaled / scaled.sum()
    np.testing.assert_allclose(np.bincount(token, minlength=5)[:4] / 20_000, expected, atol=1e-4)
    assert (np.asarray(token) != 4).all()
    np.testing.assert_allclose(logprob, np.log(expected)[np.asarray(token)], rtol=1e-5)


def test_a_uniform_number_at_the_top_never_draws_a_token_without_mass():
    logits = jnp.array([0.0, -jnp.inf, 0.0, -jnp.inf])
    token, _ = sample(jnp.float32(1.0), logits, Sampling())
    assert int(token) == 2
    token, _ = sample(jnp.float32(0.0), jnp.array([-jnp.inf, 0.0, 0.0]), Sampling())
    assert int(token) == 1
