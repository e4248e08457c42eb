"""What the run measures: the writers (metrics.jsonl, TensorBoard), averages over domains, and intervals.

Scalars are named `group/name`. Imports no JAX.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensorboardX import SummaryWriter

from rl_posttrain.observability import lines


class MetricsWriter:
    """Writes each step to `metrics.jsonl` and to `tensorboard/` in the workdir."""

    def __init__(self, workdir: str | os.PathLike[str], purge_after: int | None = None) -> None:
        """Opens the files, and creates the workdir when absent.

        Args:
          purge_after: the step of the checkpoint that the run resumes from. What was written past it is
            dropped from metrics.jsonl and hidden from TensorBoard: each step shows once. None for a new run,
            which drops all that an attempt without a checkpoint had left.
        """
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        last_kept = -1 if purge_after is None else purge_after
        lines.truncate_after(self.path, last_kept)
        logs = folder / "tensorboard"
        # Event files are named by the second and opened for overwriting: the suffix keeps a quick restart
        # apart, and in order.
        started = len(list(logs.glob("events.*")))
        self._tensorboard = SummaryWriter(
            str(logs),
            purge_step=last_kept + 1 if started else None,
            flush_secs=5,
            filename_suffix=f".{started:06d}",
        )

    def write(
        self,
        step: int,
        stage: str,
        scalars: Mapping[str, Any],
        histograms: Mapping[str, Sequence[float]] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Writes one step.

        Args:
          step: loop steps done in the whole run; it does not start again with a new stage.
          stage: "sft", "grpo", ...
          scalars: slash-named numbers. NaN and infinity become null in metrics.jsonl, where a field
            `nonfinite` then says which: `{"loss/total": null, "nonfinite": {"loss/total": "nan"}}`.
          histograms: for TensorBoard only, like texts. Empty ones and those with NaN have no bins: left out.

        Raises:
          TypeError: a scalar is not a number.
        """
        numbers, nonfinite = lines.clean(scalars)
        entry: dict[str, Any] = {"step": step, "stage": stage, **numbers}
        if nonfinite:
            entry["nonfinite"] = nonfinite
        lines.append(self.path, entry)
        for name, number in numbers.items():
            if number is not None:
                self._tensorboard.add_scalar(name, number, step)
        for name, values in (histograms or {}).items():
            array = np.asarray(values, np.float64).ravel()
            if array.size and np.isfinite(array).all():
                self._tensorboard.add_histogram(name, array, step)
        for name, text in (texts or {}).items():
            self._tensorboard.add_text(name, text, step)

    def close(self) -> None:
        """Writes out what TensorBoard still holds."""
        self._tensorboard.close()


def aggregate(samples: Mapping[str, Iterable[Mapping[str, float | None]]]) -> dict[str, float]:
    """Means of each field over one domain's samples, over all samples, and over domains.

    `aggregate({"math": [{"accuracy": 1}, ...], "code": [{"accuracy": 0, "compile_s": 0.2}]})` gives

      domain/<domain>/<field>   mean over the samples of the domain that have the field
      micro/<field>             mean over all samples that have it: large domains weigh more
      macro/<field>             mean over the domains that have it: each weighs the same

    Samples may have different fields; None is a missing one.
    """
    means: dict[str, float] = {}
    pooled: dict[str, list[float]] = {}
    by_domain: dict[str, list[float]] = {}
    for domain, entries in samples.items():
        columns: dict[str, list[float]] = {}
        for entry in entries:
            for field, value in entry.items():
                if value is not None:
                    columns.setdefault(field, []).append(float(value))
        for field, values in columns.items():
            means[f"domain/{domain}/{field}"] = math.fsum(values) / len(values)
            by_domain.setdefault(field, []).append(means[f"domain/{domain}/{field}"])
            pooled.setdefault(field, []).extend(values)
    for field, values in pooled.items():
        means[f"micro/{field}"] = math.fsum(values) / len(values)
        means[f"macro/{field}"] = math.fsum(by_domain[field]) / len(by_domain[field])
    return means


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval of a proportion, (low, high). Wilson 1927, "Probable inference". (0, 1) when n is 0.

    Raises:
      ValueError: `successes` is not in [0, n].
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}: must be between 0 and n")
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


class CalibrationBin(NamedTuple):
    """Predictions in [low, high) and what came of them; the last bin includes 1."""

    low: float
    high: float
    count: int
    predicted: float  # mean probability
    observed: float  # share of outcomes
    observed_low: float  # its Wilson interval
    observed_high: float


