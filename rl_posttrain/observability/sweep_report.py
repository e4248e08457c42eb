"""A sweep in numbers and pictures: `results.json` and `report.html` in its folder, from what its runs wrote.

A point is one choice of overrides; it has a run for each seed. Runs of one seed are asked the same held-out prompts,
so that a point is compared with the first one prompt by prompt, within each seed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl_posttrain.observability import lines, page, report
from rl_posttrain.observability.charts import COLOURS, Curve, Panel, change_svg, panels_svg
from rl_posttrain.observability.metrics import macro_interval, paired_interval
from rl_posttrain.observability.progress import duration
from rl_posttrain.storage import filesystem

MACRO = "macro"
MEAN = "mean of domains"
PLOTS = (  # title, metric; those that a run lacks are left out
    ("Reward in training, mean", "reward/mean"),
    ("Entropy (nats per token)", "policy/entropy"),
    ("Completion length (tokens)", "completion/length_mean"),
    ("KL from the reference (nats)", "policy/kl"),
    ("Gradient norm", "update/gradient_norm"),
)
Limits = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class SeedRun:
    """One run of a point.

    Attributes:
      directory: relative to the sweep's folder.
      detail: why it failed, with the end of its log.
    """

    seed: int
    directory: str
    status: Literal["waiting", "running", "finished", "failed", "interrupted"]
    detail: str = ""


@dataclass(frozen=True)
class Point:
    """One choice of overrides (dotted keys) and its runs, a seed each."""

    name: str
    overrides: Mapping[str, Any]
    runs: list[SeedRun]


@dataclass(frozen=True)
class Measured:
    """A point with what its finished runs wrote, by seed."""

    point: Point
    runs: Mapping[int, report.Run]

    def finals(self, domain: str) -> dict[int, report.Entry]:
        """The accuracy rows at each run's last step, by seed."""
        found = {}
        for seed, run in self.runs.items():
            rows = [row for row in run.evaluations if row["metric"] == "accuracy" and row["domain"] == domain]
            if rows:
                found[seed] = max(rows, key=lambda row: row["step"])
        return found

    @property
    def domains(self) -> list[str]:
        """The domains that any of its runs was evaluated on; without "macro"."""
        names = [row["domain"] for run in self.runs.values() for row in run.evaluations]
        return [name for name in dict.fromkeys(names) if name != MACRO]


def write(workdir: str | os.PathLike[str], title: str, points: Sequence[Point]) -> str:
    """Writes `results.json` and `report.html` into the sweep's folder, and returns the report's path."""
    measured = [_measure(Path(filesystem.join(workdir)), point) for point in points]
    rows = results(measured)
    filesystem.write_atomic(filesystem.join(workdir, "results.json"), json.dumps(rows, indent=1).encode())
    parts = [_header(title, points, rows), _summary(rows), *_pictures(measured), _by_domain(rows), _unfinished(points)]
    path = filesystem.join(workdir, "report.html")
    filesystem.write_atomic(path, page.document(f"{title}: sweep report", "\n".join(parts)).encode())
    return path


def _measure(folder: Path, point: Point) -> Measured:
    runs = {}
    for run in point.runs:
        if run.status == "finished":
            place = folder / run.directory
            document = lambda name, place=place: json.loads((place / name).read_text(encoding="utf-8"))
            metrics = sorted(lines.read(place / "metrics.jsonl"), key=lambda entry: entry["step"])
            evaluations = document("evaluation.json")
            runs[run.seed] = report.Run(place.name, metrics, evaluations, [], {}, document("config.json"), [])
    return Measured(point, runs)


