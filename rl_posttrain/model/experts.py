"""A mixture of experts in place of one mlp: a router chooses a few of many for each token.

Shazeer et al. 2017, https://arxiv.org/abs/1701.06538. No token is ever dropped: there is no capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from rl_posttrain.batch import Params
from rl_posttrain.model.linear import linear, multiply


def mix(x: Float[Array, "B T D"], w: Params, cfg: Any, activation: Callable[[Array], Array]) -> Float[Array, "B T D"]:
    """The weighted sum of the chosen experts' outputs.

    Args:
      w: one layer's weights: router [D, E], gate and up [E, D, F], down [E, F, D].
      cfg: a `transformer.ModelConfig`; `cfg.experts` says how: "dense" computes every expert for every token and
        is the reference, "grouped" sorts tokens by expert and computes the chosen ones alone.

    Raises:
      ValueError: "grouped" with adapters on the experts, which have to be merged first.
    """
    weights, chosen = route(x, w["router"], cfg.experts_per_token, cfg.normalise_experts)
    if cfg.experts == "dense":
        return _dense(x, w, weights, chosen, activation).astype(x.dtype)
    if any(f"{name}_a" in w for name in ("gate", "up", "down")):
        raise ValueError(
            "experts='grouped' computes no adapters: use experts='dense', or targets without gate, up, down"
        )
    return _grouped(x, w, weights, chosen, activation).astype(x.dtype)


def route(
    x: Float[Array, "B T D"], router: Float[Array, "D E"], count: int, normalise: bool
) -> tuple[Float32[Array, "B T k"], Int[Array, "B T k"]]:
    """Weights and indices of the `count` most probable experts of each token; probabilities in float32."""
    scores = jnp.einsum("BTD,DE->BTE", x, router.astype(x.dtype), preferred_element_type=jnp.float32)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(scores, -1), count)
    return weights / weights.sum(-1, keepdims=True) if normalise else weights, chosen


def _dense(x: Array, w: Params, weights: Array, chosen: Array, activation: Callable) -> Array:
    E = w["gate"].shape[0]
    gate, up = linear(x, w, "gate", "BTD,EDF->BTEF"), linear(x, w, "up", "BTD,EDF->BTEF")
    out = linear(activation(gate) * up, w, "down", "BTEF,EFD->BTED")
    share = (weights[..., None] * jax.nn.one_hot(chosen, E, dtype=weights.dtype)).sum(-2)  # [B, T, E]
    return jnp.einsum("BTE,BTED->BTD", share.astype(x.dtype), out)


def _grouped(x: Array, w: Params, weights: Array, chosen: Array, activation: Callable) -> Array:
    B, T, k = chosen.shape
    E, D = w["gate"].shape[:2]
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert, stable=True)  # pairs of token and expert, by expert
    sizes = jnp.bincount(expert, length=E).astype(jnp.int32)
    rows = x.reshape(-1, D)[order // k]
    product = lambda rows, weight: jax.lax.ragged_dot(rows, weight, sizes)
    gate, up = multiply(product, rows, w, "gate"), multiply(product, rows, w, "up")
    out = multiply(product, activation(gate) * up, w, "down")
    out = out * weights.reshape(-1)[order][:, None].astype(x.dtype)
    return jnp.zeros((B * T, D), x.dtype).at[order // k].add(out).reshape(B, T, D)
