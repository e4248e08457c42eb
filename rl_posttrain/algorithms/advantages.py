"""From rewards to advantages: how much better than its siblings, or than expected, a completion was.

On the host, in NumPy: advantages are taken over the whole optimizer step before it is packed, split into
micro-batches or spread over devices, so that none of these can change them.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Array, Bool, Float

AdvantageKind = Literal["mean_std", "mean", "leave_one_out", "step_mean"]
ScaleKind = Literal["none", "domain", "step"]
DEVIATION_EPSILON = 1e-6  # far below the deviation of any two rewards that differ by more than 1e-5


def group_advantages(
    rewards: Float[np.ndarray | Array, "P S"],
    valid: Bool[np.ndarray | Array, "P S"],
    kind: AdvantageKind,
    scale: ScaleKind = "none",
    domains: Sequence[str] | None = None,
) -> Float[np.ndarray, "P S"]:
    """Advantages of S samples for each of P prompts, float32.

    A sample that is not valid, or whose reward is not finite, takes no part: it gets 0 and does not move the
    others. A group with fewer than two valid samples, or with equal rewards, gets exactly 0; for "step_mean" the
    group is the whole step.

    Args:
      rewards: higher is better.
      valid: False where nothing was learnt about the sample (the sandbox or the verifier failed).
      kind: a name in `ADVANTAGES`, or "step_mean": `r - mean over the step`, as REINFORCE++ without groups,
        https://arxiv.org/abs/2501.03262.
      scale: by whose deviation the advantages are divided at the end: the step's ("step"), the domain's, or
        nobody's. "mean" and "step" together are REINFORCE++ with a group baseline, same paper.
      domains: of each prompt; only for scale "domain".

    Raises:
      ValueError: an unknown kind or scale, or domains missing.
    """
    rewards = np.asarray(rewards, np.float64)
    valid = np.asarray(valid) & np.isfinite(rewards)
    centred, compared = _against_siblings(rewards, valid, kind)
    return _scaled(centred, compared, scale, domains).astype(np.float32)


def asymmetric(advantages: Float[np.ndarray, "P S"], negative_weight: float) -> Float[np.ndarray, "P S"]:
    """Negative advantages times `negative_weight`; 0 leaves only what was better than expected to learn from.

    Weights on either side of 1 are in https://arxiv.org/abs/2506.01347, which finds a weight of 10 (0.1 on the
    positive side) to keep more of the policy's diversity, and a weight of 0 to lose it.
    """
    return np.where(advantages < 0, negative_weight * advantages, advantages) + np.float32(0)  # no -0


def component_advantages(
    rewards: Float[np.ndarray, "P S K"],
    valid: Bool[np.ndarray, "P S"],
    component_weights: Float[np.ndarray, " K"],
    scale: ScaleKind = "step",
    domains: Sequence[str] | None = None,
) -> Float[np.ndarray, "P S"]:
    """Advantages from K rewards of different scale, float32: GDPO, https://arxiv.org/abs/2601.05242.

    Each component is normalised in its group by "mean_std", then they are weighted and added: no component counts
    for more because its numbers are larger, and two samples that earn the same sum in different ways stay apart.
    A component with equal rewards adds exactly 0. The sum is divided by the step's deviation. A sample of which
    any component is not finite leaves its group.

    Raises:
      ValueError: as `group_advantages`.
    """
    rewards = np.asarray(rewards, np.float64)
    valid = np.asarray(valid) & np.isfinite(rewards).all(axis=2)
    parts = [_against_siblings(rewards[..., k], valid, "mean_std") for k in range(rewards.shape[2])]
    total = sum(weight * part for weight, (part, _) in zip(component_weights, parts, strict=True))
    return _scaled(np.asarray(total), parts[0][1], scale, domains).astype(np.float32)


def step_advantages(
    rewards: Float[np.ndarray, "P S K"], present: Bool[np.ndarray, "P S K"], form: Literal["sum", "min"]
) -> Float[np.ndarray, "P S K"]:
    """Advantages of each reasoning step from rewards of steps, such as a process-reward model's, float32.

    - "sum": the steps' rewards are normalised over all steps of the group (mean, deviation), and a step gets the
      sum of its own and the later ones: https://arxiv.org/abs/2402.03300, section 4.1.3. More good steps pay more.
    - "min": a step gets the least reward from it on, less the mean over its siblings of their least reward:
      PURE, https://arxiv.org/abs/2504.15275. One bad step cannot be paid for by many good ones.

    A sample with no step, or with a present reward that is not finite, leaves its group and gets 0. So do groups with
    fewer than two samples, and those whose steps all earned the same.

    Args:
      rewards: of up to K steps of each sample, in order; higher is better.
      present: False behind a sample's last step.

    Raises:
      ValueError: an unknown form.
    """
    if form not in STEP_FORMS:
        raise ValueError(f"{form=}: known are {', '.join(STEP_FORMS)}")
    present = np.asarray(present)
    rewards = np.asarray(rewards, np.float64)
    whole = present.any(axis=2) & (np.isfinite(rewards) | ~present).all(axis=2)
    counted = present & np.expand_dims(whole, -1)
    spread = np.where(counted, rewards, -np.inf).max(axis=(1, 2)) - np.where(counted, rewards, np.inf).min(axis=(1, 2))
    signal = counted & np.reshape((whole.sum(axis=1) >= 2) & (spread > 0), (-1, 1, 1))
    return np.where(signal, STEP_FORMS[form](np.where(counted, rewards, 0.0), counted), 0.0).astype(np.float32)


def _against_siblings(rewards: np.ndarray, valid: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Unscaled advantages [P, S], and which samples had siblings to be compared with."""
    if kind == "step_mean":
        across, compared = _against_siblings(rewards.reshape(1, -1), valid.reshape(1, -1), "mean")
        return across.reshape(rewards.shape), compared.reshape(rewards.shape)
    if kind not in ADVANTAGES:
        raise ValueError(f"advantage={kind!r}: known are {', '.join([*ADVANTAGES, 'step_mean'])}")
    known = np.where(valid, rewards, 0.0)
    count = valid.sum(axis=1, keepdims=True)
    baseline = known.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(valid, known - baseline, 0.0)
    spread = np.where(valid, known, -np.inf).max(axis=1) - np.where(valid, known, np.inf).min(axis=1)
    # Equal rewards leave a rounding residue, which a deviation of the same size would blow up to about 1.
    signal = (count[:, 0] >= 2) & (spread > 0)
    return np.where(signal[:, None], ADVANTAGES[kind](centred, count), 0.0), valid & (count >= 2)


