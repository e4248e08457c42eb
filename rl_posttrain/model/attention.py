"""Attention over packed trees: which key a query sees, and two ways to compute the same result.

Key k is visible to query q when `position_k <= position_q`, both segments are above 0, and `segment_k` is
`segment_q` or `parent_q` (see `rl_posttrain.batch`). With a window, `position_q - position_k < window` too.
A query that sees nothing, such as padding, gets exactly 0, in values and in gradients.

`dense` is the reference and holds a [B, N, T, T] array. `blockwise` is memory-linear in T.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Stands for minus infinity: finite, so that a row without any visible key gives 0 and not NaN.
_HIDDEN = -1e30
_FAR = jnp.iinfo(jnp.int32).max


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    parents: Int[Array, "B T"],
    *,
    window: Int[Array, ""] | int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    impl: Literal["dense", "blockwise"] = "dense",
    block: int = 512,
) -> Float[Array, "B T N H"]:
    """Softmax attention with grouped heads; scores and softmax in float32.

    Args:
      window: only keys fewer than this many positions back are visible; 0 for all (a traced one is above 0).
      scale: of the products; by default `H ** -0.5`.
      softcap: scores become `softcap * tanh(score / softcap)`, unless it is 0 (Gemma 2).
      impl: "dense" or "blockwise"; both give the same values and gradients.
      block: queries and keys per block of "blockwise"; T need not be a multiple of it.

    Raises:
      ValueError: heads that kv heads do not divide, an unknown `impl`, or a block below 1.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} heads cannot share {k.shape[2]} kv heads: use a multiple of them")
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    if impl == "dense":
        return _dense(q, k, v, visible(positions, segments, parents, window), factor, softcap)
    if impl != "blockwise":
        raise ValueError(f"attention impl={impl!r} is unknown: use 'dense' or 'blockwise'")
    if block < 1:
        raise ValueError(f"attention block={block}: use at least 1")
    T = q.shape[1]
    block = min(block, T)
    pad = lambda x, value=0: jnp.pad(x, [(0, 0), (0, -T % block)] + [(0, 0)] * (x.ndim - 2), constant_values=value)
    padded = (pad(q), pad(k), pad(v), pad(positions), pad(segments), pad(parents, -1))
    limit = jnp.asarray(window, jnp.int32) if _limits(window) else None
    return _blockwise(*padded, limit, factor, softcap, block)[:, :T]


def visible(
    positions: Int[Array, "B T"], segments: Int[Array, "B T"], parents: Int[Array, "B T"], window: Any = 0
) -> Bool[Array, "B T T"]:
    """The mask [B, query, key]."""
    return _mask((positions, segments, parents), (positions, segments), window)


def _mask(query: Any, key: Any, window: Any) -> Array:
    """[B, c, c] from (positions, segments, parents) of the queries and (positions, segments) of the keys."""
    position_q, segment_q, parent_q = (x[:, :, None] for x in query)
    position_k, segment_k = (x[:, None, :] for x in key)
    seen = (segment_k == segment_q) | (segment_k == parent_q)
    seen &= (segment_q > 0) & (segment_k > 0) & (position_k <= position_q)
    return seen & (position_q - position_k < window) if _limits(window) else seen


def _limits(window: Any) -> bool:
    """Whether there is a window. A traced one limits; to be without effect, it has to be wide."""
    return not (window is None or isinstance(window, int) and window == 0)


def cap(scores: Array, softcap: float) -> Array:
    """`softcap * tanh(scores / softcap)`, or the scores themselves where it is 0."""
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


def _dense(q: Array, k: Array, v: Array, mask: Array, scale: float, softcap: float) -> Array:
    B, T, N, H = q.shape
    grouped = q.reshape(B, T, k.shape[2], -1, H)
    scores = cap(jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32) * scale, softcap)
    mask = mask[:, None, None]
    # The second where empties rows without visible keys, whose softmax over equal scores is uniform.
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, _HIDDEN), axis=-1), 0)
    attended = jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return attended.reshape(B, T, N, H).astype(q.dtype)


# Blockwise: FlashAttention's online softmax (Dao et al. 2022, https://arxiv.org/abs/2205.14135). Inside,
# arrays are head-major, [B, K, G, T, H] for queries and [B, K, T, H] for keys, cut into blocks of time that
# stand in front: [n, B, K, G, c, H].


