"""The weights that make a plain sum over tokens the loss.

A loss here is `sum(loss_weight * term)`: the denominator of the whole optimizer step is part of the weight,
computed on the host before packing. So micro-batches and devices only add, and cannot change the objective.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Num

AggregationKind = Literal["token_mean", "sequence_mean", "constant_length"]


def sample_weights(
    lengths: Num[np.ndarray, " N"],
    valid: Bool[np.ndarray, " N"],
    kind: AggregationKind,
    constant_length: int | None = None,
    emphasis: Float[np.ndarray, " N"] | None = None,
) -> Float[np.ndarray, " N"]:
    """Loss weight of each trained token of the N samples of a whole optimizer step, float32.

    With these weights a plain sum over tokens is the mean that `kind` names. Samples that are not valid or
    have no trained token weigh 0 and count in no denominator; a sample without signal (advantage 0) counts.

    Args:
      lengths: trained tokens of each sample.
      valid: False for samples that left their group.
      kind: a name in `AGGREGATIONS`.
      constant_length: the denominator per sample of "constant_length", and of no other.
      emphasis: how much each sample counts in the mean, such as its domain's weight; >= 0, all 1 if left out.

    Raises:
      ValueError: an unknown kind, a negative length or emphasis, or a constant length missing or without use.
    """
    if kind not in AGGREGATIONS:
        raise ValueError(f"aggregation={kind!r}: known are {', '.join(AGGREGATIONS)}")
    check_constant_length(kind, constant_length)
    if (lengths < 0).any():
        raise ValueError(f"lengths must be at least 0, the least is {lengths.min()}")
    counts = np.where(valid & (lengths > 0), 1.0 if emphasis is None else emphasis, 0.0)
    if (counts < 0).any():
        raise ValueError(f"emphasis must be at least 0, the least is {counts.min()}")
    safe = np.where(lengths > 0, lengths, 1).astype(np.float64)
    return AGGREGATIONS[kind](safe, counts, constant_length or 0).astype(np.float32)


def check_constant_length(kind: str, constant_length: int | None) -> None:
    """Refuses a constant length that is missing, not positive, or has no effect."""
    if kind == "constant_length" and (constant_length is None or constant_length < 1):
        raise ValueError(
            f"aggregation='constant_length' divides by it: {constant_length=} must be at least 1, "
            "for instance the longest completion allowed"
        )
    if kind != "constant_length" and constant_length is not None:
        raise ValueError(f"{constant_length=} has no effect with aggregation={kind!r}: leave it out")


def _token_mean(lengths: np.ndarray, counts: np.ndarray, constant_length: int) -> np.ndarray:
    """Mean over all tokens of the step, as in DAPO, https://arxiv.org/abs/2503.14476."""
    return counts / _denominator((counts * lengths).sum())


def _sequence_mean(lengths: np.ndarray, counts: np.ndarray, constant_length: int) -> np.ndarray:
    """Mean over samples of the mean over their tokens, as in GRPO, https://arxiv.org/abs/2402.03300."""
    return counts / (_denominator(counts.sum()) * lengths)


def _constant_length(lengths: np.ndarray, counts: np.ndarray, constant_length: int) -> np.ndarray:
    """Mean over samples of their sum over a constant: Dr. GRPO, https://arxiv.org/abs/2503.20783."""
    return counts / (_denominator(counts.sum()) * constant_length)


def _denominator(total: float) -> float:
    """1 where nothing is counted, and so every weight is 0 whatever it is divided by."""
    return total if total > 0 else 1.0


# (lengths of at least 1, how much each sample counts, constant length) -> weight of each token of a sample
AGGREGATIONS: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "constant_length": _constant_length,
}
