"""Importance weights for samples of another policy: a sampler that computes differently, or an older policy.

    weight = policy / behaviour per token, bounded in one of several ways, without gradient

"Policy" is the one at the start of the step (decoupled PPO: https://arxiv.org/abs/2110.00641, and for language
models https://arxiv.org/abs/2505.24298, where the ratio is then measured from that policy), or the current one.
A token whose weight is 0 still counts in the denominators, which were fixed before packing.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rl_posttrain.algorithms import masked
from rl_posttrain.algorithms.ratios import bounded_exp, log_ratio

CorrectionKind = Literal["none", "importance", "truncated", "masked", "sequence_mask"]
NEEDS_LOW = ("masked", "sequence_mask")
NEEDS_HIGH = ("truncated", "masked", "sequence_mask")


def correction_weights(
    kind: CorrectionKind,
    policy_logprobs: Float[Array, "B T"],
    behaviour_logprobs: Float[Array, "B T"],
    trained: Bool[Array, "B T"],
    segments: Int[Array, "B T"],
    low: float | None = None,
    high: float | None = None,
) -> tuple[Float[Array, "B T"], dict[str, Bool[Array, "B T"]]]:
    """What each token's objective is multiplied with, and where a bound was hit.

    With `w = policy / behaviour` of the token:

    - "importance": `w`, within exp(+-20). Unbiased by token, of high variance.
    - "truncated": `min(w, high)`. Truncated importance sampling, http://arxiv.org/abs/1802.01561 and, for the
      mismatch of samplers, https://fengyao.notion.site/off-policy-rl.
    - "masked": `w` where `low <= w <= high`, else 0. IcePop, https://arxiv.org/abs/2510.18855.
    - "sequence_mask": `w` where the geometric mean of the sample's weights is within the bounds, else 0 for the
      whole sample. Geometric, so that a long sample is not dropped for its length.

    Returns:
      Weights, float32, without gradient, 1 everywhere for "none"; and `{"low": ..., "high": ...}`, as far as the kind
      has those bounds.
    """
    if kind == "none":
        return jnp.ones(policy_logprobs.shape, jnp.float32), {}
    low, high = 0.0 if low is None else low, float("inf") if high is None else high
    distance = masked.visible(jax.lax.stop_gradient(log_ratio(policy_logprobs, behaviour_logprobs)), trained)
    weight = bounded_exp(distance)
    if kind == "importance":
        return weight, {}
    if kind == "truncated":
        return jnp.minimum(weight, high), {"high": weight > high}
    judged = weight if kind == "masked" else bounded_exp(masked.segment_mean(distance, trained, segments))
    hits = {"low": judged < low, "high": judged > high}
    return jnp.where(hits["low"] | hits["high"], 0.0, weight), hits


def check_bounds(kind: CorrectionKind, low: float | None, high: float | None) -> None:
    """Refuses bounds that are missing, useless or the wrong way round."""
    for name, value, kinds, legal in (
        ("correction_low", low, NEEDS_LOW, lambda x: 0 < x < 1),
        ("correction_high", high, NEEDS_HIGH, lambda x: 1 < x < float("inf")),
    ):
        if kind in kinds and (value is None or not legal(value)):
            bound = "in (0, 1)" if name == "correction_low" else "above 1"
            raise ValueError(f"correction={kind!r} is bounded by it: {name}={value} must be {bound}")
        if kind not in kinds and value is not None:
            raise ValueError(f"{name}={value} has no effect with correction={kind!r}: leave it out")
