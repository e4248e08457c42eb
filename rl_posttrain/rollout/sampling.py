"""One token: from logits to a draw and its logprob under the distribution that was really sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Static under jit.

    `temperature=0` is greedy. `top_k` (0: off) and `top_p` (1: off) truncate the distribution; they are for
    evaluation only, since a trainer that scores the untruncated distribution would be silently biased.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0 (0 is greedy)")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0 turns it off)")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in [0, 1] (1 turns it off)")

    def check_for_training(self) -> None:
        """Raises ValueError for settings under which behaviour logprobs would not match the trainer's."""
        if self.temperature == 0:
            raise ValueError("temperature=0 in training: every sample of a group would be the same; use e.g. 1.0")
        if self.top_k or self.top_p < 1:
            raise ValueError(
                f"top_k={self.top_k}, top_p={self.top_p} in training would bias the ratio; use them in evaluation only"
            )


def truncate(logits: Float[Array, "... V"], sampling: Sampling) -> Float[Array, "... V"]:
    """Logits with everything outside top-k and top-p at -inf. The most likely token always stays."""
    vocab = logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        threshold = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    if sampling.top_p < 1:
        order = jnp.argsort(-logits, axis=-1, stable=True)
        ranked = jax.nn.softmax(jnp.take_along_axis(logits, order, -1), -1)
        before = jnp.cumsum(ranked, -1) - ranked  # mass that is more likely than this token
        kept = (before < sampling.top_p).at[..., 0].set(True)
        kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), -1)
        logits = jnp.where(kept, logits, -jnp.inf)
    return logits


def sample(
    uniform: Float[Array, ...], logits: Float[Array, "... V"], sampling: Sampling
) -> tuple[Int[Array, ...], Float[Array, ...]]:
    """Draws by inverting the cumulative distribution: one uniform number in [0, 1) a row, not V of them.

    Returns:
      (token, logprob), the logprob under the tempered and truncated distribution; 0 for greedy, which is certain.
    """
    logits = logits.astype(jnp.float32)
    if sampling.temperature == 0:
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        return token, jnp.zeros(token.shape, jnp.float32)
    logits = truncate(logits / sampling.temperature, sampling)
    highest = logits.max(-1, keepdims=True)
    # In two levels, first the block and then the token in it: one cumulative sum over a large vocabulary is slow.
    vocab = logits.shape[-1]
    weights = jnp.pad(jnp.exp(logits - highest), [(0, 0)] * (logits.ndim - 1) + [(0, -vocab % BLOCK)])
    weights = weights.reshape(*weights.shape[:-1], -1, BLOCK)
    mass = weights.sum(-1)
    total = mass.sum(-1)
    block, target = _invert(mass, uniform * total)
    within, _ = _invert(_take(weights, block[..., None, None], -2)[..., 0, :], target)
    token = block * BLOCK + within
    return token, _take(logits - highest, token[..., None], -1)[..., 0] - jnp.log(total)


BLOCK = 256  # tokens


def _invert(mass: Float[Array, "... N"], target: Float[Array, ...]) -> tuple[Int[Array, ...], Float[Array, ...]]:
    """The entry in which the cumulative mass passes the target, and the target counted from its start."""
    cumulative = jnp.cumsum(mass, -1)
    # Rounding can push the target onto the total: never beyond the last entry that has any mass.
    last = mass.shape[-1] - 1 - jnp.argmax(mass[..., ::-1] > 0, -1)
    entry = jnp.minimum((cumulative <= target[..., None]).sum(-1), last).astype(jnp.int32)
    before = _take(jnp.pad(cumulative, [(0, 0)] * (mass.ndim - 1) + [(1, 0)]), entry[..., None], -1)[..., 0]
    return entry, target - before


_take = jnp.take_along_axis
