"""How much likelier the policy makes a token than the behaviour policy that sampled it did."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# exp(20) = 4.9e8. Beyond it the ratio stays there with gradient 0: exp overflows float32 at 88, and an
# infinite ratio that a clip discards would still turn the gradient into 0 * inf = NaN.
MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: Float[Array, "B T"], behaviour_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`log(policy / behaviour)` per token, float32. No gradient flows to the behaviour policy."""
    return logprobs.astype(jnp.float32) - jax.lax.stop_gradient(behaviour_logprobs.astype(jnp.float32))


def token_ratio(logprobs: Float[Array, "B T"], behaviour_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`policy / behaviour` per token, float32, within exp(+-20); at an unchanged policy 1 to rounding."""
    return jnp.exp(jnp.clip(log_ratio(logprobs, behaviour_logprobs), -MAX_LOG_RATIO, MAX_LOG_RATIO))
