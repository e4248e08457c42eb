"""Supervised fine-tuning: the likelihood of worked examples, `loss = -sum(loss_weight * logprob)`."""

import jax
from jaxtyping import Array, Float

from rl_posttrain.algorithms import masked
from rl_posttrain.batch import Batch


def loss(
    logprobs: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    batch: Batch,
    token_count: Float[Array, ""],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of packed rows, and its metrics; all additive over micro-batches.

    Args:
      logprobs: of `batch.labels` under the policy.
      entropy: of the policy at each position, nats; only reported.
      batch: tokens with `loss_weight` 0 are not trained.
      token_count: trained tokens of the whole optimizer step, at least 1.

    Returns:
      The scalar, and sums over the trained tokens divided by `token_count`.
    """
    trained = batch.loss_weight > 0
    scalar = masked.total(-logprobs * batch.loss_weight, trained)
    metrics = {
        "loss/total": scalar,
        "policy/logprob_mean": masked.total(logprobs, trained) / token_count,
        "policy/entropy": masked.total(entropy, trained) / token_count,
    }
    return scalar, jax.lax.stop_gradient(metrics)
