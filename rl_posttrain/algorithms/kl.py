"""KL(policy || reference) estimated from sampled tokens: as a value, and as something to differentiate.

The two are not the same. With `d = log(policy / reference)` of a token that the policy sampled:

    value     k1 = d                exact in expectation, of either sign
              k2 = d**2 / 2         biased, low variance
              k3 = exp(-d) - 1 + d  exact in expectation, never negative: http://joschu.net/blog/kl-approx.html

    expected gradient of the term in the loss:
              k1                    0: minimising it does nothing, so it is refused there
              k2                    that of the KL
              k3                    that of KL(reference || policy): GRPO's choice, close to it near the reference
              k3_corrected          that of the KL, stale samples included: k3 times the differentiable ratio

    as a penalty of the reward (no gradient through it):
              k1                    that of the KL
              k2, k3                those of other divergences, with the same minimum

The second table is exact in tests/algorithms/test_kl.py.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rl_posttrain.algorithms.ratios import token_ratio

KlKind = Literal["k1", "k2", "k3", "k3_corrected"]
# Above this log-ratio k2 and k3 go on along their tangent: exp overflows float32 at 88, and a value that is only
# clipped would lose its gradient exactly where the policy has strayed furthest.
KL_TANGENT = 10.0


def kl_k1(logprobs: Float[Array, "B T"], reference_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`log(policy / reference)`, float32. No gradient flows to the reference, here and below."""
    return logprobs.astype(jnp.float32) - jax.lax.stop_gradient(reference_logprobs.astype(jnp.float32))


def kl_k2(logprobs: Float[Array, "B T"], reference_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`d**2 / 2` with `d = log(policy / reference)`, float32; linear beyond |d| = 10."""
    distance = jnp.abs(kl_k1(logprobs, reference_logprobs))
    near = jnp.minimum(distance, KL_TANGENT)
    return jnp.where(distance > KL_TANGENT, KL_TANGENT * (distance - KL_TANGENT / 2), near**2 / 2)


def kl_k3(logprobs: Float[Array, "B T"], reference_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`exp(-d) - 1 + d` with `d = log(policy / reference)`, never negative, float32.

    Below d = -10 the curve goes on along its tangent, so that value and gradient stay finite and keep pulling
    back.
    """
    distance = -kl_k1(logprobs, reference_logprobs)
    near = jnp.minimum(distance, KL_TANGENT)  # so that the branch not taken stays finite
    slope = float(np.expm1(KL_TANGENT))
    tangent = slope - KL_TANGENT + slope * (distance - KL_TANGENT)
    return jnp.where(distance > KL_TANGENT, tangent, jnp.expm1(near) - near)


KL_VALUES: dict[str, Callable[[Array, Array], Array]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_term(
    kind: KlKind,
    logprobs: Float[Array, "B T"],
    reference_logprobs: Float[Array, "B T"],
    behaviour_logprobs: Float[Array, "B T"],
) -> Float[Array, "B T"]:
    """The KL term of the loss per token, float32; see the table above for its gradient.

    "k3_corrected" is `policy / behaviour * k3`, with the gradient of both factors: the unbiased KL estimate of
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.
    """
    if kind == "k3_corrected":
        return token_ratio(logprobs, behaviour_logprobs) * kl_k3(logprobs, reference_logprobs)
    return KL_VALUES[kind](logprobs, reference_logprobs)


def adapted_coefficient(coefficient: float, kl: float, target: float) -> float:
    """The next coefficient of a KL penalty that should hold `kl` at `target`, both in nats per token.

    `coefficient * (1 + 0.1 * clip(kl / target - 1, -0.2, 0.2))`: https://arxiv.org/abs/1909.08593, section 2.2.
    """
    return coefficient * (1.0 + 0.1 * float(np.clip(kl / target - 1.0, -0.2, 0.2)))
