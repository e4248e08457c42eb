"""Every masked reduction. What the mask hides may be anything, NaN included, and an empty mask gives 0."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """`x` where `mask`, else 0, in float32. What is hidden gets a gradient of exactly 0, whatever follows."""
    return jnp.where(mask, x.astype(jnp.float32), 0.0)


def total(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Sum of `x` where `mask`, in float32."""
    return jnp.sum(visible(x, mask))


def mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Mean of `x` where `mask`, in float32; 0 when the mask is empty."""
    return total(x, mask) / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def maximum(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Largest `x` where `mask`, for x >= 0, in float32; 0 when the mask is empty."""
    return jnp.max(visible(x, mask), initial=0.0)


def segment_total(
    x: Float[Array, "B T"], mask: Bool[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B numbers"]:
    """Sum of `x` where `mask`, by segment of each row, in float32: `[i, n]` is that of the segment numbered n.

    A segment is what has the same number in `segments` within a row, contiguous or not; numbers are in [0, 2 T].
    Packed rows keep to that: a row of T positions has at most T samples, each with one prompt.
    """
    numbers = 2 * x.shape[1] + 1
    return jax.vmap(lambda values, ids: jax.ops.segment_sum(values, ids, numbers))(visible(x, mask), segments)


def segment_mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """At each position that `mask` shows, the mean of `x` over those of its segment (see `segment_total`), in float32;
    elsewhere 0."""
    counts = segment_total(mask.astype(jnp.float32), mask, segments)
    means = segment_total(x, mask, segments) / jnp.maximum(counts, 1.0)
    return visible(jnp.take_along_axis(means, segments, axis=1), mask)
