"""How much likelier the policy makes a completion than an older policy did: by token, by turn or as a whole.

The older policy is the one that sampled (behaviour), or the one at the start of the step (proximal).
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rl_posttrain.algorithms import masked

RatioKind = Literal["token", "turn", "sequence", "sequence_token"]
# exp(20) = 4.9e8. Beyond it the ratio stays there with gradient 0: exp overflows float32 at 88, and an
# infinite ratio that a clip discards would still turn the gradient into 0 * inf = NaN.
MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: Float[Array, "B T"], behaviour_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`log(policy / behaviour)` per token, float32. No gradient flows to the behaviour policy."""
    return logprobs.astype(jnp.float32) - jax.lax.stop_gradient(behaviour_logprobs.astype(jnp.float32))


def bounded_exp(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`exp(x)` within exp(+-20), with gradient 0 beyond."""
    return jnp.exp(jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def token_ratio(logprobs: Float[Array, "B T"], behaviour_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`policy / behaviour` per token, float32, within exp(+-20); at an unchanged policy 1 to rounding."""
    return bounded_exp(log_ratio(logprobs, behaviour_logprobs))


def ratio(
    kind: RatioKind,
    logprobs: Float[Array, "B T"],
    older_logprobs: Float[Array, "B T"],
    trained: Bool[Array, "B T"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """The ratio that stands at each trained token, float32, within exp(+-20); 1 at tokens that are not trained.

    A sample is one segment of one row, so every level is a reduction within a row. Untrained tokens, such as
    observations, have no part in it.

    Args:
      kind: a name in `RATIOS`.
      older_logprobs: of the policy that the ratio is measured from; no gradient flows to it.
    """
    distance = masked.visible(log_ratio(logprobs, older_logprobs), trained)
    return bounded_exp(RATIOS[kind](distance, trained, segments))


def turns(trained: Bool[Array, "B T"], segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Numbers the runs of trained tokens in a row from 1: a new one begins after an untrained token, and in a
    new segment. The number of an untrained token means nothing."""
    follows = trained[:, 1:] & trained[:, :-1] & (segments[:, 1:] == segments[:, :-1])
    begins = trained & ~jnp.pad(follows, ((0, 0), (1, 0)))
    return jnp.cumsum(begins, axis=1)


def _token(distance: Array, trained: Array, segments: Array) -> Array:
    """Each token's own: PPO, https://arxiv.org/abs/1707.06347, and GRPO."""
    return distance


def _sequence(distance: Array, trained: Array, segments: Array) -> Array:
    """`exp(mean over the sample's trained tokens of log ratio)`: GSPO, https://arxiv.org/abs/2507.18071."""
    return masked.segment_mean(distance, trained, segments)


def _turn(distance: Array, trained: Array, segments: Array) -> Array:
    """As "sequence", by turn: over each run of trained tokens between observations. One turn: the same."""
    return masked.segment_mean(distance, trained, turns(trained, segments))


def _sequence_token(distance: Array, trained: Array, segments: Array) -> Array:
    """GSPO-token, same paper: the value of "sequence", whose gradient flows through the own token alone.

    Equal to "sequence" in value and gradient unless a sample's tokens differ in advantage or weight.
    """
    mean = jax.lax.stop_gradient(masked.segment_mean(distance, trained, segments))
    return mean + distance - jax.lax.stop_gradient(distance)


# (log ratio by token, 0 where untrained; trained; segments) -> log of the ratio at each token
RATIOS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "token": _token,
    "turn": _turn,
    "sequence": _sequence,
    "sequence_token": _sequence_token,
}
