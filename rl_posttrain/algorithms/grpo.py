"""The policy-gradient family by configuration: GRPO, https://arxiv.org/abs/2402.03300, and its relatives.

    loss = sum over tokens of loss_weight * (
        kl_coefficient * kl - correction * surrogate(ratio, A) - entropy_coefficient * entropy
    )

Each word is a choice by name in `AlgorithmConfig`; `configs/algorithms.py` spells the published recipes. `advantage`
and `aggregation` act on the host, before packing, through `advantages.group_advantages` and `losses.sample_weights`,
as do `negative_weight` and a KL penalty of the reward; the rest acts here. Everything returned is additive over
micro-batches, but for metrics named `*_max`, which combine by maximum.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_posttrain.algorithms import masked, surrogates
from rl_posttrain.algorithms.advantages import AdvantageKind, ScaleKind
from rl_posttrain.algorithms.corrections import CorrectionKind, check_bounds, correction_weights
from rl_posttrain.algorithms.kl import KL_VALUES, KlKind, kl_k3, kl_term
from rl_posttrain.algorithms.losses import AggregationKind, check_constant_length
from rl_posttrain.algorithms.ratios import RatioKind, log_ratio, ratio
from rl_posttrain.algorithms.surrogates import Hits, SurrogateKind
from rl_posttrain.batch import Batch


@dataclass(frozen=True)
class AlgorithmConfig:
    """Which objective: a choice of advantage, aggregation, ratio, surrogate, correction, KL term and entropy bonus.

    Raises:
      ValueError: a value out of range, or one without effect.
    """

    advantage: AdvantageKind = "mean_std"
    advantage_scale: ScaleKind = "none"  # by whose deviation advantages are divided at the end
    negative_weight: float = 1.0  # what advantages below 0 are multiplied with at the very end; 0: positive only
    aggregation: AggregationKind = "token_mean"
    constant_length: int | None = None  # tokens; the denominator of aggregation "constant_length"
    domain_weights: dict[str, float] = field(default_factory=dict)  # in the loss's average; 1 for a domain left out
    ratio: RatioKind = "token"
    proximal: Literal["behaviour", "step_start"] = "behaviour"  # the policy that the ratio is measured from
    surrogate: SurrogateKind = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None  # of surrogate "clip": the largest ratio that counts where A < 0
    gate_positive: float = 1.0  # of surrogate "soft_gate": how fast it fades, where A > 0
    gate_negative: float = 1.05  # and elsewhere
    correction: CorrectionKind = "none"  # importance weights of the proximal policy against the one that sampled
    correction_low: float | None = None
    correction_high: float | None = None
    kl: KlKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_coefficient: float = 0.0  # of the term or the penalty against the reference policy; 0 needs no reference
    kl_target: float | None = None  # nats per token; adapts the coefficient of a penalty in the reward to it
    reference_every: int | None = None  # steps after which the reference moves towards the policy; None: it is frozen
    reference_mixture: float = 1.0  # how far: 1 replaces it, less is a moving average
    entropy_coefficient: float = 0.0  # of the bonus on each trained token's entropy; with a target, the first one
    entropy_target: float | None = None  # nats per token; the coefficient rises while the entropy is below it
    entropy_step: float = 0.005  # by so much a step, and falls by as much while it is above

    def __post_init__(self) -> None:
        check_constant_length(self.aggregation, self.constant_length)
        _check_average(self)
        _check_surrogate(self)
        _check_correction(self)
        _check_kl(self)
        _check_entropy(self)

    def check_domains(self, known: Iterable[str]) -> None:
        """Refuses weights of domains that are not in the run."""
        unknown = sorted(set(self.domain_weights) - set(known))
        if unknown:
            raise ValueError(f"algorithm.domain_weights: {unknown[0]!r} is not in tasks: {', '.join(known)}")


def _refuse_changed(cfg: AlgorithmConfig, names: Iterable[str], where: str) -> None:
    """Refuses fields that have no effect, unless they have their defaults."""
    defaults = {f.name: f.default for f in fields(AlgorithmConfig)}
    for name in names:
        if getattr(cfg, name) != defaults[name]:
            raise ValueError(f"{name}={getattr(cfg, name)!r} has no effect with {where}: leave it out")


def _check_average(cfg: AlgorithmConfig) -> None:
    if cfg.advantage == "mean_std" and cfg.advantage_scale != "none":
        raise ValueError(
            f"advantage_scale={cfg.advantage_scale!r}: advantage='mean_std' is scaled by its group; use 'mean'"
        )
    if not 0 <= cfg.negative_weight < float("inf"):
        raise ValueError(f"negative_weight={cfg.negative_weight} must be at least 0 (0: positive advantages only)")
    for name, weight in cfg.domain_weights.items():
        if not 0 <= weight < float("inf"):
            raise ValueError(f"domain_weights[{name!r}]={weight} must be at least 0")


def _check_surrogate(cfg: AlgorithmConfig) -> None:
    where = f"surrogate={cfg.surrogate!r}"
    if cfg.surrogate not in ("clip", "cispo"):
        _refuse_changed(cfg, ("clip_low", "clip_high"), where)
    if cfg.surrogate != "clip":
        _refuse_changed(cfg, ("dual_clip",), where)
    if cfg.surrogate != "soft_gate":
        _refuse_changed(cfg, ("gate_positive", "gate_negative"), where)
    if cfg.surrogate == "reinforce":
        _refuse_changed(cfg, ("ratio",), where)
    if cfg.surrogate == "cispo" and cfg.ratio == "sequence_token":
        raise ValueError("ratio='sequence_token' differs from 'sequence' in its gradient, which cispo drops: use that")
    if not 0 < cfg.clip_low <= 1:
        raise ValueError(f"clip_low={cfg.clip_low} must be in (0, 1]: the ratio is kept above 1 - clip_low")
    if not 0 < cfg.clip_high < float("inf"):
        raise ValueError(f"clip_high={cfg.clip_high} must be above 0: the ratio is kept below 1 + clip_high")
    if cfg.dual_clip is not None and not 1 < cfg.dual_clip < float("inf"):
        raise ValueError(f"dual_clip={cfg.dual_clip} must be above 1: at ratio 1 every token must have its gradient")
    for name in ("gate_positive", "gate_negative"):
        if not 0 < getattr(cfg, name) < float("inf"):
            raise ValueError(f"{name}={getattr(cfg, name)} must be above 0")


def _check_correction(cfg: AlgorithmConfig) -> None:
    check_bounds(cfg.correction, cfg.correction_low, cfg.correction_high)
    if cfg.surrogate == "reinforce":
        if cfg.correction == "none":
            _refuse_changed(cfg, ("proximal",), "surrogate='reinforce' and correction='none'")
    elif cfg.correction != "none" and cfg.proximal == "behaviour":
        raise ValueError(
            f"correction={cfg.correction!r}: a ratio measured from the policy that sampled corrects already; set "
            "proximal='step_start'"
        )


def _check_kl(cfg: AlgorithmConfig) -> None:
    if not 0 <= cfg.kl_coefficient < float("inf"):
        raise ValueError(f"kl_coefficient={cfg.kl_coefficient} must be at least 0")
    if cfg.kl_coefficient == 0:
        named = ("kl", "kl_in", "kl_target", "reference_every", "reference_mixture")
        _refuse_changed(cfg, named, f"kl_coefficient={cfg.kl_coefficient}")
    if cfg.kl_in == "loss" and cfg.kl == "k1":
        raise ValueError("kl='k1' in the loss has an expected gradient of 0: use 'k2' or 'k3', or kl_in='reward'")
    if cfg.kl_in == "reward" and cfg.kl not in KL_VALUES:
        raise ValueError(f"kl={cfg.kl!r} differs from 'k3' in its gradient, and a reward has none: use 'k1'")
    if cfg.kl_target is not None and (cfg.kl_in == "loss" or not 0 < cfg.kl_target < float("inf")):
        raise ValueError(f"kl_target={cfg.kl_target} must be above 0, and acts on a penalty: use kl_in='reward'")
    if cfg.reference_every is not None and cfg.reference_every < 1:
        raise ValueError(f"reference_every={cfg.reference_every} must be at least 1")
    if not 0 < cfg.reference_mixture <= 1:
        raise ValueError(f"reference_mixture={cfg.reference_mixture} must be in (0, 1]")
    if cfg.reference_every is None:
        _refuse_changed(cfg, ("reference_mixture",), "reference_every=None")


def _check_entropy(cfg: AlgorithmConfig) -> None:
    if not 0 <= cfg.entropy_coefficient < float("inf"):
        raise ValueError(f"entropy_coefficient={cfg.entropy_coefficient} must be at least 0")
    if cfg.entropy_target is None:
        _refuse_changed(cfg, ("entropy_step",), "entropy_target=None")
    elif not 0 < cfg.entropy_target < float("inf"):
        raise ValueError(f"entropy_target={cfg.entropy_target} must be above 0")
    if not 0 < cfg.entropy_step < float("inf"):
        raise ValueError(f"entropy_step={cfg.entropy_step} must be above 0: the coefficient would never move")


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
      entropy: of the policy at each position, nats.
      batch: with advantages and behaviour log-probabilities, reference ones for a KL term in the loss, proximal ones
        for `proximal="step_start"`, and the entropy bonus's coefficient where there is one.
      token_count: trained tokens of the whole optimizer step, at least 1.

    Returns:
      The scalar, and sums over the trained tokens divided by `token_count`.
    """
    trained = batch.loss_weight > 0
    # Hidden once, here: below, what is not trained is 0, finite, and without a gradient.
    show = lambda x: masked.visible(x, trained)
    logprobs, entropy = show(logprobs), show(entropy)
    behaviour, advantages = show(batch.behaviour_logprobs), show(batch.advantages)
    proximal = show(batch.proximal_logprobs) if cfg.proximal == "step_start" else None
    measured_from = behaviour if proximal is None else proximal
    ratios = ratio(cfg.ratio, logprobs, measured_from, trained, batch.segments)
    objective, hits = SURROGATES[cfg.surrogate](ratios, logprobs, advantages, cfg)
    start = logprobs if proximal is None else proximal
    correction, correction_hits = correction_weights(
        cfg.correction, start, behaviour, trained, batch.segments, cfg.correction_low, cfg.correction_high
    )
    hits |= {f"correction_{name}": hit for name, hit in correction_hits.items()}
    policy_loss = masked.total(-objective * correction * batch.loss_weight, trained)
    mean = lambda x: masked.total(x.astype(jnp.float32), trained) / token_count
    metrics = {f"policy/{name}_fraction": mean(hit) for name, hit in hits.items()}
    kl_loss = jnp.zeros((), jnp.float32)
    if uses_reference_in_loss(cfg):
        reference = show(batch.reference_logprobs)
        term = kl_term(cfg.kl, logprobs, reference, behaviour)
        kl_loss = cfg.kl_coefficient * masked.total(term * batch.loss_weight, trained)
        metrics["policy/kl"] = mean(kl_k3(logprobs, reference))
    scalar = policy_loss + kl_loss
    if uses_entropy(cfg):
        # Of each token's own distribution. That a token leads to places of more entropy is not credited to it.
        metrics["loss/entropy"] = -masked.total(batch.entropy_coefficient * entropy * batch.loss_weight, trained)
        scalar += metrics["loss/entropy"]
    metrics |= {
        "loss/total": scalar,
        "loss/policy": policy_loss,
        "loss/kl": kl_loss,
        "policy/ratio_mean": mean(ratios),
        "policy/entropy": mean(entropy),
        "policy/log_ratio_max": masked.maximum(jnp.abs(log_ratio(logprobs, behaviour)), trained),
    }
    if cfg.correction != "none":
        metrics["policy/correction_mean"] = mean(correction)
    return scalar, jax.lax.stop_gradient(metrics)


