"""The run in pictures: `report.html` in the workdir, one file that opens offline.

It is drawn from what the run wrote: metrics.jsonl, evaluation.json, alerts.jsonl, trajectories, manifest.json
and config.json. What is missing leaves its section out. Model output is hostile text: shown, never obeyed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rl_posttrain.observability import alerts, lines, page
from rl_posttrain.observability.charts import Curve, Panel, change_svg, panels_svg, stacked_svg
from rl_posttrain.observability.progress import duration
from rl_posttrain.storage import filesystem, trajectories

Entry = Mapping[str, Any]
HEALTH = (  # title, metrics, whether they are shares
    ("Completion length (tokens)", ("completion/length_mean",), False),
    ("Truncated completions", ("completion/truncated_fraction",), True),
    ("Groups without signal", ("group/zero_signal_fraction",), True),
    ("Entropy (nats per token)", ("policy/entropy",), False),
    ("KL from the reference (nats)", ("policy/kl",), False),
    ("Clipped tokens (share)", ("policy/clip_low_fraction", "policy/clip_high_fraction"), False),
    ("Importance ratio, mean", ("policy/ratio_mean",), False),
    ("Log-ratio, largest", ("policy/log_ratio_max",), False),
    ("Gradient norm", ("update/gradient_norm",), False),
    ("Learning rate", ("update/learning_rate",), False),
    ("Tokens per second", ("tokens/per_s",), False),
)
SAMPLE_COLUMNS = (
    "step",
    "task",
    "domain",
    "prompt",
    "text",
    "status",
    "tests",
    "reward",
    "finish_reason",
    "detail",
)
LONGEST = 6000  # characters of one text shown


@dataclass(frozen=True)
class Run:
    """What a workdir holds."""

    name: str
    metrics: Sequence[Entry]  # by step
    evaluations: Sequence[Entry]
    alerts: Sequence[Entry]
    manifest: Entry
    config: Entry
    samples: Sequence[Entry]  # rows of the trajectory store

    @property
    def stages(self) -> list[tuple[int, str]]:
        """(first step, name) of each stage that trains."""
        found: dict[str, int] = {}
        for entry in self.metrics:
            if entry["stage"] != "baseline":
                found.setdefault(entry["stage"], entry["step"])
        return sorted((step, name) for name, step in found.items())


def render(workdir: str | os.PathLike[str]) -> str:
    """Writes `report.html` and returns its path.

    Raises:
      FileNotFoundError: the workdir holds neither metrics nor evaluations.
    """
    run = load(workdir)
    if not run.metrics and not run.evaluations:
        raise FileNotFoundError(f"{workdir} holds no metrics.jsonl and no evaluation.json: is it a run's workdir?")
    parts = (_header, _accuracy, _domains, _training, _health, _time, _alerts, _samples, _origin)
    body = "\n".join(part(run) for part in parts)
    path = filesystem.join(workdir, "report.html")
    filesystem.write_atomic(path, page.document(f"{run.name}: training report", body).encode())
    return path


def load(workdir: str | os.PathLike[str]) -> Run:
    """Reads a workdir; files that are absent read as empty."""
    folder = Path(filesystem.join(workdir))

    def document(name: str, absent: Any) -> Any:
        path = folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else absent

    metrics = sorted(lines.read(folder / "metrics.jsonl"), key=lambda entry: entry["step"])
    return Run(
        name=folder.name,
        metrics=metrics,
        evaluations=document("evaluation.json", []),
        alerts=alerts.read(folder),
        manifest=document("manifest.json", {}),
        config=document("config.json", {}),
        samples=_load_samples(folder / "trajectories"),
    )


def _load_samples(folder: Path) -> list[Entry]:
    """The rows of the first and the last step of the store: what the policy wrote then and now."""
    found = trajectories.segments(folder)
    rows: list[Entry] = []
    for segment, step in ((found[0], found[0].first), (found[-1], found[-1].last)) if found else ():
        table = trajectories.read_segment(segment, SAMPLE_COLUMNS)
        rows += [row for row in table.to_pylist() if row["step"] == step]
    return rows


def curve(run: Run, name: str, label: str = "", stage: str | None = None) -> Curve | None:
    """A metric over steps, of one stage or all; None when it was never written. NaN is left out."""
    entries = [entry for entry in run.metrics if stage is None or entry["stage"] == stage]
    points = [(entry["step"], entry[name]) for entry in entries if entry.get(name) is not None]
    if not points:
        return None
    return Curve(label or name, np.array([p[0] for p in points]), np.array([p[1] for p in points], float))


def _accuracies(run: Run, domain: str) -> list[Entry]:
    rows = [row for row in run.evaluations if row["domain"] == domain and row["metric"] == "accuracy"]
    return sorted(rows, key=lambda row: row["step"])


def _domain_names(run: Run) -> list[str]:
    """The domains of the evaluations, then those that only training met; without "macro"."""
    names = [row["domain"] for row in run.evaluations if row["domain"] != "macro"]
    for entry in run.metrics:
        names += [key[len("domain/") : -len("/accuracy")] for key in entry
                  if key.startswith("domain/") and key.endswith("/accuracy")]  # fmt: skip
    return list(dict.fromkeys(names))


def _endpoints(run: Run, domain: str) -> tuple[Entry | None, Entry | None, Entry | None]:
    """The domain's accuracy rows (before all training, before GRPO, last)."""
    rows = _accuracies(run, domain)
    warm = [row for row in rows if row["stage"] in ("sft", "preference")]
    first = rows[0] if rows and rows[0]["stage"] == "baseline" else None
    return first, warm[-1] if warm else None, rows[-1] if rows else None


