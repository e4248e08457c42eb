"""What a token's ratio and advantage make of it: the objective per token, to be maximised, and the bounds it hit."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

SurrogateKind = Literal["clip", "cispo", "soft_gate", "reinforce"]
Hits = dict[str, Bool[Array, "B T"]]


def clipped_surrogate(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Array, "B T"]:
    """Clipped surrogate: PPO, https://arxiv.org/abs/1707.06347.

    `min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`; `clip_high > clip_low` is DAPO's
    clip-higher, https://arxiv.org/abs/2503.14476. Where A < 0 that is unbounded below as the ratio grows:
    `dual_clip` = c keeps it above `c * A`, https://arxiv.org/abs/1912.09729.
    """
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    objective = jnp.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return objective
    return jnp.where(advantages < 0, jnp.maximum(objective, dual_clip * advantages), objective)


def clipped_hits(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Hits:
    """Where `clipped_surrogate` has no gradient, by the bound that took it."""
    hits = {
        "clip_low": (ratio < 1 - clip_low) & (advantages < 0),
        "clip_high": (ratio > 1 + clip_high) & (advantages > 0),
    }
    return hits if dual_clip is None else {**hits, "dual_clip": (ratio > dual_clip) & (advantages < 0)}


def cispo(
    ratio: Float[Array, "B T"],
    logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """Clipped importance weights: CISPO of MiniMax-M1, https://arxiv.org/abs/2506.13585.

    `stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob`: every token keeps its gradient,
    only its weight is bounded. The weight must be detached: its own gradient, times logprob < 0, turns the
    update round wherever the policy's probability is below 1 / e. `clip_low = 1` sets no lower bound.
    """
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jax.lax.stop_gradient(weight) * advantages * logprobs


def cispo_hits(ratio: Float[Array, "B T"], clip_low: float, clip_high: float) -> Hits:
    """Where the weight of `cispo` is bounded, whatever the advantage."""
    return {"clip_low": ratio < 1 - clip_low, "clip_high": ratio > 1 + clip_high}


def soft_gate(
    ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], positive: float, negative: float
) -> Float[Array, "B T"]:
    """Soft gate in place of a clip: SAPO, https://arxiv.org/abs/2511.20347.

    `4 / tau * sigmoid(tau * (ratio - 1)) * A`, with tau = `positive` where A > 0, else `negative`. At ratio 1
    its slope is A, as that of `ratio * A`; further away it fades out, the faster the larger tau.
    """
    tau = jnp.where(advantages > 0, positive, negative)
    return 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantages


def reinforce(logprobs: Float[Array, "B T"], advantages: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`A * logprob`: REINFORCE, the policy gradient on fresh samples, as RLOO takes it,
    https://arxiv.org/abs/2402.14740. It has no ratio: stale samples need a correction."""
    return advantages * logprobs
