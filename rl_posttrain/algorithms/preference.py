"""Learning from pairs, one completion preferred to another: DPO and IPO, with smoothed labels.

A pair is one whole tree: its prompt, and two completions whose `advantages` are +1 (chosen) and -1 (rejected). They
share a row and a parent, which is how the loss finds them. With the log ratio of the policy to the reference summed
over a completion's trained tokens, and `margin` the chosen's minus the rejected's, a pair's loss is

    (1 - label_smoothing) * f(margin) + label_smoothing * f(-margin)

and the loss `sum over pairs of weight * loss`: a pair's weight, denominator included, stands at each trained token.

Policy and reference must be scored alike: without dropout, or the margin is noise before anything was learnt.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_posttrain.algorithms import masked
from rl_posttrain.algorithms.ratios import log_ratio
from rl_posttrain.batch import Batch

PreferenceKind = Literal["dpo", "ipo"]


class Pairs(NamedTuple):
    """A sum over each completion of a pair, by number of the pair in its row; 0 at numbers that are no pair."""

    chosen: Float[Array, "B numbers"]
    rejected: Float[Array, "B numbers"]
    weight: Float[Array, "B numbers"]  # in the loss

    @property
    def margin(self) -> Float[Array, "B numbers"]:
        """How far the chosen completion is ahead."""
        return self.chosen - self.rejected

    def mean(self, x: Float[Array, "B numbers"]) -> Float[Array, ""]:
        """Sum of `x` by the pairs' weights: its mean over the step's pairs, where those sum to 1."""
        return jnp.sum(jnp.where(self.weight > 0, self.weight * x, 0.0))


def pair_sums(x: Float[Array, "B T"], batch: Batch) -> Pairs:
    """Sums of `x` over the trained tokens of the two completions of each pair, float32.

    Args:
      batch: rows of whole trees. A pair weighs what its trained tokens weigh on average.
    """
    trained = batch.loss_weight > 0
    numbers = jnp.where(trained, batch.parents, 0)
    total = lambda values, mask: masked.segment_total(values, mask, numbers)
    count = total(trained.astype(jnp.float32), trained)
    return Pairs(
        chosen=total(x, trained & (batch.advantages > 0)),
        rejected=total(x, trained & (batch.advantages < 0)),
        weight=total(batch.loss_weight, trained) / jnp.maximum(count, 1.0),
    )


def loss(
    logprobs: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    batch: Batch,
    token_count: Float[Array, ""],
    *,
    kind: PreferenceKind,
    beta: float,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of packed pairs, and its metrics; all additive over micro-batches.

    Args:
      logprobs: of `batch.labels` under the policy.
      entropy: of the policy at each position, nats; only reported.
      batch: with `reference_logprobs`; tokens with `loss_weight` 0 are not trained.
      token_count: trained tokens of the whole optimizer step, at least 1.
      kind: a name in `OBJECTIVES`.
      beta: how strongly the reference holds; nats of log ratio times `beta` are the implied reward.
      label_smoothing: the share of pairs that are taken to be labelled the wrong way round (cDPO,
        https://ericmitchell.ai/cdpo.pdf).

    Returns:
      The scalar; means over pairs (`preference/...`), and over trained tokens (`policy/...`).
    """
    trained = batch.loss_weight > 0
    pairs = pair_sums(log_ratio(logprobs, batch.reference_logprobs), batch)
    objective = OBJECTIVES[kind]
    right, wrong = objective(pairs.margin, beta), objective(-pairs.margin, beta)
    scalar = pairs.mean((1.0 - label_smoothing) * right + label_smoothing * wrong)
    metrics = {
        "loss/total": scalar,
        "preference/margin": pairs.mean(beta * pairs.margin),
        "preference/accuracy": pairs.mean((pairs.margin > 0).astype(jnp.float32)),
        "preference/chosen_reward": pairs.mean(beta * pairs.chosen),
        "preference/rejected_reward": pairs.mean(beta * pairs.rejected),
        "policy/logprob_mean": masked.total(logprobs, trained) / token_count,
        "policy/entropy": masked.total(entropy, trained) / token_count,
    }
    return scalar, jax.lax.stop_gradient(metrics)


def check_settings(beta: float, label_smoothing: float) -> None:
    """Refuses settings of `loss` under which it teaches nothing, or the opposite.

    Raises:
      ValueError: `beta` is not above 0, or `label_smoothing` not in [0, 0.5).
    """
    if not 0 < beta < math.inf:
        raise ValueError(f"{beta=} must be above 0: 0.1 is usual for 'dpo'")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"{label_smoothing=} must be in [0, 0.5): at 0.5 a pair says nothing")


def _dpo(margin: Array, beta: float) -> Array:
    """`-log sigmoid(beta * margin)`: https://arxiv.org/abs/2305.18290, equation 7."""
    return -jax.nn.log_sigmoid(beta * margin)


def _ipo(margin: Array, beta: float) -> Array:
    """`(margin - 1 / (2 beta))^2`: https://arxiv.org/abs/2310.12036, equation 17, whose tau is `beta`."""
    return jnp.square(margin - 0.5 / beta)


# (margin, beta) -> loss of each pair
OBJECTIVES: dict[str, Callable[[Array, float], Array]] = {"dpo": _dpo, "ipo": _ipo}
