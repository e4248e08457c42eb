"""Log-probability of each label and entropy of each distribution, without ever holding [B, T, V] logits.

Time is cut into chunks, rows are not, so that the rows stay spread over the devices. The backward pass
computes each chunk's logits again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from rl_posttrain.model.attention import cap
from rl_posttrain.sharding.mesh import constrain, shards

# Logit of a table row that is padding: finite, so that 0 * logit is 0.
_EXCLUDED = -1e30


def chunked_logprobs(
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    temperature: Float[Array, "B T"],
    *,
    vocab_size: int,
    chunk: int,
    softcap: float = 0.0,
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """Log-probability of `labels` and entropy in nats, both of `softmax(hidden @ table.T / temperature)`.

    Products are taken in the dtype of `hidden` and accumulated in float32; everything after is float32.
    Differentiable in hidden, table and temperature, through both results.

    Args:
      temperature: above 0, one per position.
      vocab_size: rows of `table` from here on are padding and have probability 0; labels are below it.
      chunk: time steps whose logits exist at once, [B, chunk, V].
      softcap: logits become `softcap * tanh(logit / softcap)` before the temperature, unless it is 0.
    """
    T = labels.shape[1]
    chunk = min(chunk, T)
    pad = lambda x, value=0: jnp.pad(x, [(0, 0), (0, -T % chunk)] + [(0, 0)] * (x.ndim - 2), constant_values=value)
    temperature = temperature.astype(jnp.float32)
    logprobs, entropy = _logprobs(pad(hidden), table, pad(labels), pad(temperature, 1), vocab_size, chunk, softcap)
    return logprobs[:, :T], entropy[:, :T]


def _cut(x: Array, chunk: int) -> Array:
    """[B, T, ...] -> [T/chunk, B, chunk, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _join(x: Array) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _logits(hidden: Array, table: Array, temperature: Array, vocab_size: int, softcap: float) -> Array:
    """[B, chunk, V], float32, capped, at temperature; padding rows of the table at _EXCLUDED."""
    logits = cap(jnp.einsum("BTD,VD->BTV", hidden, table, preferred_element_type=jnp.float32), softcap)
    logits = constrain(logits / temperature[..., None], "batch", None, "vocab")
    if vocab_size == table.shape[0]:
        return logits
    return jnp.where(jnp.arange(table.shape[0]) < vocab_size, logits, _EXCLUDED)


def _is_label(labels: Array, vocab: int) -> Array:
    """One-hot as a comparison: unlike a gather, it needs no communication when the vocabulary is split."""
    return labels[..., None] == jnp.arange(vocab)


def _forward(hidden, table, labels, temperature, vocab_size, chunk, softcap):
    cast = table.astype(hidden.dtype)

    def one_chunk(_, inputs):
        hidden, labels, temperature = inputs
        logits = _logits(hidden, cast, temperature, vocab_size, softcap)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.where(_is_label(labels, logits.shape[-1]), logits, 0).sum(-1)
        # This sum keeps its digits where one token is nearly certain; normaliser - sum(p * logit) does not.
        log_probability = logits - normaliser[..., None]
        entropy = -(jnp.exp(log_probability) * log_probability).sum(-1)
        return None, (chosen - normaliser, entropy, normaliser)

    inputs = tuple(_cut(x, chunk) for x in (hidden, labels, temperature))
    _, (logprobs, entropy, normaliser) = lax.scan(one_chunk, None, inputs)
    saved = (hidden, table, labels, temperature, normaliser, entropy)
    return (_join(logprobs), _join(entropy)), saved


def _backward(vocab_size, chunk, softcap, saved, gradients):
    hidden, table, labels, temperature, normaliser, entropy = saved
    cast = table.astype(hidden.dtype)
    B, D = hidden.shape[0], hidden.shape[-1]
    # The table's gradient sums over rows. Each shard of the rows keeps its own sum until the last chunk:
    # a single sum would be reduced between the devices once per chunk.
    pieces = shards("batch", B)

    def one_chunk(gradient_table, inputs):
        hidden, labels, temperature, normaliser, entropy, gradient_logprob, gradient_entropy = inputs
        logits = _logits(hidden, cast, temperature, vocab_size, softcap)
        log_probability = logits - normaliser[..., None]
        probability = jnp.exp(log_probability)
        # d logprob / d logit = [label] - p;  d entropy / d logit = -p (log p + entropy).
        gradient = gradient_logprob[..., None] * (_is_label(labels, logits.shape[-1]) - probability)
        gradient -= gradient_entropy[..., None] * probability * (log_probability + entropy[..., None])
        gradient_temperature = -(gradient * logits).sum(-1) / temperature
        if softcap:  # the slope of the hyperbolic tangent; padding rows have no gradient to begin with
            gradient *= jnp.maximum(1 - jnp.square(logits * temperature[..., None] / softcap), 0)
        gradient = (gradient / temperature[..., None]).astype(hidden.dtype)
        gradient_hidden = jnp.einsum("BTV,VD->BTD", gradient, cast, preferred_element_type=jnp.float32)
        by_piece = lambda x: x.reshape(pieces, B // pieces, *x.shape[1:])
        gradient_table += jnp.einsum(
            "PBTV,PBTD->PVD", by_piece(gradient), by_piece(hidden), preferred_element_type=jnp.float32
        )
        gradient_table = constrain(gradient_table, "batch", "vocab", None)
        return gradient_table, (gradient_hidden.astype(hidden.dtype), gradient_temperature)

    inputs = tuple(_cut(x, chunk) for x in (hidden, labels, temperature))
    inputs += (normaliser, entropy, *(_cut(x, chunk) for x in gradients))
    start = constrain(jnp.zeros((pieces, table.shape[0], D), jnp.float32), "batch", "vocab", None)
    gradient_table, (gradient_hidden, gradient_temperature) = lax.scan(one_chunk, start, inputs)
    gradient_table = gradient_table.sum(0).astype(table.dtype)
    return _join(gradient_hidden), gradient_table, None, _join(gradient_temperature)


_logprobs = jax.custom_vjp(lambda *inputs: _forward(*inputs)[0], nondiff_argnums=(4, 5, 6))
_logprobs.defvjp(_forward, _backward)
