"""Held-out accuracy: the same prompts before, during and after, each verdict kept so that changes are paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rl_posttrain.batch import Params
from rl_posttrain.data.tokenizer import Tokenizer
from rl_posttrain.model.transformer import ModelConfig
from rl_posttrain.observability.metrics import macro_interval, paired_interval, pass_at_k, wilson
from rl_posttrain.rewards.verifiers import verify
from rl_posttrain.rollout.generate import generate
from rl_posttrain.rollout.sampling import Sampling
from rl_posttrain.tasks.registry import Domain, heldout
from rl_posttrain.types import Rollout, Verdict

EVALUATION = 3  # folded into the run's key: never the draws of training
Row = dict[str, Any]  # a line of evaluation.json: stage, step, domain, metric, value, low, high, n


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation (config section `evaluation`)."""

    every: int = 50  # steps between evaluations; the first, each stage's end and the last always happen
    items: int = 256  # distinct held-out prompts per domain, the same at every evaluation
    samples: int = 1  # completions per prompt; above 1 also reports pass@k
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0
    top_p: float = 1.0
    rows: int = 256  # prompts decoded at a time

    def __post_init__(self):
        for name in ("every", "items", "samples", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.samples > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"samples={self.samples} at temperature=0 would all be equal: use samples=1 or a temperature"
            )
        if self.temperature == 0 and (self.top_k or self.top_p != 1):
            raise ValueError(
                f"top_k={self.top_k}, top_p={self.top_p} has no effect at temperature=0, which is greedy: leave it "
                "out, or set a temperature"
            )

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Outcomes:
    """The verdicts on one domain's held-out prompts, in order of index."""

    rollouts: list[list[Rollout]]  # [items][samples]
    verdicts: list[list[Verdict]]

    @property
    def passed(self) -> np.ndarray:
        """float32 [items, samples]; NaN where the verifier failed, which is not a wrong answer."""
        value = lambda verdict: np.nan if verdict.status == "infra_error" else float(verdict.passed)
        return np.array([[value(verdict) for verdict in group] for group in self.verdicts], np.float32)


def evaluate(
    params: Params,
    domains: Mapping[str, Domain],
    config: EvaluationConfig,
    *,
    tokenizer: Tokenizer,
    model_cfg: ModelConfig,
    max_tokens: int,
    prompt_bucket: int,
    seed: int,
    policy_version: int,
) -> dict[str, Outcomes]:
    """Completes and judges `config.items` distinct held-out prompts of every domain.

    The draw depends on (seed, task, sample) and the policy alone: an unchanged policy gives unchanged outcomes.
    """
    tasks = [task for domain in domains.values() for task in heldout(domain, seed, config.items)]
    groups = generate(
        params,
        tasks,
        tokenizer=tokenizer,
        model_cfg=model_cfg,
        sampling=config.sampling,
        width=config.samples,
        max_tokens=max_tokens,
        prompt_bucket=prompt_bucket,
        rows=config.rows,
        key=jax.random.fold_in(jax.random.key(seed), EVALUATION),
        policy_version=policy_version,
    )
    judged = iter(verify(domains, [rollout for group in groups for rollout in group]))
    outcomes = {}
    for i, name in enumerate(domains):
        rollouts = groups[i * config.items : (i + 1) * config.items]
        outcomes[name] = Outcomes(rollouts, [[next(judged) for _ in group] for group in rollouts])
    return outcomes


def rows(outcomes: Mapping[str, Outcomes], stage: str, step: int) -> list[Row]:
    """Accuracy per domain with Wilson intervals, pass@k where there are several samples, and the macro averages.

    With several samples of a prompt the interval is that of the mean over prompts, since a prompt's samples are not
    independent. Each accuracy row carries its `outcomes` (share passed, per prompt) for paired comparison.
    """
    result: list[Row] = []
    for name, outcome in outcomes.items():
        result += _domain_rows(name, outcome.passed, stage, step)
    for metric in dict.fromkeys(row["metric"] for row in result):
        result.append(_macro_row([row for row in result if row["metric"] == metric]))
    return result


def pair_row(margins: np.ndarray, step: int) -> Row:
    """The share of held-out preference pairs whose margin is above 0, with its interval; 0 is right half the time."""
    right, count = float(np.sum(0.5 * (1.0 + np.sign(margins)))), len(margins)
    return _row("preference", step, "preference", "pair_accuracy", right / count, *wilson(right, count), count)


def _domain_rows(name: str, passed: np.ndarray, stage: str, step: int) -> list[Row]:
    judged = np.isfinite(passed)
    counts, right = judged.sum(1), np.nansum(passed, 1)
    usable = counts > 0
    if not usable.any():
        raise RuntimeError(f"{name}: the verifier failed on every held-out item, so there is no accuracy to report")
    shares = right[usable] / counts[usable]
    items, value = int(usable.sum()), float(shares.mean())
    low, high = wilson(value * items, items)
    row = _row(stage, step, name, "accuracy", value, low, high, items)
    row["outcomes"] = [float(r / c) if c else None for r, c in zip(right, counts)]
    result = [row]
    k = 2
    while k <= passed.shape[1]:
        estimates = [pass_at_k(int(c), int(r), k) for c, r in zip(counts, right) if c >= k]
        if estimates:
            value = float(np.mean(estimates))
            low, high = wilson(value * len(estimates), len(estimates))
            result.append(_row(stage, step, name, f"pass@{k}", value, low, high, len(estimates)))
        k *= 2
    return result


def _macro_row(rows_: Sequence[Row]) -> Row:
    """The average over domains, each weighing the same."""
    value, low, high = macro_interval([(row["value"], row["low"], row["high"]) for row in rows_])
    first, count = rows_[0], sum(row["n"] for row in rows_)
    return _row(first["stage"], first["step"], "macro", first["metric"], value, low, high, count)


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """Paired differences in accuracy, domain by domain and macro: rows with metric `accuracy_change`."""
    first = {row["domain"]: row for row in before if row["metric"] == "accuracy"}
    result: list[Row] = []
    for row in after:
        if row["metric"] != "accuracy" or "outcomes" not in row:
            continue
        pairs = [(a, b) for a, b in zip(first[row["domain"]]["outcomes"], row["outcomes"]) if None not in (a, b)]
        difference, low, high = paired_interval([a for a, _ in pairs], [b for _, b in pairs])
        result.append(
            _row(row["stage"], row["step"], row["domain"], "accuracy_change", difference, low, high, len(pairs))
        )
    return [*result, _macro_row(result)]


def _row(stage: str, step: int, domain: str, metric: str, value: float, low: float, high: float, n: int) -> Row:
    return dict(stage=stage, step=step, domain=domain, metric=metric, value=value, low=low, high=high, n=n)


def macro(rows_: Sequence[Row]) -> float:
    """The macro-averaged accuracy among rows of one evaluation."""
    return next(row["value"] for row in rows_ if row["domain"] == "macro" and row["metric"] == "accuracy")