def results(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The content of results.json: an entry for each point, differences being those to the first.

    `accuracy[domain]` and `accuracy["macro"]` have the mean over seeds as `value`, the 95% interval over held-out
    prompts as `low` and `high`, and `by_seed`. `difference` has the same, from pairs of equal seed and prompt, and
    `over_seeds`: (low, high), what other seeds may bring.
    Domains whose held-out prompts differ between two points have no difference.
    """
    entries = []
    for one in measured:
        accuracy = {}
        for name in [*one.domains, MACRO]:
            finals = one.finals(name)
            if finals:
                triples = [(row["value"], row["low"], row["high"]) for row in finals.values()]
                by_seed = {str(seed): row["value"] for seed, row in finals.items()}
                accuracy[name] = {**_named(macro_interval(triples)), "by_seed": by_seed}
        seconds = [sum(entry.get("time/step_s") or 0.0 for entry in run.metrics) for run in one.runs.values()]
        entries.append(
            {
                "name": one.point.name,
                "overrides": dict(one.point.overrides),
                "runs": [vars(run) for run in one.point.runs],
                "training_s": math.fsum(seconds) / len(seconds) if seconds else None,
                "accuracy": accuracy,
                "difference": differences(measured[0], one) if one is not measured[0] else {},
            }
        )
    return entries


def differences(first: Measured, second: Measured) -> dict[str, dict[str, Any]]:
    """Accuracy of `second` less that of `first` by domain, paired by seed and prompt, and macro where all domains pair.

    The macro difference weighs each domain the same, as the macro accuracy does.
    """
    found: dict[str, dict[str, Any]] = {}
    triples: list[Limits] = []
    for name in first.domains:
        before, after = first.finals(name), second.finals(name)
        pairs = {}
        for seed in sorted(before.keys() & after.keys()):
            if _same_prompts(first.runs[seed].config, second.runs[seed].config, name):
                outcomes = zip(before[seed]["outcomes"], after[seed]["outcomes"], strict=True)
                pairs[seed] = [pair for pair in outcomes if None not in pair]  # None: the verifier failed
        pairs = {seed: both for seed, both in pairs.items() if both}
        if not pairs:
            continue
        pooled = [pair for both in pairs.values() for pair in both]
        triple = paired_interval([a for a, _ in pooled], [b for _, b in pooled])
        by_seed = {str(seed): math.fsum(b - a for a, b in both) / len(both) for seed, both in pairs.items()}
        triples.append(triple)
        found[name] = {**_named(triple), "n": len(pooled), "by_seed": by_seed}
        found[name]["over_seeds"] = _over_seeds(found[name])
    if found and found.keys() == {*first.domains, *second.domains}:
        seeds = set.intersection(*(set(entry["by_seed"]) for entry in found.values()))
        by_seed = {
            seed: math.fsum(entry["by_seed"][seed] for entry in found.values()) / len(found) for seed in sorted(seeds)
        }
        count = sum(entry["n"] for entry in found.values())
        found[MACRO] = {**_named(macro_interval(triples)), "n": count, "by_seed": by_seed}
        found[MACRO]["over_seeds"] = _over_seeds(found[MACRO])
    return found


def _same_prompts(one: report.Entry, other: report.Entry, domain: str) -> bool:
    """Whether two runs of one seed were asked the same held-out questions: a sweep may vary the tasks too."""
    asked = lambda config: (config["seed"], config["evaluation"]["items"], config["tasks"][domain]["options"])
    return domain in one["tasks"] and domain in other["tasks"] and asked(one) == asked(other)


def _over_seeds(difference: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95% interval of Student 1908, "The probable error of a mean", of the seeds' differences; None below two.

    At least as wide as the interval over prompts, whose noise it contains: two seeds that happen to agree say little.
    """
    from scipy.stats import t

    values = np.array(list(difference["by_seed"].values()))
    if values.size < 2:
        return None
    half = float(t.ppf(0.975, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size))
    middle = float(values.mean())
    return min(middle - half, difference["low"]), max(middle + half, difference["high"])


def _named(limits: Limits) -> dict[str, float]:
    return dict(zip(("value", "low", "high"), limits, strict=True))


def _limits(entry: report.Entry) -> Limits:
    return entry["value"], entry["low"], entry["high"]


# ---- the page ----


def _header(title: str, points: Sequence[Point], rows: Sequence[report.Entry]) -> str:
    statuses = [run.status for point in points for run in point.runs]
    entries = [(str(len(points)), "points"), (f"{statuses.count('finished')} of {len(statuses)}", "runs finished")]
    if failed := statuses.count("failed"):
        entries.append((str(failed), "failed"))
    known = [row for row in rows if MACRO in row["accuracy"]]
    if known:
        best = max(known, key=lambda row: row["accuracy"][MACRO]["value"])
        entries.append((f"{100 * best['accuracy'][MACRO]['value']:.1f}%", f"highest accuracy: {best['name']}"))
    return f"<header><h1>{escape(title)}</h1>{page.tiles(entries)}</header>"


def _summary(rows: Sequence[report.Entry]) -> str:
    """A line for each point: accuracy, and the difference to the first over prompts and over seeds."""
    cells, pairs = [], []
    for number, row in enumerate(rows):
        macro, moved = row["accuracy"].get(MACRO), row["difference"].get(MACRO)
        done = sum(run["status"] == "finished" for run in row["runs"])
        links = ", ".join(
            f'<a href="{escape(run["directory"])}/report.html">{run["seed"]}</a>'
            if run["status"] == "finished"
            else f"{run['seed']} ({run['status']})"
            for run in row["runs"]
        )
        seeds = " ".join(f"{100 * value:+.1f}" for value in moved["by_seed"].values()) if moved else ""
        limits = moved and moved["over_seeds"]
        cells.append(
            [
                f"{number + 1}. {escape(row['name'])}",
                links,
                page.interval(*_limits(macro)) if macro else "–",
                page.change(*_limits(moved)) if moved else "first" if not number and done else "–",
                page.change(moved["value"], *limits) if limits else "–",
                f'<span class="range">{seeds}</span>' if seeds else "–",
                duration(row["training_s"]) if row["training_s"] else "–",
            ]
        )
        if number and macro and MACRO in rows[0]["accuracy"]:
            pairs.append((_short(number, row["name"], 60), _limits(rows[0]["accuracy"][MACRO]), _limits(macro)))
    columns = ["point", "seeds", "accuracy", "to the first", "over seeds", "by seed", "training time"]
    note = (
        "Held-out accuracy at the last step: the mean of domains, averaged over seeds. Differences to the first point "
        "are in percentage points, coloured where their 95% interval excludes zero. “To the first” pairs equal seeds "
        "and prompts: what other prompts would change about these very runs. “Over seeds” is the interval of the "
        "seeds' own differences (Student's t, never narrower): what other seeds would change, and the one to believe "
        "about a setting. With many points some intervals exclude zero by chance."
    )
    picture = change_svg(pairs, (f"1. {rows[0]['name']}", "the point")) if pairs else ""
    return page.section("Points", note, page.table(columns, cells, numeric=2), picture)


def _pictures(measured: Sequence[Measured]) -> list[str]:
    """Curves of the points, as many in a picture as there are colours; the first point is in each."""
    known = [(number, one) for number, one in enumerate(measured) if one.runs]
    if not known:
        return []
    size = len(COLOURS)
    groups = [known[:size]] + [
        [known[0], *known[i : i + size - 1]] for i in range(size, len(known), size - 1)
    ]  # fmt: skip
    domains = list(dict.fromkeys(name for _, one in known for name in one.domains))
    note = (
        "Means over the finished seeds. Bars of held-out points are the range over seeds; with one seed, the 95% "
        "interval over prompts. Training curves: each step faintly, smoothed in bold. Numbers are the points'."
    )
    sections = []
    for group in groups:
        heading = "" if len(groups) == 1 else f", points {', '.join(str(number + 1) for number, _ in group)}"
        panels = [Panel(f"Held-out accuracy, {MEAN} (%)", _held_out(group, MACRO, named=True))]
        panels += [Panel(title, found) for title, name in PLOTS if (found := _training(group, name))]
        curves = panels_svg(panels, f"curves of each point{heading}", columns=2)
        each = [Panel(f"{name} (%)", _held_out(group, name)) for name in domains]
        detail = page.fold("Held-out accuracy, domain by domain", panels_svg(each, "accuracy by domain"))
        sections.append(page.section(f"Curves{heading}", note, curves, detail if domains else ""))
    return sections


def _held_out(group: Sequence[tuple[int, Measured]], domain: str, named: bool = False) -> list[Curve]:
    """In percent, on an axis that fits: points of a sweep often lie close together. `named`: with a full legend."""
    curves = []
    for place, (number, one) in enumerate(group):
        seeds = [
            {row["step"]: row for row in run.evaluations if (row["domain"], row["metric"]) == (domain, "accuracy")}
            for run in one.runs.values()
        ]
        steps = sorted(set.intersection(*(set(rows) for rows in seeds)))
        if not steps:
            continue
        columns = ("value", "low", "high")
        values, low, high = 100 * np.array([[[rows[s][key] for s in steps] for rows in seeds] for key in columns])
        if len(seeds) > 1:
            low, high = values.min(0, keepdims=True), values.max(0, keepdims=True)
        # Points of one step stand side by side, so that their bars do not hide each other.
        shift = 0.006 * (steps[-1] - steps[0]) * (place - (len(group) - 1) / 2)
        label = _short(number, one.point.name) if named else str(number + 1)
        curves.append(Curve(label, np.array(steps) + shift, values.mean(0), low[0], high[0]))
    return curves


def _training(group: Sequence[tuple[int, Measured]], metric: str) -> list[Curve]:
    curves = []
    for number, one in group:
        found = [curve for run in one.runs.values() if (curve := report.curve(run, metric)) is not None]
        if len(found) < len(one.runs):
            continue
        values = [dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) for curve in found]
        steps = sorted(set.intersection(*(set(each) for each in values)))
        if steps:
            mean = np.mean([[each[step] for step in steps] for each in values], axis=0)
            curves.append(Curve(str(number + 1), np.array(steps), mean))
    return curves


