"""Key/value caches for decoding: a prefix that all samples of a group share, and each sample's own suffix.

Per layer, heads before time, so that the batch axes of every attention product lead. Axes beside the package's:
R prompts, W samples of a prompt (width of the group), M = R * W samples in order of their prompts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from rl_posttrain.batch import Params
from rl_posttrain.model.attention import cap
from rl_posttrain.model.transformer import (
    ModelConfig,
    Span,
    attend,
    embed,
    finish_block,
    project_qkv,
    score_scale,
    spans,
)
from rl_posttrain.sharding.mesh import constrain

NEGATIVE = -1e30  # a finite "minus infinity": an empty part has this log-sum-exp and weight exactly 0


@struct.dataclass
class PrefixCache:
    """Keys and values of `prompt[:-1]`, computed once per group."""

    keys: tuple[jax.Array, ...]  # one [R, K, S, H] per layer
    values: tuple[jax.Array, ...]
    lengths: jax.Array  # int32 [R]: true number of prefix tokens, <= S


@struct.dataclass
class SuffixCache:
    """Keys and values of what each sample has fed in so far: `prompt[-1]` and its own completion tokens."""

    # One [M, K, C, H] per layer. A flat row axis: with separate R and W, one of them 1, XLA copied every cache.
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def prefill(params: Params, cfg: ModelConfig, tokens: Int[Array, "R S"], lengths: Int[Array, " R"]) -> PrefixCache:
    """Runs the model over padded prefixes and keeps every layer's keys and values."""
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(slots, tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    parents = jnp.full_like(segments, -1)

    def layer(x, inputs):
        w, span = inputs
        q, k, v = project_qkv(x, w, cfg, positions, span)
        attended = attend(q, k, v, positions, segments, parents, cfg, span)
        return constrain(finish_block(x, attended, w, cfg), "batch", None, None), (
            jnp.swapaxes(k, 1, 2),
            jnp.swapaxes(v, 1, 2),
        )

    _, (keys, values) = lax.scan(layer, embed(params, cfg, tokens), (params["layers"], spans(cfg)))
    per_layer = lambda stacked: tuple(stacked[i] for i in range(cfg.num_layers))
    return PrefixCache(per_layer(keys), per_layer(values), lengths)


def empty_suffix(cfg: ModelConfig, rows: int, length: int) -> SuffixCache:
    """A zeroed suffix cache of `length` slots for M = `rows` samples."""
    shape = (rows, cfg.num_kv_heads, length, cfg.head_dim)
    one = lambda: constrain(jnp.zeros(shape, cfg.compute_dtype), "batch", "kv_heads", None, None)
    zeros = lambda: tuple(one() for _ in range(cfg.num_layers))
    return SuffixCache(zeros(), zeros())


def unstack_layers(params: Params, cfg: ModelConfig) -> list[Params]:
    """One weight tree per layer. Decoding unrolls the layers: a scan would copy every cache once a token."""
    return [jax.tree.map(lambda stacked, i=i: stacked[i], params["layers"]) for i in range(cfg.num_layers)]


def decode_step(
    layers: list[Params],
    cfg: ModelConfig,
    x: Float[Array, "M 1 D"],
    prefix: PrefixCache,
    suffix: SuffixCache,
    slot: jax.Array,
) -> tuple[Float[Array, "M 1 D"], SuffixCache]:
    """Advances every sample by one token, which it writes into `slot` of the suffix cache (in place when donated).

    Args:
      layers: `unstack_layers(params, cfg)`.
      x: embedded current tokens.
      slot: int32 scalar, the number of tokens already in the suffix.

    Returns:
      The residual stream before the final norm, and the advanced cache.
    """
    samples, kv_heads, length, head = suffix.keys[0].shape
    width = samples // prefix.lengths.shape[0]
    prefix_lengths = jnp.repeat(prefix.lengths, width)  # [M]
    positions = (prefix_lengths + slot)[:, None]
    prefix_slots = jnp.arange(prefix.keys[0].shape[2])
    suffix_positions = prefix_lengths[:, None] + jnp.arange(length)
    turns, windows = spans(cfg)
    new_keys, new_values = list(suffix.keys), list(suffix.values)
    for i, w in enumerate(layers):
        q, k, v = project_qkv(x, w, cfg, positions, Span(turns[i], windows[i]))
        # All samples of a prompt are equally far, so that the prefix has one mask per prompt.
        nearest = prefix.lengths + slot - windows[i]  # [R]: keys from the position after it on are visible
        prefix_mask = (prefix_slots < prefix.lengths[:, None]) & (prefix_slots > nearest[:, None])  # [R, S]
        suffix_mask = (suffix_positions <= positions) & (suffix_positions > positions - windows[i])  # [M, C]
        entry = lambda y: y.reshape(samples, kv_heads, 1, head).astype(suffix.keys[0].dtype)
        new_keys[i] = lax.dynamic_update_slice(new_keys[i], entry(k), (0, 0, slot, 0))
        new_values[i] = lax.dynamic_update_slice(new_values[i], entry(v), (0, 0, slot, 0))
        q = q.reshape(samples, kv_heads, -1, head)
        shared = _attend_prefix(q, prefix.keys[i], prefix.values[i], prefix_mask, cfg)
        own = _attend_suffix(q, new_keys[i], new_values[i], suffix_mask, cfg)
        attended = merge(*shared, *own).reshape(samples, 1, cfg.num_heads, head).astype(x.dtype)
        x = finish_block(x, attended, w, cfg)
    return x, SuffixCache(tuple(new_keys), tuple(new_values))


def merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> jax.Array:
    """Combines attention over two disjoint key sets from their outputs [..., H] and log-sum-exps [...].

    An empty part (log-sum-exp at or below NEGATIVE / 2) has weight exactly 0.
    """
    highest = jnp.maximum(jnp.maximum(lse_a, lse_b), NEGATIVE / 2)
    a, b = jnp.exp(lse_a - highest), jnp.exp(lse_b - highest)
    total = jnp.maximum(a + b, 1e-30)
    return (out_a * (a / total)[..., None]) + out_b * (b / total)[..., None]


def _attend_prefix(
    q: Float[Array, "M K G H"],
    keys: Float[Array, "R K S H"],
    values: Float[Array, "R K S H"],
    mask: Bool[Array, "R S"],
    cfg: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    samples, kv_heads, queries, head = q.shape
    rows = keys.shape[0]
    # One product per prompt and kv head: the queries of all its samples against the one copy of its keys.
    grouped = jnp.moveaxis(q.reshape(rows, -1, kv_heads, queries, head), 1, 2).reshape(rows, kv_heads, -1, head)
    scores = jnp.einsum("RKQH,RKSH->RKQS", grouped, keys, preferred_element_type=jnp.float32)
    weights, lse = _softmax_parts(cap(scores * score_scale(cfg), cfg.attention_softcap), mask[:, None, None, :])
    out = jnp.einsum("RKQS,RKSH->RKQH", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)

    def by_sample(y: jax.Array) -> jax.Array:
        y = jnp.moveaxis(y.reshape(rows, kv_heads, -1, queries, *y.shape[3:]), 2, 1)
        return y.reshape(samples, kv_heads, queries, *y.shape[4:])

    return by_sample(out), by_sample(lse)


def _attend_suffix(
    q: Float[Array, "M K G H"],
    keys: Float[Array, "M K C H"],
    values: Float[Array, "M K C H"],
    mask: Bool[Array, "M C"],
    cfg: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    scores = jnp.einsum("MKGH,MKCH->MKGC", q, keys, preferred_element_type=jnp.float32)
    weights, lse = _softmax_parts(cap(scores * score_scale(cfg), cfg.attention_softcap), mask[:, None, None, :])
    out = jnp.einsum("MKGC,MKCH->MKGH", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return out, lse


def _softmax_parts(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalised weights (0 where masked, and everywhere for an empty part) and the log-sum-exp."""
    scores = jnp.where(mask, scores, NEGATIVE)
    highest = jnp.maximum(scores.max(-1, keepdims=True), NEGATIVE / 2)
    weights = jnp.where(mask, jnp.exp(scores - highest), 0.0)
    total = weights.sum(-1, keepdims=True)
    lse = jnp.where(total > 0, highest + jnp.log(jnp.maximum(total, 1e-30)), NEGATIVE)[..., 0]
    return weights / jnp.maximum(total, 1e-30), lse
