"""Rotary positions against complex multiplication, and far positions in bfloat16."""

import jax.numpy as jnp
import numpy as np

from rl_posttrain.model import rope


def test_frequencies_are_powers_of_theta():
    np.testing.assert_allclose(rope.frequencies(8, 10_000.0), [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_rotation_equals_complex_multiplication():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4, 8)).astype("float32")
    positions = np.array([[0, 1, 2], [7, 1000, 30_000]])
    angle = positions[:, :, None, None] * 500.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    got = rope.rotate(jnp.asarray(x), jnp.asarray(positions), rope.frequencies(8, 500.0))
    # float32 resolves an angle of 30,000 radians to 0.002.
    np.testing.assert_allclose(got[0], np.concatenate([turned.real, turned.imag], -1)[0], atol=1e-6)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=2e-2)


def test_scores_depend_on_distance_alone():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))
    frequencies = rope.frequencies(16, 10_000.0)

    def score(position_q, position_k):
        turn = lambda x, p: rope.rotate(x, jnp.array([[p]]), frequencies)
        return float((turn(q, position_q) * turn(k, position_k)).sum())

    assert abs(score(5, 2) - score(105, 102)) < 1e-4
    assert abs(score(5, 2) - score(5, 3)) > 1e-2


def test_bfloat16_inputs_keep_exact_positions():
    # bfloat16 cannot tell positions 256 and 257 apart; the angle must not pass through it.
    x = jnp.ones((1, 2, 1, 2), jnp.bfloat16)
    got = rope.rotate(x, jnp.array([[256, 257]]), rope.frequencies(2, 10_000.0))
    assert got.dtype == jnp.bfloat16
    expected = [[np.cos(p) - np.sin(p), np.cos(p) + np.sin(p)] for p in (256, 257)]
    np.testing.assert_allclose(np.asarray(got[0, :, 0], "float32"), expected, atol=0.01)
