import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.algorithms.corrections import check_bounds, correction_weights

row = lambda *values, dtype=jnp.float32: jnp.array([values], dtype)
WEIGHTS = [0.25, 1.5, 6.0, 1.0, 8.0, 0.9]  # policy / behaviour
SEGMENTS = row(1, 1, 2, 2, 3, 3, dtype=jnp.int32)  # geometric means 0.61, 2.4, and 8 of the one trained token
TRAINED = row(1, 1, 1, 1, 1, 0, dtype=bool)
BEHAVIOUR = row(-1.0, -2.0, -3.0, -1.0, -4.0, -0.5)
POLICY = BEHAVIOUR + jnp.log(row(*WEIGHTS))
BOUNDS = {"none": {}, "importance": {}, "truncated": {"high": 2.0}, "masked": {"low": 0.5, "high": 2.0}}
BOUNDS["sequence_mask"] = {"low": 0.7, "high": 3.0}


@pytest.mark.parametrize(
    ("kind", "expected", "low", "high"),
    [
        ("none", [1, 1, 1, 1, 1], None, None),
        ("importance", [0.25, 1.5, 6, 1, 8], None, None),
        ("truncated", [0.25, 1.5, 2, 1, 2], None, [0, 0, 1, 0, 1]),
        ("masked", [0, 1.5, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 1, 0, 1]),
        ("sequence_mask", [0, 0, 6, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1]),
    ],
)
def test_hand_computed(kind, expected, low, high):
    weights, hits = correction_weights(kind, POLICY, BEHAVIOUR, TRAINED, SEGMENTS, **BOUNDS[kind])
    np.testing.assert_allclose(weights[TRAINED], expected, rtol=1e-5)
    assert hits.keys() == {name for name, value in (("low", low), ("high", high)) if value is not None}
    for name, value in (("low", low), ("high", high)):
        if value is not None:
            np.testing.assert_array_equal(hits[name][TRAINED], np.array(value, bool))


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_policy_that_agrees_with_the_sampler_is_not_corrected(kind):
    weights, hits = correction_weights(kind, BEHAVIOUR, BEHAVIOUR, TRAINED, SEGMENTS, **BOUNDS[kind])
    assert (weights == 1).all() and not any(hit.any() for hit in hits.values())


@pytest.mark.parametrize("kind", BOUNDS)
def test_no_gradient_flows_and_untrained_tokens_have_no_part(kind):
    call = lambda policy, behaviour: correction_weights(kind, policy, behaviour, TRAINED, SEGMENTS, **BOUNDS[kind])[0]
    gradients = jax.grad(lambda *x: call(*x).sum(), (0, 1))(POLICY, BEHAVIOUR)
    assert all((g == 0).all() for g in gradients)
    wild = jnp.where(TRAINED, POLICY, jnp.nan)
    np.testing.assert_array_equal(call(wild, BEHAVIOUR), call(jnp.where(TRAINED, POLICY, 0), BEHAVIOUR * TRAINED))


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_weights_stay_finite_at_any_distance(kind, distance):
    weights, _ = correction_weights(kind, BEHAVIOUR + distance, BEHAVIOUR, TRAINED, SEGMENTS, **BOUNDS[kind])
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(
    ("kind", "low", "high", "message"),
    [
        ("truncated", None, None, "correction_high=None"),
        ("truncated", None, 0.9, "above 1"),
        ("truncated", 0.5, 2.0, "correction_low=0.5 has no effect"),
        ("masked", None, 2.0, "correction_low=None"),
        ("masked", 1.5, 2.0, "in \\(0, 1\\)"),
        ("sequence_mask", 0.5, float("nan"), "correction_high=nan"),
        ("importance", None, 2.0, "no effect"),
        ("none", 0.5, None, "no effect"),
    ],
)
def test_bounds_that_are_missing_or_useless_are_refused(kind, low, high, message):
    with pytest.raises(ValueError, match=message):
        check_bounds(kind, low, high)
