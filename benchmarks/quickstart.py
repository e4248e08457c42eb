"""A config's committed evidence: `python -m benchmarks.quickstart --seeds 0 1 2 --workdir runs/seeds`.

    python -m benchmarks.quickstart --config configs/smollm2_grpo.py --results docs/results/smollm2 --seeds 0

Runs the config (by default the quickstart) once per seed, one after another, or takes the runs that are there. Writes
to the results folder: `evaluation-seed*.json` and `metrics-seed*.jsonl` (the curves), `manifest-seed*.json` (versions,
machine), a picture named like the folder, and `README.md` (the command and the table). The last line is the benchmark's
JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, publish

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("reward/mean", "completion/length_mean", "policy/entropy", "time/rollout_s", "time/verify_s", "time/update_s")


def run(config: str, seed: int, workdir: Path) -> None:
    """Runs one seed to its end, in its own process, and notes wall time and peak memory in `cost.json`."""
    command = [sys.executable, "-m", "experiments.run", "--config", config]
    started = time.perf_counter()
    subprocess.run([*command, "--workdir", str(workdir), f"--config.seed={seed}"], cwd=ROOT, check=True)
    cost = {
        "seconds": time.perf_counter() - started,
        "peak_mib_of_the_largest_process": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }
    (workdir / "cost.json").write_text(json.dumps(cost, indent=1) + "\n")


def collect(seed: int, workdir: Path, results: Path) -> dict[str, Any]:
    """Copies a run's evidence to the results folder and returns its evaluation rows, metrics and cost."""
    rows = json.loads((workdir / "evaluation.json").read_text())
    for row in rows:
        row.pop("outcomes", None)
    (results / f"evaluation-seed{seed}.json").write_text(_lines(rows))
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    curves = [
        {name: round(value, 5) if isinstance(value, float) else value for name, value in line.items() if _kept(name)}
        for line in lines
    ]
    (results / f"metrics-seed{seed}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curves))
    shutil.copy(workdir / "manifest.json", results / f"manifest-seed{seed}.json")
    cost = json.loads((workdir / "cost.json").read_text())
    return {"rows": rows, "curves": curves, "cost": cost}


def _kept(name: str) -> bool:
    return name in ("step", "stage", *KEPT) or name.endswith("/reward")


def _lines(rows: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def accuracies(rows: list[dict[str, Any]], metric: str = "accuracy") -> dict[str, dict[int, dict[str, Any]]]:
    """domain -> step -> row."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if row["metric"] == metric:
            found[row["domain"]][row["step"]] = row
    return found


def warm_up_end(rows: list[dict[str, Any]]) -> int:
    """The last step of the supervised warm-up; 0 where there is none."""
    return max((row["step"] for row in rows if row["stage"] == "sft"), default=0)


def draw(runs: dict[int, dict[str, Any]], picture: Path) -> None:
    """Held-out accuracy over steps, macro and per domain (mean of the seeds, each seed thin), and before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = next(iter(runs.values()))["rows"]
    border, domains = warm_up_end(first), [name for name in accuracies(first) if name != "macro"]
    tables = [accuracies(found["rows"]) for found in runs.values()]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1.25, 1), layout="constrained")
    colours = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]
    steps = sorted(tables[0]["macro"])
    mean = lambda name: [100 * np.mean([table[name][step]["value"] for table in tables]) for step in steps]
    for i, name in enumerate(domains):
        left.plot(steps, mean(name), color=colours[i % 10], lw=1.2, alpha=0.75)
    for table in tables:
        left.plot(steps, [100 * table["macro"][s]["value"] for s in steps], color="black", lw=0.8, alpha=0.5)
    left.plot(steps, mean("macro"), color="black", lw=2.6, label=f"macro average, {_seeds(runs)}")
    if border:
        left.axvline(border, color="grey", ls=":", lw=1)
        left.text(border, 101, "  GRPO", ha="left", va="bottom", fontsize=9, color="dimgrey")
        left.text(border, 101, "supervised  ", ha="right", va="bottom", fontsize=9, color="dimgrey")
    left.set(xlabel="step", ylabel="held-out accuracy, %", ylim=(0, 100), xlim=(0, steps[-1]))
    left.legend(loc="upper left", frameon=False)
    for i, name in enumerate(domains):
        before, after = (
            100 * np.mean([table[name][step]["value"] for table in tables]) for step in (border, steps[-1])
        )
        right.plot([before, after], [i, i], color=colours[i % 10], lw=3, solid_capstyle="round", alpha=0.4)
        right.plot(before, i, "o", mfc="white", mec=colours[i % 10], ms=7)
        right.plot(after, i, "o", color=colours[i % 10], ms=8)
        right.text(after + 2.5, i, f"{after - before:+.0f}", va="center", fontsize=9)
    right.set(yticks=range(len(domains)), yticklabels=domains, xlim=(0, 108), xlabel="held-out accuracy, %")
    right.set_title(
        f"open: {'after the warm-up' if border else 'before'}, filled: after GRPO", fontsize=9, color="dimgrey"
    )
    right.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


