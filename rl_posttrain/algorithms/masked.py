"""Every masked reduction. What the mask hides may be anything, NaN included, and an empty mask gives 0."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def total(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Sum of `x` where `mask`, in float32."""
    return jnp.sum(jnp.where(mask, x.astype(jnp.float32), 0.0))


def mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Mean of `x` where `mask`, in float32; 0 when the mask is empty."""
    return total(x, mask) / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def maximum(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Largest `x` where `mask`, for x >= 0, in float32; 0 when the mask is empty."""
    return jnp.max(jnp.where(mask, x.astype(jnp.float32), 0.0), initial=0.0)
