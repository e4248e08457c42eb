"""A product with one of the model's weights, which may be stored narrow (see `quantise`) or adapted (see `lora`)."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rl_posttrain.batch import Params

# How many of a weight's axes are its input's; the rest are its output's.
INPUT_AXES = {"query": 1, "key": 1, "value": 1, "output": 2, "gate": 1, "up": 1, "down": 1}


def widen(weight: Array, scale: Array | None, dtype: jnp.dtype) -> Array:
    """A weight in `dtype`, times its scale where there is one, each entry of which counts for a block of the weight."""
    if scale is None:
        return weight.astype(dtype)
    blocks = [part for n, count in zip(weight.shape, scale.shape) for part in (count, n // count)]
    scales = scale.astype(jnp.float32).reshape([part for count in scale.shape for part in (count, 1)])
    return (weight.astype(jnp.float32).reshape(blocks) * scales).reshape(weight.shape).astype(dtype)


def multiply(product: Callable[[Array, Array], Array], x: Array, w: Params, name: str) -> Array:
    """`product(x, w[name])`, the weight in the dtype of x.

    A weight that is stored narrower is widened anew in the backward pass. Kept for it, every layer would be wide at
    once, and nothing saved.
    """
    weight, scale = w[name], w.get(f"{name}_scale")
    if scale is None and weight.dtype.itemsize >= x.dtype.itemsize:
        return product(x, weight.astype(x.dtype))
    widened = lambda x, weight, scale: product(x, widen(weight, scale, x.dtype))
    return jax.checkpoint(widened, prevent_cse=False)(x, weight, scale)  # within a scan, nothing merges the two


def linear(x: Array, w: Params, name: str, equation: str) -> Array:
    """`einsum(equation, x, w[name])`, with the low-rank adapter of that weight where there is one (see `lora`)."""
    y = multiply(lambda x, weight: jnp.einsum(equation, x, weight), x, w, name)
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