def _limits(row: Entry) -> tuple[float, float, float]:
    return row["value"], row["low"], row["high"]


def _header(run: Run) -> str:
    steps = max((entry["step"] for entry in run.metrics), default=0)
    seconds = sum(entry.get("time/step_s") or 0.0 for entry in run.metrics)
    kinds = ", ".join(run.manifest.get("device_kinds", []))
    facts = [f"seed {run.manifest['seed']}"] if "seed" in run.manifest else []
    if kinds:
        facts.append(f"{run.manifest.get('device_count', '?')} x {kinds}")
    if run.manifest.get("commit"):
        facts.append(f"commit {run.manifest['commit'][:10]}{' with changes' if run.manifest.get('dirty') else ''}")
    if "start_time" in run.manifest:
        facts.append(f"started {run.manifest['start_time']}")
    entries = []
    first, warm, last = _endpoints(run, "macro")
    start = warm or first
    if last is not None:
        entries.append((f"{100 * last['value']:.1f}%", "held-out accuracy, mean of domains"))
        if start is not None and start is not last:
            entries.append((f"{100 * (last['value'] - start['value']):+.1f}", "points since " + _moment(start)))
    entries.append((f"{steps:,}", " + ".join(name for _, name in run.stages) + " steps"))
    if seconds:
        entries.append((duration(seconds), "in training steps"))
    entries.append((str(len(run.alerts)), "alert" if len(run.alerts) == 1 else "alerts"))
    line = f'<p class="note">{escape(" · ".join(facts))}</p>'
    return f"<header><h1>{escape(run.name)}</h1>{line}{page.tiles(entries)}</header>"


def _moment(row: Entry) -> str:
    return {"baseline": "the start", "sft": "the end of SFT", "preference": "the end of the pairs"}.get(
        row["stage"], f"step {row['step']}"
    )


def _accuracy(run: Run) -> str:
    """Before and after, per domain: a picture and the table behind it."""
    names = [name for name in _domain_names(run) if _accuracies(run, name)]
    names += ["macro"] if _accuracies(run, "macro") else []
    changes = {row["domain"]: row for row in run.evaluations if row["metric"] == "accuracy_change"}
    rows, pairs, reference = [], [], ""
    for name in names:
        first, warm, last = _endpoints(run, name)
        shown = [page.interval(*_limits(row)) if row else "–" for row in (first, warm, last)]
        difference = changes.get(name)
        shown.append(page.change(*_limits(difference)) if difference else "–")
        label = "mean of domains" if name == "macro" else name
        rows.append([escape(label), *shown, str(last["n"]) if last else ""])
        start = warm or first
        if start and last and start is not last:
            reference = _moment(start)
            pairs.append((label, _limits(start), _limits(last)))
    if not rows:
        return ""
    picture = change_svg(pairs, (f"at {reference}", "last")) if pairs else ""
    columns = ["domain", "before training", "after SFT", "last", "change since SFT, points", "prompts"]
    note = (
        "Held-out prompts, the same each time, with 95% intervals. The change compares prompt by prompt; "
        "it is coloured where its interval excludes zero."
    )
    listing = page.table(columns, rows, numeric=1, total=names[-1] == "macro")
    return page.section("Held-out accuracy", note, picture, listing)


def _domains(run: Run) -> str:
    """Each domain over steps: held-out points with intervals over the training curve."""
    panels = []
    for name in ["macro", *_domain_names(run)]:
        curves = []
        rows = _accuracies(run, name)
        if rows:
            columns = [np.array([row[key] for row in rows], float) for key in ("value", "low", "high")]
            curves.append(Curve("held-out", np.array([row["step"] for row in rows]), *columns))
        training = curve(run, f"domain/{name}/accuracy", "training")
        if training is not None:
            curves.append(training)
        if curves:
            panels.append(Panel("mean of domains" if name == "macro" else name, curves, percent=True))
    if not panels:
        return ""
    note = (
        "Accuracy over steps. Training completions are sampled, held-out ones are decoded as the evaluation "
        "section of the config says, so the two levels need not agree."
    )
    return page.section("Accuracy by domain", note, panels_svg(panels, "accuracy over steps by domain", run.stages))