def _cut(x: Array, block: int, axis: int) -> Array:
    """Cuts `axis` into blocks and moves the block index to the front."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x: Array, axis: int) -> Array:
    """Undoes `_cut`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _cut_queries(x: Array, kv_heads: int, block: int) -> Array:
    """[B, T, N, ...] -> [n, B, K, G, c, ...]."""
    B, T, N = x.shape[:3]
    grouped = x.reshape(B, T, kv_heads, N // kv_heads, *x.shape[3:])
    return _cut(jnp.moveaxis(grouped, 1, 3), block, axis=3)


def _join_queries(x: Array) -> Array:
    """[n, B, K, G, c, ...] -> [B, T, N, ...]."""
    x = jnp.moveaxis(_join(x, axis=3), 3, 1)  # [B, T, K, G, ...]
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _cut_keys(x: Array, block: int) -> Array:
    """[B, T, K, H] -> [n, B, K, c, H]."""
    return _cut(jnp.moveaxis(x, 1, 2), block, axis=2)


def _join_keys(x: Array) -> Array:
    return jnp.moveaxis(_join(x, axis=2), 2, 1)


def live_blocks(
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    parents: Int[Array, "B T"],
    window: Any,
    block: int,
) -> Bool[Array, "n n"]:
    """[query block, key block]: may any query of the one see any key of the other, in any row?

    Decided from the smallest and largest position, segment and parent of each block. A live pair may turn
    out to be empty (intervals overlap although no ids are equal); a dead pair never hides a visible key.
    """
    real = segments > 0

    def bounds(x: Array, counted: Array) -> tuple[Array, Array]:  # each [B, n]; an empty set gives low > high
        low = _cut(jnp.where(counted, x, _FAR), block, axis=1).min(-1)
        high = _cut(jnp.where(counted, x, -_FAR), block, axis=1).max(-1)
        return low, high

    def overlap(query: tuple[Array, Array], key: tuple[Array, Array]) -> Array:  # [n, n, B]
        return (query[0][:, None] <= key[1][None]) & (query[1][:, None] >= key[0][None])

    segment, position = bounds(segments, real), bounds(positions, real)
    live = overlap(segment, segment) | overlap(bounds(parents, real & (parents > 0)), segment)
    live &= position[1][:, None] >= position[0][None]
    if _limits(window):
        # Subtracting the window keeps clear of the overflow that comparing the sentinels' difference has.
        live &= position[0][:, None] - window < position[1][None]
    return live.any(-1)


def _blockwise_forward(q, k, v, positions, segments, parents, window, scale, softcap, block):
    # Under the gradient of a scan over layers, masks depend on nothing but positions, segments and parents,
    # which no layer changes; JAX would compute them once, outside the loop, and store every block's mask:
    # O(T^2) memory. The barrier makes them depend on q, and so be recomputed.
    q, k, v, positions, segments, parents = lax.optimization_barrier((q, k, v, positions, segments, parents))
    live = live_blocks(positions, segments, parents, window, block)
    queries, keys = _cut_inputs(q, k, v, positions, segments, parents, block)

    def query_block(inputs):
        (q_block, *query), live_row = inputs
        empty = jnp.zeros(q_block.shape, jnp.float32)  # sum of weights times values [B, K, G, c, H]
        start = (empty, jnp.full(empty.shape[:-1], _HIDDEN, jnp.float32), empty[..., 0])

        def key_block(carry, inputs):
            (k_block, v_block, *key), is_live = inputs

            def run(carry):
                total, highest, normaliser = carry
                scores = jnp.where(_expand(query, key, window), _scores(q_block, k_block, scale, softcap), _HIDDEN)
                higher = jnp.maximum(highest, scores.max(-1))
                # Where nothing was visible yet, `higher` is _HIDDEN; half of it keeps hidden weights at 0.
                weights = jnp.exp(scores - jnp.maximum(higher, _HIDDEN / 2)[..., None])
                shrink = jnp.exp(highest - higher)
                values = jnp.einsum(
                    "BKGTS,BKSH->BKGTH",
                    weights.astype(v_block.dtype),
                    v_block,
                    preferred_element_type=jnp.float32,
                )
                return total * shrink[..., None] + values, higher, normaliser * shrink + weights.sum(-1)

            return lax.cond(is_live, run, lambda carry: carry, carry), None

        (total, highest, normaliser), _ = lax.scan(key_block, start, (keys, live_row))
        some = normaliser > 0
        safe = jnp.where(some, normaliser, 1)
        attended = jnp.where(some[..., None], total / safe[..., None], 0).astype(q.dtype)
        return attended, jnp.where(some, highest + jnp.log(safe), 0)

    attended, log_normaliser = lax.map(query_block, (queries, live))
    attended = _join_queries(attended)
    return attended, (q, k, v, positions, segments, parents, window, attended, log_normaliser)


def _blockwise_backward(scale, softcap, block, saved, gradient):
    q, k, v, positions, segments, parents, window, attended, log_normaliser = saved
    live = live_blocks(positions, segments, parents, window, block)
    queries, keys = _cut_inputs(q, k, v, positions, segments, parents, block)
    # The softmax's own term: sum over keys of weight times its gradient, which is <attended, gradient>.
    centre = (attended.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)
    outer = (
        _cut_queries(gradient.astype(q.dtype), k.shape[2], block),
        _cut_queries(centre, k.shape[2], block),
        log_normaliser,
    )

    def query_block(gradient_kv, inputs):
        (q_block, *query), (gradient_block, centre_block, normaliser_block), live_row = inputs

        def key_block(gradient_q, inputs):
            (k_block, v_block, *key), gradient_kv, is_live = inputs

            def run(gradient_q, gradient_k, gradient_v):
                scores = _scores(q_block, k_block, scale, softcap)
                hidden = jnp.where(_expand(query, key, window), scores, _HIDDEN)
                weights = jnp.exp(hidden - normaliser_block[..., None])  # 0 where hidden
                product = partial(jnp.einsum, preferred_element_type=jnp.float32)
                gradient_weights = product("BKGTH,BKSH->BKGTS", gradient_block, v_block)
                gradient_scores = weights * (gradient_weights - centre_block[..., None]) * scale
                if softcap:  # the slope of the hyperbolic tangent
                    gradient_scores *= 1 - jnp.square(scores / softcap)
                gradient_scores = gradient_scores.astype(q.dtype)
                return (
                    gradient_q + product("BKGTS,BKSH->BKGTH", gradient_scores, k_block),
                    gradient_k + product("BKGTS,BKGTH->BKSH", gradient_scores, q_block),
                    gradient_v + product("BKGTS,BKGTH->BKSH", weights.astype(q.dtype), gradient_block),
                )

            gradient_q, *gradient_kv = lax.cond(is_live, run, lambda *carry: carry, gradient_q, *gradient_kv)
            return gradient_q, tuple(gradient_kv)

        start = jnp.zeros(q_block.shape, jnp.float32)
        gradient_q, gradient_kv = lax.scan(key_block, start, (keys, gradient_kv, live_row))
        return gradient_kv, gradient_q

    nothing = jnp.zeros(keys[0].shape, jnp.float32)
    (gradient_k, gradient_v), gradient_q = lax.scan(query_block, (nothing, nothing), (queries, outer, live))
    return (
        _join_queries(gradient_q).astype(q.dtype),
        _join_keys(gradient_k).astype(k.dtype),
        _join_keys(gradient_v).astype(v.dtype),
        None,
        None,
        None,
        None,
    )


_blockwise = jax.custom_vjp(lambda *inputs: _blockwise_forward(*inputs)[0], nondiff_argnums=(7, 8, 9))
_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _cut_inputs(q, k, v, positions, segments, parents, block):
    """Blocks of (q, positions, segments, parents) and of (k, v, positions, segments)."""
    positions, segments, parents = (_cut(x, block, axis=1) for x in (positions, segments, parents))
    queries = (_cut_queries(q, k.shape[2], block), positions, segments, parents)
    return queries, (_cut_keys(k, block), _cut_keys(v, block), positions, segments)


def _scores(q_block: Array, k_block: Array, scale: float, softcap: float) -> Array:
    """Scaled and capped scores [B, K, G, c, c], float32, hidden pairs included."""
    return cap(jnp.einsum("BKGTH,BKSH->BKGTS", q_block, k_block, preferred_element_type=jnp.float32) * scale, softcap)


def _expand(query: Any, key: Any, window: Any) -> Array:
    """The mask [B, 1, 1, c, c] for scores."""
    return _mask(query, key, window)[:, None, None]