def uses_reference_in_loss(cfg: AlgorithmConfig) -> bool:
    """Whether the rows need the reference policy's logprobs."""
    return cfg.kl_coefficient > 0 and cfg.kl_in == "loss"


def uses_entropy(cfg: AlgorithmConfig) -> bool:
    """Whether the rows need the coefficient of an entropy bonus."""
    return cfg.entropy_coefficient > 0 or cfg.entropy_target is not None


def adapted_entropy_coefficient(coefficient: float, entropy: float, target: float, step: float) -> float:
    """The next coefficient of an entropy bonus that should keep `entropy` from falling below `target`, nats per token.

    One step up below the target, one down above it, and never below 0: https://arxiv.org/abs/2505.22312, without its
    switch that takes the bonus off as soon as the target is met.
    """
    return max(0.0, coefficient + (step if entropy < target else -step))


def _clip(ratios: Array, logprobs: Array, advantages: Array, cfg: AlgorithmConfig) -> tuple[Array, Hits]:
    bounds = (cfg.clip_low, cfg.clip_high, cfg.dual_clip)
    return surrogates.clipped_surrogate(ratios, advantages, *bounds), surrogates.clipped_hits(
        ratios, advantages, *bounds
    )


def _cispo(ratios: Array, logprobs: Array, advantages: Array, cfg: AlgorithmConfig) -> tuple[Array, Hits]:
    objective = surrogates.cispo(ratios, logprobs, advantages, cfg.clip_low, cfg.clip_high)
    return objective, surrogates.cispo_hits(ratios, cfg.clip_low, cfg.clip_high)


def _soft_gate(ratios: Array, logprobs: Array, advantages: Array, cfg: AlgorithmConfig) -> tuple[Array, Hits]:
    return surrogates.soft_gate(ratios, advantages, cfg.gate_positive, cfg.gate_negative), {}


def _reinforce(ratios: Array, logprobs: Array, advantages: Array, cfg: AlgorithmConfig) -> tuple[Array, Hits]:
    return surrogates.reinforce(logprobs, advantages), {}


# (ratios, logprobs, advantages, cfg) -> (objective per token, where a bound was hit)
SURROGATES: dict[str, Callable[[Array, Array, Array, AlgorithmConfig], tuple[Array, dict[str, Bool[Array, "B T"]]]]] = {
    "clip": _clip,
    "cispo": _cispo,
    "soft_gate": _soft_gate,
    "reinforce": _reinforce,
}
