"""The nouns of the loop that hold arrays."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

Params = Any  # nested dict of arrays, as `model.transformer.declare` names them


@struct.dataclass
class Batch:
    """Packed trees: the one row format of every trainer. All fields are [B, T].

    Everything at t describes `labels[t]`, the token predicted from position t. Key k is visible to query
    q when `position_k <= position_q`, both segments are above 0, and `segment_k` is `segment_q` or
    `parent_q`. Segment 0 is padding. Denominators are folded into `loss_weight`: a loss is a plain sum.
    """

    tokens: jax.Array  # int32
    labels: jax.Array  # int32
    positions: jax.Array  # int32; absolute position in the sequence that the token belongs to
    segments: jax.Array  # int32; unique within a row, 0 is padding
    parents: jax.Array  # int32; segment of the shared prefix, -1 for none
    loss_weight: jax.Array  # float32; 0 where labels[t] is not trained
    advantages: jax.Array  # float32
    behaviour_logprobs: jax.Array  # float32; at `temperature`
    reference_logprobs: jax.Array  # float32; at `temperature`, 0 where no reference is used
    proximal_logprobs: jax.Array  # float32; at `temperature`, of the policy at the step's start; 0 where unused
    entropy_coefficient: jax.Array  # float32; of the entropy bonus, 0 where there is none
    temperature: jax.Array  # float32; 1 on padding
    policy_version: jax.Array  # int32


@struct.dataclass
class TrainState:
    """What the optimizer moves."""

    step: jax.Array  # int32 scalar: optimizer steps taken
    params: Params  # float32 master weights
    opt_state: Any
