"""From the rewards of a group to advantages: how much better than its siblings a completion was.

On the host, in NumPy: advantages are taken over the whole optimizer step before it is packed, split into
micro-batches or spread over devices, so that none of these can change them.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from jaxtyping import Array, Bool, Float

AdvantageKind = Literal["mean_std", "mean", "leave_one_out"]
DEVIATION_EPSILON = 1e-6  # far below the deviation of any two rewards that differ by more than 1e-5


def group_advantages(
    rewards: Float[np.ndarray | Array, "P S"], valid: Bool[np.ndarray | Array, "P S"], kind: AdvantageKind
) -> Float[np.ndarray, "P S"]:
    """Advantages of S samples for each of P prompts, float32.

    A sample that is not valid, or whose reward is not finite, takes no part: it gets 0 and does not move the
    others. A group with fewer than two valid samples, or with equal rewards, gets exactly 0.

    Args:
      rewards: higher is better.
      valid: False where nothing was learnt about the sample (the sandbox or the verifier failed).
      kind: a name in `ADVANTAGES`.

    Raises:
      ValueError: an unknown kind.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"advantage={kind!r}: known are {', '.join(ADVANTAGES)}")
    rewards = np.asarray(rewards, np.float64)
    valid = np.asarray(valid) & np.isfinite(rewards)
    known = np.where(valid, rewards, 0.0)
    count = valid.sum(axis=1, keepdims=True)
    baseline = known.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(valid, known - baseline, 0.0)
    spread = np.where(valid, known, -np.inf).max(axis=1) - np.where(valid, known, np.inf).min(axis=1)
    # Equal rewards leave a rounding residue, which a deviation of the same size would blow up to about 1.
    signal = (count[:, 0] >= 2) & (spread > 0)
    return np.where(signal[:, None], ADVANTAGES[kind](centred, count), 0.0).astype(np.float32)


def _mean(centred: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`r - mean(r)`: Dr. GRPO, https://arxiv.org/abs/2503.20783; amplifies no group of little spread."""
    return centred


def _mean_std(centred: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`(r - mean(r)) / (std(r) + 1e-6)`, population deviation: GRPO, https://arxiv.org/abs/2402.03300."""
    variance = (centred**2).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    return centred / (np.sqrt(variance) + DEVIATION_EPSILON)


def _leave_one_out(centred: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`r_i - mean(r_j, j != i) = n / (n - 1) * (r_i - mean(r))`: RLOO, https://arxiv.org/abs/2402.14740."""
    return centred * count / np.maximum(count - 1, 1)


ADVANTAGES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "mean_std": _mean_std,
    "mean": _mean,
    "leave_one_out": _leave_one_out,
}
