"""Chunked log-probabilities and entropies against float64 NumPy, in values and in every gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.model.logprobs import chunked_logprobs

B, T, D, V, PADDED = 2, 11, 6, 13, 16


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(B, T, D))
    table = rng.normal(size=(PADDED, D))
    labels = rng.integers(0, V, size=(B, T))
    temperature = rng.uniform(0.5, 1.5, size=(B, T))
    return hidden, table, labels, temperature


def reference(hidden, table, labels, temperature):
    """(logprobs, entropy) in float64 over the true vocabulary."""
    logits = np.einsum("btd,vd->btv", hidden, table[:V]) / temperature[..., None]
    highest = logits.max(-1, keepdims=True)
    log_p = logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    entropy = -(np.exp(log_p) * log_p).sum(-1)
    return np.take_along_axis(log_p, labels[..., None], -1)[..., 0], entropy


def run(hidden, table, labels, temperature, chunk=4, vocab_size=V):
    as_float = lambda x: jnp.asarray(x, jnp.float32)
    return chunked_logprobs(
        as_float(hidden),
        as_float(table),
        jnp.asarray(labels),
        as_float(temperature),
        vocab_size=vocab_size,
        chunk=chunk,
    )


def test_o12_temperature_divides_logits_before_the_softmax():
    table = np.array([[2.0], [0.0]])
    one = np.ones((1, 1, 1))
    logprobs, _ = run(one, table, np.zeros((1, 1), int), np.full((1, 1), 0.5), vocab_size=2)
    np.testing.assert_allclose(logprobs, -0.0181499, atol=1e-6)
    # Scaling after the softmax would give -0.25386, no scaling -0.12693.


def test_entropy_by_hand():
    table = np.array([[0.0], [0.0], [0.0], [0.0]])
    _, entropy = run(np.ones((1, 1, 1)), table, np.zeros((1, 1), int), np.ones((1, 1)), vocab_size=4)
    np.testing.assert_allclose(entropy, np.log(4), rtol=1e-6)
    _, entropy = run(np.ones((1, 1, 1)), table, np.zeros((1, 1), int), np.ones((1, 1)), vocab_size=3)
    np.testing.assert_allclose(entropy, np.log(3), rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 4, 11, 256])
def test_values_equal_numpy_at_any_chunk(chunk):
    arguments = inputs()
    for got, expected in zip(run(*arguments, chunk=chunk), reference(*arguments), strict=True):
        assert got.shape == (B, T) and got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, atol=5e-6)


def test_gradients_of_both_results_equal_finite_differences():
    hidden, table, labels, temperature = inputs()
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(2, B, T))  # of log-probabilities and of entropies
    total = lambda *x: sum((w * y).sum() for w, y in zip(weights, reference(x[0], x[1], labels, x[2]), strict=True))

    def loss(hidden, table, temperature):
        results = chunked_logprobs(hidden, table, jnp.asarray(labels), temperature, vocab_size=V, chunk=4)
        return sum((w * y).sum() for w, y in zip(jnp.asarray(weights), results, strict=True))

    point = [hidden, table, temperature]
    gradients = jax.grad(loss, argnums=(0, 1, 2))(*(jnp.asarray(x, jnp.float32) for x in point))
    for i, gradient in enumerate(gradients):
        expected = np.zeros_like(point[i])
        for index in np.ndindex(*point[i].shape):
            step = np.zeros_like(point[i])
            step[index] = 1e-5
            ahead, behind = ([*point[:i], point[i] + s * step, *point[i + 1 :]] for s in (1, -1))
            expected[index] = (total(*ahead) - total(*behind)) / 2e-5
        assert np.abs(gradient - expected).max() / np.abs(expected).max() < 1e-5


def test_padding_rows_of_the_table_have_no_part():
    hidden, table, labels, temperature = inputs()
    loud = table.copy()
    loud[V:] = 1e3
    for got, expected in zip(
        run(hidden, loud, labels, temperature), run(hidden, table, labels, temperature), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    gradient = jax.grad(lambda table: sum(y.sum() for y in run(hidden, table, labels, temperature)))(
        jnp.asarray(loud, jnp.float32)
    )
    assert np.isfinite(gradient).all() and not np.asarray(gradient[V:]).any()


def test_certain_predictions_stay_finite():
    hidden, table, labels, temperature = inputs()
    loss = lambda hidden: sum(y.sum() for y in run(hidden, table, labels, temperature))
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(1e4 * hidden, jnp.float32))
    assert np.isfinite(value) and np.isfinite(gradient).all()
    _, entropy = run(1e4 * hidden, table, labels, temperature)
    assert (np.asarray(entropy) >= -1e-6).all()


def test_no_array_of_all_logits_exists():
    T, V, chunk = 64, 96, 8
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)

    def loss(hidden, table, labels, temperature):
        results = chunked_logprobs(hidden, table, labels, temperature, vocab_size=V, chunk=chunk)
        return sum(y.sum() for y in results)

    arguments = shape(2, T, 16), shape(V, 16), shape(2, T, dtype=jnp.int32), shape(2, T)
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments)
    for text in program.as_text(), program.compile().as_text():
        shapes = {
            tuple(map(int, dims.replace("x", ",").strip(",").split(",")))
            for dims in re.findall(r"(?:tensor<|f32\[)((?:\d+[x,])*\d+)(?:xf32|\])", text)
        }
        assert (2, chunk, V) in shapes  # the pattern does find the logits of a chunk
        assert not any(np.prod(dims) >= 2 * T * V for dims in shapes)


def test_bfloat16_hidden_gives_float32_results_near_the_exact_ones():
    hidden, table, labels, temperature = inputs()
    results = chunked_logprobs(
        jnp.asarray(hidden, jnp.bfloat16),
        jnp.asarray(table, jnp.float32),
        jnp.asarray(labels),
        jnp.asarray(temperature, jnp.float32),
        vocab_size=V,
        chunk=4,
    )
    for got, expected in zip(results, reference(hidden, table, labels, temperature), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, atol=0.15)
    # The table is a float32 master weight: its gradient must not be rounded to bfloat16 on the way.
    gradient = jax.grad(
        lambda table: chunked_logprobs(
            jnp.asarray(hidden, jnp.bfloat16),
            table,
            jnp.asarray(labels),
            jnp.asarray(temperature, jnp.float32),
            vocab_size=V,
            chunk=4,
        )[0].sum()
    )(jnp.asarray(table, jnp.float32))
    assert gradient.dtype == jnp.float32
    assert (np.asarray(gradient) != np.asarray(gradient.astype(jnp.bfloat16), "float32")).any()
