"""Low-rank adapters: a few parameters are trained beside a frozen model. Hu et al. 2021, https://arxiv.org/abs/2106.09685.

    y = x W + scale * (x A) B, with A [in, r] and B [r, out]; B is 0 at first, so that the model is the base.

Adapters are declared from the model's own table. `attach` puts them beside the weights for `transformer`, which
uses what it finds; `merge` adds them into the weights. Both give the same function.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rl_posttrain.batch import Params
from rl_posttrain.model.linear import INPUT_AXES
from rl_posttrain.model.transformer import ModelConfig, Parameter, declare, init_tree


@dataclass(frozen=True)
class LoraConfig:
    """Which weights get adapters, and how large (config section `lora`).

    Raises:
      ValueError: a number out of range, a pattern that no weight matches, or an adapter without a rank.
    """

    rank: int = 0  # 0: no adapters, the whole model is trained
    alpha: float = 16.0  # the scale is alpha / rank
    rslora: bool = False  # the scale is alpha / sqrt(rank), https://arxiv.org/abs/2312.03732
    dropout: float = 0.0  # of the adapters' inputs, in training alone
    targets: tuple[str, ...] = ("*",)  # patterns of names: query, key, value, output, gate, up, down
    base: Literal["float32", "bfloat16", "int8", "int4"] = "float32"  # how the frozen matrices are stored
    adapter: str | None = None  # a directory in PEFT's layout, whose adapters the run starts from

    def __post_init__(self):
        if self.rank < 0 or not self.alpha > 0 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"rank={self.rank} must be at least 0, alpha={self.alpha} above 0, dropout={self.dropout} in [0, 1)"
            )
        if self.adapter is not None and not self.rank:
            raise ValueError(f"adapter={self.adapter!r} has no effect with rank=0: set the rank of that adapter")
        for pattern in self.targets:
            if not fnmatch.filter(INPUT_AXES, pattern):
                raise ValueError(f"targets: {pattern!r} matches none of {', '.join(INPUT_AXES)}")
        if self.base != "float32" and not self.rank:
            raise ValueError(f"base={self.base!r} has no effect with rank=0, which trains every weight: set lora.rank")

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def declare_adapters(cfg: ModelConfig, lora: LoraConfig) -> dict[str, Any]:
    """The adapters' parameters: `{"layers": {"query_a": ..., "query_b": ..., ...}}`, in the structure of the arrays."""
    layers: dict[str, Parameter] = {}
    for name, weight in declare(cfg)["layers"].items():
        if name not in INPUT_AXES or not any(fnmatch.fnmatch(name, pattern) for pattern in lora.targets):
            continue
        first = 2 if cfg.num_experts and name in ("gate", "up", "down") else 1  # after the layer, and the expert
        middle = first + INPUT_AXES[name]
        fan_in = 1
        for length in weight.shape[first:middle]:
            fan_in *= length
        down = Parameter(
            (*weight.shape[:middle], lora.rank), (*weight.axes[:middle], None), "normal", (3 * fan_in) ** -0.5
        )
        up = Parameter(
            (*weight.shape[:first], lora.rank, *weight.shape[middle:]),
            (*weight.axes[:first], None, *weight.axes[middle:]),
            "zeros",
        )
        layers |= {f"{name}_a": down, f"{name}_b": up}
    return {"layers": layers}


def init_adapters(key: Array, cfg: ModelConfig, lora: LoraConfig) -> Params:
    """Initial adapters, float32: the model with them is the base."""
    return init_tree(key, cfg, declare_adapters(cfg, lora), "/lora")


def attach(params: Params, adapters: Params, lora: LoraConfig, dropout_key: Array | None = None) -> Params:
    """The model's parameters with the adapters beside them, as `transformer` takes them.

    Args:
      dropout_key: of this step's dropout; None where nothing is dropped, as in rollouts.
    """
    scaled = {name: lora.scale * value if name.endswith("_b") else value for name, value in adapters["layers"].items()}
    layers = {**params["layers"], **scaled}
    if lora.dropout and dropout_key is not None:
        count = next(iter(scaled.values())).shape[0]
        layers["dropout_key"] = jax.random.split(dropout_key, count)
        layers["dropout_rate"] = jnp.full(count, lora.dropout, jnp.float32)
    return {**params, "layers": layers}


def merge(params: Params, adapters: Params, lora: LoraConfig) -> Params:
    """The parameters of a plain model that computes the same. The inverse: `merge` of the negated B.

    Raises:
      ValueError: a weight is stored in whole numbers.
    """
    layers = dict(params["layers"])
    for name in sorted({name.removesuffix("_a") for name in adapters["layers"] if name.endswith("_a")}):
        if f"{name}_scale" in layers:
            raise ValueError(f"{name} is stored as {layers[name].dtype}: attach the adapters, or use quantise.plain")
        a, b = adapters["layers"][f"{name}_a"], adapters["layers"][f"{name}_b"]
        weight = layers[name]
        lead = b.ndim - 1 - (weight.ndim - (a.ndim - 1))  # axes that both have: the layer, and the expert
        flat_a = a.reshape(*a.shape[:lead], -1, a.shape[-1])
        flat_b = b.reshape(*b.shape[: lead + 1], -1)
        product = jnp.einsum("...ir,...ro->...io", flat_a, flat_b, preferred_element_type=jnp.float32)
        layers[name] = (weight + lora.scale * product.reshape(weight.shape)).astype(weight.dtype)
    return {**params, "layers": layers}
