"""Rotary position embedding, in float32 whatever the compute dtype: bfloat16 rounds position 257 to 256.

Su et al. 2021, https://arxiv.org/abs/2104.09864. Long contexts scale the frequencies in one of a few ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies are scaled beyond the length of pretraining, as checkpoints' config.json say it.

    "linear": every frequency divided by `factor` (https://arxiv.org/abs/2306.15595). "dynamic": the base grows
    with the length of the run (NTK-aware). "llama3": only slow frequencies are divided, with a blend between
    (Llama 3.1). "yarn": a blend by rotations within the original length, and sharper attention
    (https://arxiv.org/abs/2309.00071). "longrope": one divisor per frequency (https://arxiv.org/abs/2402.13753).

    Raises:
      ValueError: a number that is out of range, or missing for this kind.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = 1.0
    original_length: int = 0  # of pretraining, in tokens
    length: int = 0  # "dynamic", "longrope": the longest sequence of this run, fixed so that all of it agrees
    low_frequency_factor: float = 1.0  # "llama3"
    high_frequency_factor: float = 4.0  # "llama3"
    beta_fast: float = 32.0  # "yarn": rotations above which a frequency stays
    beta_slow: float = 1.0  # "yarn": rotations below which it is divided
    truncate: bool = True  # "yarn": the blend starts and ends at whole pairs
    attention_factor: float = 0.0  # of cosine and sine; 0: the kind's own
    divisors: tuple[float, ...] = ()  # "longrope": one per frequency

    def __post_init__(self):
        if not self.factor >= 1:
            raise ValueError(f"rope_scaling.factor={self.factor}: use a number of at least 1")
        if self.kind != "linear" and self.original_length < 1:
            raise ValueError(f"rope_scaling.original_length={self.original_length}: {self.kind!r} needs it, in tokens")
        if self.kind == "llama3" and not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"rope_scaling: low_frequency_factor={self.low_frequency_factor} must lie between 0 and "
                f"high_frequency_factor={self.high_frequency_factor}"
            )


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Float32[np.ndarray, " half"]:
    """Angle per position of each rotated pair, in radians: `theta ** (-2 i / head_dim)`, scaled.

    Raises:
      ValueError: "longrope" with another number of divisors than `head_dim / 2`.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = theta**-exponents
    if scaling is None:
        return plain.astype(np.float32)
    factor, original = scaling.factor, scaling.original_length
    if scaling.kind == "linear":
        scaled = plain / factor
    elif scaling.kind == "dynamic":
        length = max(scaling.length, original)
        grown = theta * (factor * length / original - (factor - 1)) ** (head_dim / (head_dim - 2))
        scaled = grown**-exponents
    elif scaling.kind == "llama3":
        wavelength = 2 * math.pi / plain
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        blend = np.clip((original / wavelength - low) / (high - low), 0, 1)
        scaled = (1 - blend) * plain / factor + blend * plain
    elif scaling.kind == "yarn":
        ramp = _yarn_ramp(head_dim, theta, scaling)
        scaled = plain / factor * ramp + plain * (1 - ramp)
    else:
        if len(scaling.divisors) != head_dim // 2:
            raise ValueError(
                f"rope_scaling.divisors holds {len(scaling.divisors)} numbers; a head of width {head_dim} has "
                f"{head_dim // 2} pairs"
            )
        scaled = plain / np.asarray(scaling.divisors)
    return scaled.astype(np.float32)


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """0 for the pairs that keep their frequency, 1 for those that are divided."""

    def pair(rotations: float) -> float:
        return head_dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cosine and sine are multiplied by."""
    if scaling is None or scaling.kind in ("linear", "dynamic", "llama3"):
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_length))


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    inverse_frequencies: Float32[Array | np.ndarray, " half"],
    factor: float = 1.0,
) -> Float[Array, "B T N H"]:
    """Rotates each pair (x[i], x[i + H/2]) by its absolute position times the pair's frequency, times `factor`."""
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies  # [B, T, 1, H/2]
    cosine, sine = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)
