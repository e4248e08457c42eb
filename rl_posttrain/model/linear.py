"""A product with one of the model's weights, and with its low-rank adapter where there is one (see `lora`)."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rl_posttrain.batch import Params

# How many of a weight's axes are its input's; the rest are its output's.
INPUT_AXES = {"query": 1, "key": 1, "value": 1, "output": 2, "gate": 1, "up": 1, "down": 1}


def linear(x: Array, w: Params, name: str, equation: str) -> Array:
    """`einsum(equation, x, w[name])`, with the low-rank adapter of that weight where there is one (see `lora`)."""
    y = jnp.einsum(equation, x, w[name].astype(x.dtype))
    if f"{name}_a" not in w:
        return y
    if "dropout_key" in w:
        key = jax.random.fold_in(w["dropout_key"], zlib.crc32(name.encode()))
        keep = 1 - w["dropout_rate"]
        x = jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep.astype(x.dtype), 0)
    inputs, rest = equation.split(",")
    weight, outputs = rest.split("->")
    expert = "E" if "E" in weight else ""
    contracted = "".join(axis for axis in weight if axis not in outputs)
    produced = "".join(axis for axis in weight if axis not in contracted + expert)
    narrow = "".join(axis for axis in outputs if axis not in produced) + "r"
    low = jnp.einsum(f"{inputs},{expert}{contracted}r->{narrow}", x, w[f"{name}_a"].astype(x.dtype))
    return y + jnp.einsum(f"{narrow},{expert}r{produced}->{outputs}", low, w[f"{name}_b"].astype(x.dtype))
