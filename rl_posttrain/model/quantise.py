"""The frozen base under adapters, stored in fewer bits. After QLoRA, https://arxiv.org/abs/2305.14314.

    w ~ scale * q, with whole numbers q, and scale = the weight of largest magnitude that shares it / the least q

The least q is -8 of 4 bits: that weight is exact, whatever its sign, and all 16 numbers are used, as in llama.cpp's
Q4_0. (With q from -7 to 7, SmolLM2-135M diverged by 0.38 nats from itself instead of 0.27.) int8: one scale for each
output, over all of its inputs. int4: one for each group of 32 inputs of an output. Stored so are the matrices that
`linear` multiplies, experts' included; embeddings, norms, biases and routers stay float32. The tree holds a scale
beside its weight, `query_scale` beside `query`, and `linear` widens a weight where it is used.

Rounding is to the nearest, and nothing is calibrated. bfloat16 is the same idea without scales.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from rl_posttrain.batch import Params
from rl_posttrain.model import lora as lora_lib
from rl_posttrain.model.linear import INPUT_AXES, widen
from rl_posttrain.model.lora import LoraConfig
from rl_posttrain.model.transformer import ModelConfig

GROUP = 32  # inputs that share a scale in int4
SMALLEST_GROUP = 8  # below it the scales outweigh the weights
LEAST = {"int8": -128, "int4": -8}


class Narrow(NamedTuple):
    """A weight in whole numbers, and its scales: of as many axes, each of length 1, of the groups, or of the weight."""

    values: Array
    scale: Array


def quantise(weight: Array, name: str, cfg: ModelConfig, base: str) -> Array | Narrow:
    """One stacked array of the model as `base` stores it, where its sharding puts it; as it is if it stays float32.

    Args:
      name: in `params["layers"]`, or of what stands outside.
      base: "float32", "bfloat16", "int8" or "int4".

    Raises:
      ValueError: int4, and the inputs do not split into groups of at least 8.
    """
    if name not in INPUT_AXES or base == "float32":
        return weight
    if base == "bfloat16":
        return weight.astype(jnp.bfloat16)
    first = 2 if cfg.num_experts and name in ("gate", "up", "down") else 1  # after the layer, and the expert
    inputs = range(first, first + INPUT_AXES[name])
    group = math.gcd(weight.shape[inputs[-1]], GROUP)
    if base == "int4" and group < SMALLEST_GROUP:
        raise ValueError(
            f"lora.base='int4' groups {name}'s inputs by {GROUP}, and {weight.shape[inputs[-1]]} is no multiple of "
            f"{SMALLEST_GROUP}: use 'int8'"
        )
    counts = [1 if axis in inputs else length for axis, length in enumerate(weight.shape)]
    if base == "int4":
        counts = [*weight.shape]
        counts[inputs[-1]] //= group
    return Narrow(*_jitted(base, tuple(counts), weight.sharding)(weight))


def quantise_tree(params: Params, cfg: ModelConfig, base: str) -> Params:
    """A model's parameters as `base` stores them, array by array."""
    narrow = lambda tree: {name: quantise(value, name, cfg, base) for name, value in tree.items() if name != "layers"}
    return beside({**narrow(params), "layers": narrow(params["layers"])})


def beside(params: Params) -> Params:
    """The tree that `transformer` takes, of one whose quantised weights are `Narrow`."""
    layers: dict[str, Any] = {}
    for name, value in params["layers"].items():
        if isinstance(value, Narrow):
            layers |= {name: value.values, f"{name}_scale": value.scale}
        else:
            layers[name] = value
    return {**params, "layers": layers}


def plain(params: Params) -> Params:
    """A float32 model without scales or adapters that computes the same: to export what was trained on a narrow base.

    Args:
      params: of a quantised base, `lora.attach`ed adapters beside it or not.
    """
    layers: dict[str, Array] = {}
    adapters: dict[str, Array] = {}
    for name, value in params["layers"].items():
        if name.endswith(("_a", "_b")):
            adapters[name] = value
        elif not name.endswith("_scale"):
            scale = params["layers"].get(f"{name}_scale")
            layers[name] = widen(value, scale, jnp.dtype(jnp.float32)) if name in INPUT_AXES else value
    base = {**params, "layers": layers}
    # What is attached was scaled then: a rank of 1 and an alpha of 1 scale it by 1.
    return lora_lib.merge(base, {"layers": adapters}, LoraConfig(rank=1, alpha=1.0)) if adapters else base


@lru_cache(maxsize=64)
def _jitted(base: str, counts: tuple[int, ...], sharding: Sharding) -> Any:
    narrow = partial(_narrow, base=base, counts=counts)
    return jax.jit(narrow, out_shardings=(sharding, _scale_sharding(sharding, counts)))


def _narrow(weight: Array, *, base: str, counts: tuple[int, ...]) -> tuple[Array, Array]:
    blocks = weight.reshape([part for n, count in zip(weight.shape, counts) for part in (count, n // count)])
    within = tuple(range(1, blocks.ndim, 2))
    low, high = blocks.min(within, keepdims=True), blocks.max(within, keepdims=True)
    extreme = jnp.where(high > -low, high, low)
    scale = jnp.where(extreme != 0, extreme / LEAST[base], 1.0)
    if base == "int4":
        scale = scale.astype(jnp.bfloat16)  # half a bit a weight; the weights are rounded to what it became
    values = jnp.round(blocks / scale.astype(jnp.float32))
    values = jnp.clip(values, LEAST[base], -LEAST[base] - 1).reshape(weight.shape)
    return values.astype(jnp.dtype(base)), scale.reshape(counts)


def _scale_sharding(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """The scales are split as their weight is, along the axes that they can be split along."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = []
    for length, names in zip_longest(shape, sharding.spec):
        split = (names,) if isinstance(names, str) else tuple(names or ())
        spec.append(names if length % math.prod(sharding.mesh.shape[name] for name in split) == 0 else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