def calibration_curve(
    probabilities: Sequence[float] | np.ndarray, outcomes: Sequence[float] | np.ndarray, bins: int = 10
) -> list[CalibrationBin]:
    """How often what was predicted with some probability came true, by bins of equal width; empty ones left out.

    Guo et al. 2017, https://arxiv.org/abs/1706.04599.

    Args:
      outcomes: 1 or 0, or a share between.

    Raises:
      ValueError: unequal lengths, no predictions, a number outside [0, 1], or `bins` below 1.
    """
    predicted, came = np.asarray(probabilities, np.float64), np.asarray(outcomes, np.float64)
    if predicted.shape != came.shape or predicted.ndim != 1 or predicted.size == 0 or bins < 1:
        raise ValueError(
            f"{predicted.shape} probabilities, {came.shape} outcomes and {bins=}: need as many of both, and at least 1"
        )
    if not ((predicted >= 0) & (predicted <= 1) & (came >= 0) & (came <= 1)).all():
        raise ValueError("probabilities and outcomes must be in [0, 1]: of a margin, take the sigmoid")
    place = np.minimum((predicted * bins).astype(int), bins - 1)
    curve = []
    for i in np.unique(place).tolist():
        inside = place == i
        count, happened = int(inside.sum()), float(came[inside].sum())
        observed = happened / count
        curve.append(
            CalibrationBin(
                i / bins, (i + 1) / bins, count, predicted[inside].mean(), observed, *wilson(happened, count)
            )
        )
    return curve


def pair_calibration(margins: Sequence[float] | np.ndarray, bins: int = 5) -> list[CalibrationBin]:
    """The calibration of a reward model on pairs: how often the completion that it scores higher is the chosen one, by
    the probability, from 0.5 to 1, that Bradley and Terry's model gives it. A tie is right half the time.

    Args:
      margins: the chosen's score minus the rejected's, of each pair.
      bins: of equal width, over [0.5, 1].
    """
    ahead = np.asarray(margins, np.float64)
    confidence = 1.0 / (1.0 + np.exp(-np.abs(ahead)))
    return calibration_curve(confidence, 0.5 * (1.0 + np.sign(ahead)), 2 * bins)  # the lower half stays empty


def calibration_error(curve: Sequence[CalibrationBin]) -> float:
    """The mean distance of predicted and observed over all predictions (expected calibration error; Guo et al.)."""
    return math.fsum(row.count * abs(row.predicted - row.observed) for row in curve) / sum(row.count for row in curve)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k samples passes, unbiased, from c passes among n: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, "Evaluating large language models trained on code", https://arxiv.org/abs/2107.03374.

    Raises:
      ValueError: k is not in [1, n], or c not in [0, n].
    """
    if not 1 <= k <= n:
        raise ValueError(f"k={k} of n={n} samples: k must be between 1 and n; draw more samples")
    if not 0 <= c <= n:
        raise ValueError(f"c={c} passes of n={n} samples: must be between 0 and n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def paired_interval(before: Sequence[float], after: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """The mean change over the same tasks before and after, with its interval: (difference, low, high).

    Scores are in [0, 1], one per task and in the same order. The interval adds half a pair to each of the
    four outcomes, so that it keeps a width when all pairs agree. Agresti and Min 2005, "Simple improved
    confidence intervals for comparing matched proportions", Statistics in Medicine 24.

    Raises:
      ValueError: unequal lengths, no pairs, or a score outside [0, 1].
    """
    first, second = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if first.shape != second.shape or first.ndim != 1 or first.size == 0:
        raise ValueError(f"{first.shape} scores before and {second.shape} after: need the same tasks, at least 1")
    if min(first.min(), second.min()) < 0 or max(first.max(), second.max()) > 1:
        raise ValueError("scores must be in [0, 1]: pass the share of passed samples per task")
    change = second - first
    # The half pairs (0,0), (1,1), (0,1), (1,0) change by 0, 0, +1, -1: together 0, and their squares 1.
    n = change.size + 2
    mean = change.sum() / n
    half = z * math.sqrt((np.square(change).sum() + 1) / n - mean**2) / math.sqrt(n)
    return float(change.mean()), float(max(-1.0, mean - half)), float(min(1.0, mean + half))


def macro_interval(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """The mean of independent (value, low, high), each weighing the same, with its interval.

    The distances to the limits add in quadrature on each side (MOVER: Zou and Donner 2008, "Construction of
    confidence limits about effect measures", Statistics in Medicine 27).

    Raises:
      ValueError: `rows` is empty.
    """
    if not rows:
        raise ValueError("no domains to average: pass at least one (value, low, high)")
    value = math.fsum(row[0] for row in rows) / len(rows)
    below = math.sqrt(math.fsum((row[0] - row[1]) ** 2 for row in rows)) / len(rows)
    above = math.sqrt(math.fsum((row[2] - row[0]) ** 2 for row in rows)) / len(rows)
    return value, value - below, value + above
