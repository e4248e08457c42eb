"""Per-token objectives, and the weights that make their plain sum the loss.

A loss here is `sum(loss_weight * term)`: the denominator of the whole optimizer step is part of the weight,
computed on the host before packing. So micro-batches and devices only add, and cannot change the objective.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

AggregationKind = Literal["token_mean", "sequence_mean", "constant_length"]
# Above this log-ratio k3 goes on along its tangent: exp overflows float32 at 88, and a value that is only
# clipped would lose its gradient exactly where the policy has strayed furthest.
KL_TANGENT = 10.0


def clipped_surrogate(
    ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], clip_low: float, clip_high: float
) -> Float[Array, "B T"]:
    """Clipped surrogate objective per token, to be maximised: PPO, https://arxiv.org/abs/1707.06347.

    `min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`; `clip_high > clip_low` is DAPO's
    clip-higher, https://arxiv.org/abs/2503.14476.
    """
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.minimum(ratio * advantages, clipped * advantages)


def kl_k3(logprobs: Float[Array, "B T"], reference_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Estimate of KL(policy || reference) from a sampled token, never negative, float32.

    `exp(d) - d - 1` with `d = reference - policy`: k3 of http://joschu.net/blog/kl-approx.html. The value is
    unbiased for samples of the policy; its gradient is biased, and small when the two are close. Above
    d = 10 the curve goes on along its tangent, so that value and gradient stay finite and keep pulling back.
    No gradient flows to the reference.
    """
    reference = jax.lax.stop_gradient(reference_logprobs.astype(jnp.float32))
    distance = reference - logprobs.astype(jnp.float32)
    near = jnp.minimum(distance, KL_TANGENT)  # so that the branch not taken stays finite
    slope = float(np.expm1(KL_TANGENT))
    tangent = slope - KL_TANGENT + slope * (distance - KL_TANGENT)
    return jnp.where(distance > KL_TANGENT, tangent, jnp.expm1(near) - near)


def sample_weights(
    lengths: Num[np.ndarray, " N"],
    valid: Bool[np.ndarray, " N"],
    kind: AggregationKind,
    constant_length: int | None = None,
) -> Float[np.ndarray, " N"]:
    """Loss weight of each trained token of the N samples of a whole optimizer step, float32.

    With these weights a plain sum over tokens is the mean that `kind` names. Samples that are not valid or
    have no trained token weigh 0 and count in no denominator; a sample without signal (advantage 0) counts.

    Args:
      lengths: trained tokens of each sample.
      valid: False for samples that left their group.
      kind: a name in `AGGREGATIONS`.
      constant_length: the denominator per sample of "constant_length", and of no other.

    Raises:
      ValueError: an unknown kind, a negative length, or a constant length missing or without use.
    """
    if kind not in AGGREGATIONS:
        raise ValueError(f"aggregation={kind!r}: known are {', '.join(AGGREGATIONS)}")
    check_constant_length(kind, constant_length)
    if (lengths < 0).any():
        raise ValueError(f"lengths must be at least 0, the least is {lengths.min()}")
    counted = valid & (lengths > 0)
    safe = np.where(counted, lengths, 1).astype(np.float64)
    weights = AGGREGATIONS[kind](safe, counted, constant_length or 0)
    return np.where(counted, weights, 0.0).astype(np.float32)


def check_constant_length(kind: str, constant_length: int | None) -> None:
    """Refuses a constant length that is missing, not positive, or has no effect."""
    if kind == "constant_length" and (constant_length is None or constant_length < 1):
        raise ValueError(
            f"aggregation='constant_length' divides by it: {constant_length=} must be at least 1, "
            "for instance the longest completion allowed"
        )
    if kind != "constant_length" and constant_length is not None:
        raise ValueError(f"{constant_length=} has no effect with aggregation={kind!r}: leave it out")


def _token_mean(lengths: np.ndarray, counted: np.ndarray, constant_length: int) -> np.ndarray:
    """Mean over all tokens of the step, as in DAPO, https://arxiv.org/abs/2503.14476."""
    return np.full(len(lengths), 1.0 / max(lengths[counted].sum(), 1))


def _sequence_mean(lengths: np.ndarray, counted: np.ndarray, constant_length: int) -> np.ndarray:
    """Mean over samples of the mean over their tokens, as in GRPO, https://arxiv.org/abs/2402.03300."""
    return 1.0 / (max(counted.sum(), 1) * lengths)


def _constant_length(lengths: np.ndarray, counted: np.ndarray, constant_length: int) -> np.ndarray:
    """Mean over samples of their sum over a constant: Dr. GRPO, https://arxiv.org/abs/2503.20783."""
    return np.full(len(lengths), 1.0 / (max(counted.sum(), 1) * constant_length))


AGGREGATIONS: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "constant_length": _constant_length,
}
