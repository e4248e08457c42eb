import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_posttrain.algorithms import masked
from rl_posttrain.algorithms.ratios import RATIOS, log_ratio, ratio, token_ratio, turns

row = lambda *values, dtype=jnp.float32: jnp.array([values], dtype)

# A prompt (segment 1), a sample of two turns with an observation between (2), a sample (3), padding.
SEGMENTS = row(1, 1, 2, 2, 2, 2, 2, 3, 3, 0, dtype=jnp.int32)
TRAINED = row(0, 0, 1, 1, 0, 1, 0, 1, 0, 0, dtype=bool)
DISTANCE = row(9.0, 9.0, 0.1, 0.3, 9.0, -0.1, 9.0, 0.5, 9.0, 9.0)
HAND = {  # log ratios where trained
    "token": [0.1, 0.3, -0.1, 0.5],
    "turn": [0.2, 0.2, -0.1, 0.5],
    "sequence": [0.1, 0.1, 0.1, 0.5],
    "sequence_token": [0.1, 0.1, 0.1, 0.5],
}


def test_token_ratio_hand_computed():
    np.testing.assert_allclose(
        token_ratio(row(-1.0, -2.0, -0.5), row(-1.0, -1.0, -1.0)), [[1.0, np.exp(-1), np.exp(0.5)]], rtol=1e-6
    )


@pytest.mark.parametrize("kind", RATIOS)
def test_hand_computed(kind):
    result = ratio(kind, DISTANCE - 1, jnp.full((1, 10), -1.0), TRAINED, SEGMENTS)
    np.testing.assert_allclose(result[TRAINED], np.exp(HAND[kind]), rtol=1e-6)
    assert (result[~TRAINED] == 1).all()


def test_turns_are_numbered_by_runs_of_trained_tokens_within_a_segment():
    trained = row(1, 1, 0, 1, 1, 1, 0, dtype=bool)
    segments = row(1, 1, 1, 1, 2, 2, 2, dtype=jnp.int32)
    np.testing.assert_array_equal(turns(trained, segments)[trained], [1, 1, 2, 3, 3])


@pytest.mark.parametrize("kind", RATIOS)
def test_o04_length_and_padding_do_not_scale_a_ratio(kind):
    for length, padding in ((2, 0), (8, 0), (2, 30)):
        segments = jnp.array([[1] * length + [0] * padding])
        distance = jnp.where(segments > 0, 0.1, jnp.nan)
        result = ratio(kind, distance, jnp.zeros(distance.shape), segments > 0, segments)
        np.testing.assert_allclose(result[0, :length], 1.10517, rtol=1e-5)


@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf])
def test_untrained_tokens_have_no_part_in_value_or_gradient(kind, wild):
    def total(x, older):
        return ratio(kind, x, older, TRAINED, SEGMENTS).sum()

    compute = jax.value_and_grad(total)
    value, gradient = compute(DISTANCE, jnp.zeros_like(DISTANCE))
    hidden = lambda x: jnp.where(TRAINED, x, wild)
    wild_value, wild_gradient = compute(hidden(DISTANCE), hidden(jnp.zeros_like(DISTANCE)))
    assert value == wild_value
    np.testing.assert_array_equal(gradient, wild_gradient)
    assert (gradient[~TRAINED] == 0).all() and (gradient[TRAINED] > 0).all()


def test_gradients_of_the_sequence_ratio_are_shared_and_of_its_token_form_are_not():
    last = lambda kind: jax.grad(lambda x: ratio(kind, x, jnp.zeros_like(x), TRAINED, SEGMENTS)[0, 5])(DISTANCE)
    shared = np.exp(0.1) / 3
    np.testing.assert_allclose(last("sequence"), [[0, 0, shared, shared, 0, shared, 0, 0, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(last("sequence_token"), [[0, 0, 0, 0, 0, np.exp(0.1), 0, 0, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize("kind", RATIOS)
def test_value_and_gradient_stay_finite_at_any_distance(kind):
    far, behaviour = row(0.0, -200.0, -1e30), row(-200.0, 0.0, -1.0)
    everywhere, segments = jnp.ones((1, 3), bool), row(1, 2, 3, dtype=jnp.int32)
    value, gradient = jax.value_and_grad(lambda x: ratio(kind, x, behaviour, everywhere, segments).sum())(far)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    np.testing.assert_allclose(log_ratio(far, behaviour)[0, :2], [200, -200])  # reported as it is


@pytest.mark.parametrize("kind", RATIOS)
def test_no_gradient_flows_to_the_older_policy(kind):
    older = jnp.zeros_like(DISTANCE)
    assert (jax.grad(lambda x: ratio(kind, DISTANCE, x, TRAINED, SEGMENTS).sum())(older) == 0).all()


@settings(deadline=None)
@given(st.integers(0, 999), st.integers(1, 12))
def test_segment_mean_is_numpys(seed, largest):
    rng = np.random.default_rng(seed)
    shape = (2, 6)  # one, so that it compiles once
    segments = rng.integers(0, largest + 1, shape).astype(np.int32)  # in any order, up to the largest number allowed
    mask = rng.random(shape) < 0.6
    x = np.where(mask, rng.normal(size=shape), np.nan)
    result = np.asarray(masked.segment_mean(jnp.asarray(x), jnp.asarray(mask), jnp.asarray(segments)))
    for i, j in np.ndindex(*shape):
        own = mask[i] & (segments[i] == segments[i, j])
        assert result[i, j] == pytest.approx(x[i, own].mean() if mask[i, j] else 0, rel=1e-5, abs=1e-6)
