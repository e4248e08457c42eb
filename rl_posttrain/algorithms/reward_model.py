"""A reward model learnt from pairs: Bradley and Terry 1952, as in https://arxiv.org/abs/1706.03741.

Rows and pairs are as in `preference`. A completion's score is the head's number at its last trained token, which is
found by place and never by id: ends may share their id with the padding, and stand within a text.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_posttrain.algorithms import masked
from rl_posttrain.algorithms.preference import pair_sums
from rl_posttrain.batch import Batch


def completion_ends(batch: Batch) -> Bool[Array, "B T"]:
    """True where `labels[t]` is the last trained token of its segment."""
    trained = batch.loss_weight > 0
    places = jnp.arange(trained.shape[1])
    numbers = 2 * trained.shape[1] + 1  # see `masked.segment_total`
    reduce = jax.vmap(lambda values, segments: jax.ops.segment_max(values, segments, numbers))
    last = reduce(jnp.where(trained, places, -1), batch.segments)
    return trained & (jnp.take_along_axis(last, batch.segments, axis=1) == places)


def completion_scores(values: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    """Each completion's score, at its last trained label; elsewhere 0. Float32.

    Args:
      values: the head's number at each position, of the text up to `tokens[t]`. That of `labels[t]` is read from the
        next position, which holds the label: packed rows keep a completion's last token for that.
    """
    following = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
    return masked.visible(following, completion_ends(batch))


def loss(
    values: Float[Array, "B T"],
    batch: Batch,
    token_count: Float[Array, ""],
    *,
    margin: float = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """`sum over pairs of weight * -log sigmoid(chosen score - rejected score - margin)`; additive over micro-batches.

    Args:
      values: see `completion_scores`.
      batch: packed pairs; tokens with `loss_weight` 0 are not trained.
      token_count: of no use here; every loss is told it.
      margin: how far the chosen score has to be ahead, at least 0: https://arxiv.org/abs/2307.09288, equation 2.

    Returns:
      The scalar, and means over pairs.
    """
    pairs = pair_sums(completion_scores(values, batch), batch)
    scalar = pairs.mean(-jax.nn.log_sigmoid(pairs.margin - margin))
    metrics = {
        "loss/total": scalar,
        "reward_model/margin": pairs.mean(pairs.margin),
        "reward_model/accuracy": pairs.mean((pairs.margin > 0).astype(jnp.float32)),
        "reward_model/chosen_score": pairs.mean(pairs.chosen),
        "reward_model/rejected_score": pairs.mean(pairs.rejected),
    }
    return scalar, jax.lax.stop_gradient(metrics)
