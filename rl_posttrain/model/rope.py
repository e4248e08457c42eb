"""Rotary position embedding, in float32 whatever the compute dtype: bfloat16 rounds position 257 to 256."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int


def frequencies(head_dim: int, theta: float) -> Float32[Array, " half"]:
    """Angle per position of each rotated pair, in radians: `theta ** (-2 i / head_dim)`.

    Su et al. 2021, https://arxiv.org/abs/2104.09864.
    """
    return theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], inverse_frequencies: Float32[Array, " half"]
) -> Float[Array, "B T N H"]:
    """Rotates each pair (x[i], x[i + H/2]) by its absolute position times the pair's frequency."""
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies  # [B, T, 1, H/2]
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)
