"""Group relative policy optimization: https://arxiv.org/abs/2402.03300, and its relatives by configuration.

    loss = sum over tokens of loss_weight * (kl_coefficient * k3 - min(ratio * A, clip(ratio) * A))

`AlgorithmConfig.advantage` and `.aggregation` act on the host, before packing, through
`advantages.group_advantages` and `losses.sample_weights`; the clip and the KL term act here. Everything
returned is additive over micro-batches, but for metrics named `*_max`, which combine by maximum.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_posttrain.algorithms import masked
from rl_posttrain.algorithms.advantages import AdvantageKind
from rl_posttrain.algorithms.losses import AggregationKind, check_constant_length, clipped_surrogate, kl_k3
from rl_posttrain.algorithms.ratios import log_ratio, token_ratio
from rl_posttrain.batch import Batch


@dataclass(frozen=True)
class AlgorithmConfig:
    """Which objective: a choice of advantage, aggregation, clip and KL term.

    Raises:
      ValueError: a value out of range, or one without effect.
    """

    advantage: AdvantageKind = "mean_std"
    aggregation: AggregationKind = "token_mean"
    constant_length: int | None = None  # tokens; the denominator of aggregation "constant_length"
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coefficient: float = 0.0  # of the k3 term against the reference policy; 0 needs no reference

    def __post_init__(self) -> None:
        check_constant_length(self.aggregation, self.constant_length)
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low={self.clip_low} must be in (0, 1]: the ratio is kept above 1 - clip_low")
        if not 0 < self.clip_high < float("inf"):
            raise ValueError(f"clip_high={self.clip_high} must be above 0: the ratio is kept below 1 + clip_high")
        if not 0 <= self.kl_coefficient < float("inf"):
            raise ValueError(f"kl_coefficient={self.kl_coefficient} must be at least 0")


def loss(
    logprobs: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    batch: Batch,
    cfg: AlgorithmConfig,
    token_count: Float[Array, ""],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of packed rows, and its metrics.

    Args:
      logprobs: of `batch.labels` under the policy, at `batch.temperature`.
      entropy: of the policy at each position, nats; only reported.
      batch: with advantages, behaviour log-probabilities, and reference ones if `kl_coefficient` is above 0.
      token_count: trained tokens of the whole optimizer step, at least 1.

    Returns:
      The scalar, and sums over the trained tokens divided by `token_count`.
    """
    trained = batch.loss_weight > 0
    ratio = token_ratio(logprobs, batch.behaviour_logprobs)
    surrogate = clipped_surrogate(ratio, batch.advantages, cfg.clip_low, cfg.clip_high)
    policy_loss = masked.total(-surrogate * batch.loss_weight, trained)
    kl_loss = jnp.zeros((), jnp.float32)
    mean = lambda x: jax.lax.stop_gradient(masked.total(x.astype(jnp.float32), trained) / token_count)
    metrics = {}
    if cfg.kl_coefficient > 0:
        kl = kl_k3(logprobs, batch.reference_logprobs)
        kl_loss = cfg.kl_coefficient * masked.total(kl * batch.loss_weight, trained)
        metrics["policy/kl"] = mean(kl)
    distance = jnp.abs(log_ratio(logprobs, batch.behaviour_logprobs))
    metrics |= {
        "loss/total": policy_loss + kl_loss,
        "loss/policy": policy_loss,
        "loss/kl": kl_loss,
        "policy/ratio_mean": mean(ratio),
        "policy/clip_low_fraction": mean((ratio < 1 - cfg.clip_low) & (batch.advantages < 0)),
        "policy/clip_high_fraction": mean((ratio > 1 + cfg.clip_high) & (batch.advantages > 0)),
        "policy/entropy": mean(entropy),
        "policy/log_ratio_max": masked.maximum(distance, trained),
    }
    return policy_loss + kl_loss, jax.lax.stop_gradient(metrics)
