"""Heads beside the output table: a number read from a hidden state.

The parameters of a head stand in the model's table beside the others, so init, shardings and checkpoints know them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from rl_posttrain.batch import Params
from rl_posttrain.model.transformer import ModelConfig, Parameter, declare

REWARD = "reward_head"


def declare_reward_model(cfg: ModelConfig) -> dict[str, Any]:
    """The model's parameters and a reward head's: one vector, since a constant cancels between two completions.

    Its first values are as in Stiennon et al. 2020, https://arxiv.org/abs/2009.01325: of variance 1 / (D + 1).
    """
    return {**declare(cfg), REWARD: Parameter((cfg.embed_dim,), (None,), "normal", (cfg.embed_dim + 1) ** -0.5)}


def values(params: Params, hidden: Float[Array, "B T D"], head: str = REWARD) -> Float32[Array, "B T"]:
    """The head's number at each position: of the text up to and including `tokens[t]`, float32.

    Args:
      hidden: of `transformer.forward`, after the final norm.
    """
    weight = params[head].astype(hidden.dtype)
    return jnp.einsum("BTD,D->BT", hidden, weight, preferred_element_type=jnp.float32)
