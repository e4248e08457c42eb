"""Generalised advantage estimation on packed rows: https://arxiv.org/abs/1506.02438."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rl_posttrain.algorithms import masked


def generalised_advantages(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    trained: Bool[Array, "B T"],
    segments: Int[Array, "B T"],
    discount: float = 1.0,
    decay: float = 0.95,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Advantages and returns of the trained tokens of packed samples, float32; 0 elsewhere.

        delta_t = r_t + discount * V_{t+1} - V_t
        A_t     = delta_t + discount * decay * A_{t+1}        returns = A + V

    t + 1 is the next trained token of the same segment: observations in between are skipped, so that they neither
    decay the signal nor need a value. After a sample's last trained token both V and A are 0: a completion that was
    cut off ends there as any other.

    Args:
      rewards: earned by the token `labels[t]`; for an outcome all on the last trained token.
      values: expected return before `labels[t]` is sampled; a critic's, without gradient.
      trained: of one segment in order of time within the row; anything may stand where it is False.
      discount: gamma; 1 for completions that end.
      decay: lambda; 1 is the return less the value, 0 the one-step difference.
    """
    rewards, values = masked.visible(rewards, trained), masked.visible(values, trained)

    def backward(carry: tuple[Array, Array, Array], now: tuple[Array, Array, Array, Array]):
        later_value, later_advantage, later_segment = carry
        reward, value, shown, segment = now
        same = (segment == later_segment).astype(jnp.float32)
        advantage = reward + discount * same * later_value - value + discount * decay * same * later_advantage
        following = jax.tree.map(
            lambda new, old: jnp.where(shown, new, old),
            (value, advantage, segment),
            (later_value, later_advantage, later_segment),
        )
        return following, advantage

    by_time = jax.tree.map(jnp.transpose, (rewards, values, trained, segments))
    nothing = jnp.zeros(rewards.shape[0], jnp.float32)
    nobody = jnp.full(rewards.shape[0], -1, segments.dtype)
    _, advantages = jax.lax.scan(backward, (nothing, nothing, nobody), by_time, reverse=True)
    advantages = masked.visible(advantages.T, trained)
    return advantages, advantages + values