def table(runs: dict[int, dict[str, Any]]) -> str:
    """Markdown: per domain the mean over seeds before and after, and each seed's paired change with its interval."""
    first = next(iter(runs.values()))["rows"]
    border, names = warm_up_end(first), list(accuracies(first))
    last = max(accuracies(first)["macro"])
    header = [
        "domain",
        "after SFT" if border else "before",
        "after GRPO",
        *(f"change, seed {seed} [95 %, paired]" for seed in runs),
    ]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for name in names:
        before, after = (
            np.mean([100 * accuracies(found["rows"])[name][step]["value"] for found in runs.values()])
            for step in (border, last)
        )
        changes = [accuracies(found["rows"], "accuracy_change")[name][last] for found in runs.values()]
        cells = [f"{100 * c['value']:+.1f} [{100 * c['low']:+.1f}, {100 * c['high']:+.1f}]" for c in changes]
        lines.append("| " + " | ".join([name, f"{before:.1f}", f"{after:.1f}", *cells]) + " |")
    return "\n".join(lines)


def page(runs: dict[int, dict[str, Any]], config: str, results: Path) -> str:
    """The results folder's README: command, machine, versions, cost and the table."""
    manifest = json.loads((results / f"manifest-seed{min(runs)}.json").read_text())
    seconds = ", ".join(f"{found['cost']['seconds']:.0f}" for found in runs.values())
    versions = ", ".join(f"{name} {manifest['versions'][name]}" for name in ("python", "jax", "flax", "numpy"))
    name = Path(config).stem
    changed = "" if name == "quickstart" else f"--config {config} --results docs/results/{results.name} "
    return f"""# {name}, {_seeds(runs)}

`python -m benchmarks.quickstart {changed}--seeds {" ".join(map(str, runs))}` runs `{config}` once per seed, one after
another.

- Machine: {manifest["processor"]}, {manifest["cpu_count"]} cores. Versions: {versions}. Each manifest has the rest.
- Wall time of each run, from the command to the report: {seconds} s; the first compiles everything.
- Peak memory of the largest process: {peak_mib(runs):.0f} MiB.

Held-out accuracy in percent, greedy, on the same prompts before and after. The macro row averages the domains.

{table(runs)}

![curves]({results.name}.png)
"""


def _seeds(runs: dict[int, dict[str, Any]]) -> str:
    return f"{len(runs)} seeds" if len(runs) > 1 else f"seed {min(runs)}"


def peak_mib(runs: dict[int, dict[str, Any]]) -> float:
    """The highest peak of any process of any run."""
    return max(found["cost"]["peak_mib_of_the_largest_process"] for found in runs.values())


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.quickstart", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workdir", default="runs/seeds", help="a folder for the runs; finished ones are not repeated")
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--results", default="docs/results/quickstart", help="the folder to write")
    arguments = parser.parse_args()
    results = ROOT / arguments.results
    results.mkdir(parents=True, exist_ok=True)
    runs = {}
    for seed in arguments.seeds:
        workdir = Path(arguments.workdir).resolve() / f"seed{seed}"
        if not (workdir / "cost.json").exists():
            run(arguments.config, seed, workdir)
        runs[seed] = collect(seed, workdir, results)
    draw(runs, results / f"{results.name}.png")
    text = page(runs, arguments.config, results)
    (results / "README.md").write_text(text)
    print(text)
    changes = [accuracies(found["rows"], "accuracy_change")["macro"] for found in runs.values()]
    figures = {
        "macro_change_mean": float(np.mean([row["value"] for steps in changes for row in steps.values()])),
        "macro_change_lowest_bound": min(row["low"] for steps in changes for row in steps.values()),
        "seconds_max": max(found["cost"]["seconds"] for found in runs.values()),
        "peak_mib": peak_mib(runs),
    }
    publish(Path(arguments.config).stem, machine(), figures)


if __name__ == "__main__":
    main()