def _by_domain(rows: Sequence[report.Entry]) -> str:
    """Every point by every domain: accuracy, and the difference to the first point."""
    names = list(dict.fromkeys(name for row in rows for name in row["accuracy"]))
    names.sort(key=lambda name: name == MACRO)  # the mean stands last, the others as they come
    if not names:
        return ""

    def listing(key: str, shown: Any, chosen: Sequence[tuple[int, report.Entry]]) -> str:
        cells = [
            [
                f"{number + 1}. {escape(row['name'])}",
                *(shown(*_limits(row[key][name])) if name in row[key] else "–" for name in names),
            ]
            for number, row in chosen
        ]
        return page.table(["point", *(MEAN if name == MACRO else name for name in names)], cells, numeric=1)

    numbered = list(enumerate(rows))
    note = "Means over seeds, with 95% intervals over held-out prompts; then differences to the first point, paired."
    tables = [listing("accuracy", page.interval, numbered)]
    if any(row["difference"] for row in rows):
        tables.append(listing("difference", page.change, numbered[1:]))
    return page.section("By domain", note, *tables)


def _unfinished(points: Sequence[Point]) -> str:
    """The runs that failed, with the end of their logs."""
    folds = [
        page.fold(f"{escape(point.name)}, seed {run.seed}", f"<pre>{escape(run.detail)}</pre>", opened=True)
        for point in points
        for run in point.runs
        if run.status == "failed"
    ]
    return page.section("Failed runs", "They are started again by the same command.", *folds) if folds else ""


def _short(number: int, name: str, longest: int = 44) -> str:
    """A point in a legend."""
    whole = f"{number + 1}. {name}"
    return whole if len(whole) <= longest else whole[: longest - 1] + "…"