def _training(run: Run) -> str:
    """Reward, and the loss of each stage apart: they are different quantities."""
    plots = [("Reward, mean", curve(run, "reward/mean"))]
    plots += [(f"Loss, {name}", curve(run, "loss/total", stage=name)) for _, name in run.stages]
    panels = [Panel(title, [found]) for title, found in plots if found is not None]
    if not panels:
        return ""
    note = (
        "Faint: each step. Bold: smoothed. The loss of SFT is a cross-entropy; that of a policy gradient is "
        "a surrogate, whose level means little."
    )
    columns = max(2, min(3, len(panels)))
    return page.section("Reward and loss", note, panels_svg(panels, "reward and loss", run.stages, columns))


def _health(run: Run) -> str:
    panels = []
    for title, names, shares in HEALTH:
        found = [c for name in names if (c := curve(run, name, name.split("/")[1].replace("_fraction", "")))]
        if found:
            panels.append(Panel(title, found, percent=shares, smooth=names != ("update/learning_rate",)))
    if not panels:
        return ""
    note = (
        "What usually goes wrong first: length, entropy, and the distance from the policy that sampled and "
        "from the reference."
    )
    return page.section("Policy and optimizer", note, panels_svg(panels, "health of the policy", run.stages))


def _time(run: Run) -> str:
    """Where the seconds go."""
    whole = "time/step_s"
    timed = [entry for entry in run.metrics if entry.get(whole)]
    if not timed:
        return ""
    found = {key for entry in timed for key in entry if key.startswith("time/") and key.endswith("_s")} - {whole}
    order = ["time/rollout_s", "time/verify_s", "time/update_s"]
    names = [name for name in order if name in found] + sorted(found.difference(order))
    phases = {name[len("time/") : -len("_s")]: np.array([entry.get(name) or 0.0 for entry in timed]) for name in names}
    total = np.array([entry[whole] for entry in timed])
    rest = np.clip(total - sum(phases.values(), np.zeros_like(total)), 0, None)
    if rest.sum() > 0.005 * total.sum():
        phases["other"] = rest
    rows = [
        [
            escape(name),
            duration(values.sum()),
            f"{np.median(values):.3g} s",
            f"{values.sum() / total.sum():.1%}",
        ]
        for name, values in phases.items()
    ]
    rows.append(["all", duration(total.sum()), f"{np.median(total):.3g} s", "100.0%"])
    listing = page.table(["phase", "in all", "median step", "share"], rows, numeric=1, total=True)
    steps = np.array([entry["step"] for entry in timed])
    note = "Seconds per step by phase; evaluations, checkpoints and compilation outside the steps are not in it."
    return page.section("Time", note, stacked_svg(steps, phases), listing)


def _alerts(run: Run) -> str:
    if not run.alerts:
        return page.section("Alerts", "None fired.")
    rows = [
        [
            str(alert["step"]),
            escape(alert["name"]),
            escape(alert["domain"] or "all"),
            escape(alert["message"]),
            escape(", ".join(f"{key} {_number(value)}" for key, value in alert["figures"].items())),
        ]
        for alert in run.alerts[-200:]
    ]
    note = f"The last 200 of {len(run.alerts)}." if len(run.alerts) > 200 else ""
    return page.section("Alerts", note, page.table(["step", "alert", "domain", "what happened", "figures"], rows))


def _samples(run: Run) -> str:
    """A right and a wrong completion of each domain, of the first and of the last recorded step."""
    chosen: dict[tuple[int, str, bool], Entry] = {}
    for row in run.samples:
        chosen.setdefault((row["step"], row["domain"], row["status"] == "pass"), row)
    if not chosen:
        return ""
    order = sorted(chosen.values(), key=lambda row: (row["domain"], row["step"], row["status"] != "pass"))
    folds = []
    for row in order:
        mark = "pass" if row["status"] == "pass" else ""
        reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3g}"
        tests = f" · {sum(row['tests'])} of {len(row['tests'])} tests" if row["tests"] else ""
        cut = " · cut at the length limit" if row["finish_reason"] == "length" else ""
        summary = (
            f'<span class="verdict {mark}">{escape(row["status"])}</span> {escape(row["task"])} '
            f'<span class="range">step {row["step"]} · {escape(reward + tests + cut)}</span>'
        )
        detail = f'<p class="note">{escape(_clip(row["detail"]))}</p>' if row["detail"] else ""
        text = _clip(row["text"]) if row["text"] else "(empty)"
        folds.append(page.fold(summary, f"<pre>{escape(_clip(row['prompt']))}</pre><pre>{escape(text)}</pre>{detail}"))
    note = "The first recorded step and the last: prompt, then completion."
    return page.section("Sample completions", note, *folds)


def _origin(run: Run) -> str:
    """Config and manifest."""
    content = []
    for name, document in (("config.json", run.config), ("manifest.json", run.manifest)):
        if document:
            text = json.dumps(document, indent=2, ensure_ascii=False)
            content.append(page.fold(name, f"<pre>{escape(text)}</pre>"))
    return page.section("Where this run comes from", "", *content) if content else ""


def _clip(text: str) -> str:
    left = len(text) - LONGEST
    return text if left <= 0 else f"{text[:LONGEST]}\n... ({left:,} more characters)"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