def _scaled(advantages: np.ndarray, compared: np.ndarray, scale: str, domains: Sequence[str] | None) -> np.ndarray:
    """Divides by the root of the mean square: the deviation, since each group's mean is 0.

    Groups of equal rewards count in it: where many prompts are solved already, the rest is amplified.
    """
    if scale == "none":
        return advantages
    if scale not in ("domain", "step"):
        raise ValueError(f"advantage_scale={scale!r}: known are none, domain, step")
    if scale == "domain" and (domains is None or len(domains) != len(advantages)):
        raise ValueError(f"advantage_scale='domain' needs the domain of each of {len(advantages)} prompts: {domains=}")
    names = np.asarray(domains if scale == "domain" else [""] * len(advantages))
    scaled = np.zeros_like(advantages)
    for name in np.unique(names):
        rows = names == name
        square = (advantages[rows] ** 2).sum() / max(compared[rows].sum(), 1)
        scaled[rows] = advantages[rows] / (np.sqrt(square) + DEVIATION_EPSILON)
    return scaled


def _mean(centred: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`r - mean(r)`: Dr. GRPO, https://arxiv.org/abs/2503.20783; amplifies no group of little spread."""
    return centred


def _mean_std(centred: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`(r - mean(r)) / (std(r) + 1e-6)`, population deviation: GRPO, https://arxiv.org/abs/2402.03300."""
    variance = (centred**2).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    return centred / (np.sqrt(variance) + DEVIATION_EPSILON)


def _leave_one_out(centred: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`r_i - mean(r_j, j != i) = n / (n - 1) * (r_i - mean(r))`: RLOO, https://arxiv.org/abs/2402.14740."""
    return centred * count / np.maximum(count - 1, 1)


ADVANTAGES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "mean_std": _mean_std,
    "mean": _mean,
    "leave_one_out": _leave_one_out,
}


def _sum_form(rewards: np.ndarray, counted: np.ndarray) -> np.ndarray:
    count = np.maximum(counted.sum(axis=(1, 2), keepdims=True), 1)
    centred = np.where(counted, rewards - rewards.sum(axis=(1, 2), keepdims=True) / count, 0.0)
    deviation = np.sqrt((centred**2).sum(axis=(1, 2), keepdims=True) / count)
    return np.cumsum((centred / (deviation + DEVIATION_EPSILON))[..., ::-1], axis=2)[..., ::-1]


def _min_form(rewards: np.ndarray, counted: np.ndarray) -> np.ndarray:
    least = np.minimum.accumulate(np.where(counted, rewards, np.inf)[..., ::-1], axis=2)[..., ::-1]
    samples = counted.any(axis=2)
    whole = np.where(samples, least[..., 0], 0.0)
    siblings = np.maximum(samples.sum(axis=1, keepdims=True) - 1, 1)
    baseline = (whole.sum(axis=1, keepdims=True) - whole) / siblings
    return np.where(counted, least - baseline[..., None], 0.0)


STEP_FORMS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"sum": _sum_form, "min": _min_form}
