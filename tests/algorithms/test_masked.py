import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.algorithms import masked

X = jnp.array([[1.0, 2.0, 4.0], [8.0, jnp.nan, jnp.inf]])
MASK = jnp.array([[True, False, True], [True, False, False]])


def test_reductions_see_only_what_the_mask_shows():
    assert masked.total(X, MASK) == 13.0
    assert masked.mean(X, MASK) == pytest.approx(13 / 3)
    assert masked.maximum(X, MASK) == 8.0


def test_an_empty_mask_gives_zero():
    for reduction in (masked.total, masked.mean, masked.maximum):
        assert reduction(X, jnp.zeros_like(MASK)) == 0.0


def test_sums_are_taken_in_float32():
    ones = jnp.ones((1, 1000), jnp.bfloat16)  # a bfloat16 sum stops at 256
    assert masked.total(ones, ones > 0) == 1000.0
    assert masked.mean(ones, ones > 0).dtype == jnp.float32


def test_gradients_reach_only_what_the_mask_shows():
    gradient = jax.grad(masked.mean)(jnp.nan_to_num(X), MASK)
    np.testing.assert_allclose(gradient, np.asarray(MASK) / 3, rtol=1e-6)


def test_shapes_are_checked_in_tests():
    with pytest.raises(Exception, match="mask"):
        masked.total(X, MASK[:1])


def test_segment_mean_hand_computed():
    segments = jnp.array([[2, 2, 4], [2, 2, 2]])
    result = masked.segment_mean(X, MASK, segments)
    np.testing.assert_array_equal(result, [[1.0, 0.0, 4.0], [8.0, 0.0, 0.0]])
    assert (masked.segment_mean(X, jnp.zeros_like(MASK), segments) == 0).all()
