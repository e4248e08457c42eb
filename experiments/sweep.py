"""Runs a config at several points, each with several seeds, and compares them.

    python -m experiments.sweep --config configs/quickstart.py --sweep configs/sweeps/learning_rate.py \\
        --workdir runs/learning_rate

The sweep file defines `get_sweep()`; docs/sweeps.md says what it returns. Every point is checked before the first run
starts. The same command goes on with what is not finished; points and seeds can be added to the file. SIGTERM or
Ctrl-C reaches the runs, which finish their step and save.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pprint
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import cli
from experiments.run import Interrupts
from experiments.sweep_plan import Run, finished, plan

POLL_SECONDS = 0.2
PROGRESS_SECONDS = 15.0
LOG_LINES = 20  # of a failed run, shown and in the report


def main(argv: Sequence[str]) -> int:
    rest, overrides = cli.split_overrides(argv)
    parser = argparse.ArgumentParser(
        "python -m experiments.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 all finished, 1 a run failed, 2 bad config or sweep, 75 interrupted, resumable",
    )
    add = parser.add_argument
    add("--config", required=True, help="a Python file with get_config()")
    add("--sweep", required=True, help="a Python file with get_sweep()")
    add("--workdir", required=True, help="the sweep's folder: created, or gone on with when it holds runs")
    add("--jobs", type=int, default=1, help="runs at a time (default: %(default)s); they share the machine")
    add("--config.KEY", metavar="VALUE", dest="_", help="override a key at every point")
    arguments = parser.parse_args(rest)
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: must be at least 1")

    from rl_posttrain.storage import filesystem

    values = cli.load_config_file(arguments.config)
    given = cli.call_file("--sweep", arguments.sweep, "get_sweep")
    workdir = Path(filesystem.join(arguments.workdir))
    runs = plan(values, given, overrides, workdir, arguments.sweep)
    title = f"{Path(arguments.sweep).stem} on {Path(arguments.config).stem}"
    return execute(runs, arguments.jobs, lambda: write_report(workdir, title, runs))


def execute(runs: Sequence[Run], jobs: int, write: Callable[[], str]) -> int:
    """Runs what is not finished, `jobs` at a time, each in a process of its own.

    Args:
      write: writes the results and returns the report's path; called whenever a run has ended.

    Returns:
      The exit code: 75 when interrupted, else 1 when a run failed, else 0.
    """
    from rl_posttrain.observability.progress import Progress

    waiting = [run for run in runs if run.status != "finished"]
    total = sum(run.config.total_steps for run in runs)
    children: list[Child] = []
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished already", flush=True)
    with Interrupts() as interrupts, Progress(total, initial=sum(map(steps_done, runs))) as progress:
        shown = time.monotonic()
        try:
            while children or (waiting and not interrupts.requested):
                while waiting and len(children) < jobs and not interrupts.requested:
                    child = start(waiting.pop(0))
                    children += [child] if child is not None else []
                if interrupts.requested:
                    tell(children, signal.SIGTERM)
                    wait(children)
                left = [child for child in children if not settle(child, interrupts.requested)]
                if len(left) < len(children) or time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    ended = sum(run.status in ("finished", "failed") for run in runs)
                    progress.update(sum(map(steps_done, runs)), f"{ended} of {len(runs)} runs ended, step", {})
                if len(left) < len(children):
                    write()
                children = left
                time.sleep(POLL_SECONDS if children else 0)
        finally:  # a second Ctrl-C, or an error here: no run is left behind
            tell(children, signal.SIGINT)
            wait(children)
    print(f"report: {write()}", flush=True)
    if interrupts.requested or any(run.status == "interrupted" for run in runs):
        print("interrupted: the same command resumes")
        return cli.PREEMPTED
    return 1 if any(run.status == "failed" for run in runs) else 0


def steps_done(run: Run) -> int:
    """The last step that the run logged; all of them once it is over, since none will follow."""
    from rl_posttrain.observability import lines

    if run.status in ("finished", "failed"):
        return run.config.total_steps
    entries = lines.read(run.folder / "metrics.jsonl")
    return min(entries[-1]["step"], run.config.total_steps) if entries else 0


@dataclass(frozen=True)
class Child:
    """A run's process and where its part of the log begins, in bytes."""

    run: Run
    process: subprocess.Popen[bytes]
    log_start: int


def command(config_file: Path, workdir: Path) -> list[str]:
    """What a run's process is started with."""
    return [sys.executable, "-m", "experiments.run", "--config", str(config_file), "--workdir", str(workdir)]


def start(run: Run) -> Child | None:
    """Starts a run. None where another process has it, which counts as failed.

    The process inherits the log and, with it, a lock: a run that outlives a killed sweep is not started twice.
    """
    from rl_posttrain import config as config_lib
    from rl_posttrain.storage import filesystem

    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / "log.txt", "ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            run.detail = f"another process is running it in {run.folder}: wait for that, or end it"
            run.status = "failed"
            print(f"{run.title}: failed: {run.detail}", flush=True)
            return None
        config_file = run.folder / "config.py"
        values = pprint.pformat(config_lib.to_dict(run.config), width=110, sort_dicts=False)
        filesystem.write_atomic(config_file, CONFIG_FILE.format(values=values).encode())
        log_start = os.fstat(log.fileno()).st_size
        process = subprocess.Popen(
            command(config_file, run.folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to this process alone, which hands it on once
        )
    run.status, run.detail = "running", ""
    print(f"{run.title}: started, log in {run.folder / 'log.txt'}", flush=True)
    return Child(run, process, log_start)


CONFIG_FILE = '''"""One run of a sweep, written by experiments.sweep; every field of its config is spelt out."""

from math import inf, nan  # noqa: F401  (as numbers below may be written)

CONFIG = {values}


def get_config():
    return CONFIG
'''


def settle(child: Child, stopping: bool) -> bool:
    """Notes how a run ended; False while it goes on."""
    code, run = child.process.poll(), child.run
    if code is None:
        return False
    # Before its first step or after its last a run does not wait for signals to save: they just end it.
    ended_by_us = stopping and code in (-signal.SIGTERM, -signal.SIGINT)
    if (code == 0 or ended_by_us) and finished(run):
        run.status = "finished"
    elif code == cli.PREEMPTED or ended_by_us:
        run.status = "interrupted"
    else:
        run.status = "failed"
        with open(run.folder / "log.txt", "rb") as log:
            log.seek(child.log_start)
            end = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        run.detail = "\n".join([f"exit code {code}; the end of {run.folder / 'log.txt'}:", *end])
    print(f"{run.title}: {run.status}{': ' if run.detail else ''}{run.detail}", flush=True)
    return True


def tell(children: Sequence[Child], kind: int) -> None:
    """Sends a signal to those that still go on."""
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(kind)


def wait(children: Sequence[Child]) -> None:
    for child in children:
        child.process.wait()


def write_report(workdir: Path, title: str, runs: Sequence[Run]) -> str:
    """`results.json` and `report.html` of the runs as they stand; returns the report's path."""
    from rl_posttrain.observability import sweep_report
    from rl_posttrain.observability.sweep_report import Point, SeedRun

    points: dict[str, Point] = {}
    for run in runs:
        directory = run.folder.relative_to(workdir)
        seed_run = SeedRun(run.seed, directory.as_posix(), run.status, run.detail)
        point = points.setdefault(str(directory.parent), Point(run.name, run.overrides, []))
        point.runs.append(seed_run)
    return sweep_report.write(workdir, title, list(points.values()))


if __name__ == "__main__":
    cli.guarded(main)
