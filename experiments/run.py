"""Trains: `python -m experiments.run --config configs/quickstart.py --workdir runs/quickstart`.

Any key of the config can be overridden, e.g. `--config.update.learning_rate=3e-5`. A workdir that holds a run is
resumed; `--config.grpo.steps=600` on a finished run adds steps to it. SIGTERM or Ctrl-C finishes the step, saves and
exits with code 75; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence

from experiments import cli


def main(argv: Sequence[str]) -> int:
    rest, overrides = cli.split_overrides(argv)
    parser = argparse.ArgumentParser(
        "python -m experiments.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 done, 2 bad config, 3 environment (no bubblewrap, no space), 75 resumable",
    )
    add = parser.add_argument
    add("--config", required=True, help="a Python file with get_config()")
    add("--workdir", required=True, help="the run's folder: created, or resumed when it holds a run")
    add("--dry_run", action="store_true", help="show packed batches, masks and compiled memory; train nothing")
    add("--profile", metavar="FIRST:LAST", type=_range, help="trace these steps for TensorBoard")
    add("--config.KEY", metavar="VALUE", dest="_", help="override a key, e.g. --config.update.learning_rate=3e-5")
    arguments = parser.parse_args(rest)

    from rl_posttrain import config as config_lib
    from rl_posttrain import services

    values = config_lib.apply_overrides(cli.load_config_file(arguments.config), overrides)
    config = services.parse(values)
    if arguments.dry_run:
        from experiments.inspect import dry_run

        cli.use_compilation_cache()
        return dry_run(config, arguments.workdir)
    return run(config, arguments.workdir, arguments.profile)


def run(config, workdir: str, profile: tuple[int, int] | None = None) -> int:
    """Trains to the config's last step. Returns 0, or 75 when a signal ended it early."""
    from rl_posttrain import config as config_lib
    from rl_posttrain import lifecycle, services
    from rl_posttrain.loop import train
    from rl_posttrain.observability import manifest, report
    from rl_posttrain.observability.compilations import Compilations
    from rl_posttrain.observability.metrics import MetricsWriter
    from rl_posttrain.observability.progress import Progress

    started = time.time()
    cli.use_compilation_cache()
    with Interrupts() as interrupts, Compilations() as compilations:
        notice = lifecycle.check_workdir(config, workdir)
        if notice:
            print(notice)
        with services.build(config, workdir) as built:
            state = lifecycle.resume(built)
            resumed = state is not None
            state = state or lifecycle.start(built)
            if resumed:
                print(f"resuming {workdir} from step {state.step} of {config.total_steps}")
            lifecycle.write_config(built)
            lifecycle.rewind(built, state)
            manifest.write(workdir, config.seed, config_lib.to_dict(config))
            with (
                contextlib.closing(MetricsWriter(workdir, state.step if resumed else None)) as writer,
                Progress(config.total_steps, initial=state.step) as progress,
            ):
                recorder = lifecycle.Recorder(built, writer, progress, lambda: interrupts.requested, profile)
                recorder.begin(state)
                train(built, state, recorder.after)
            if state.step < config.total_steps:
                built.checkpoints.wait()
                print(f"interrupted at step {state.step} of {config.total_steps}: saved; the same command resumes")
                return cli.PREEMPTED
            lifecycle.finish(built, state)
        path = report.render(workdir)
        lifecycle.print_summary(config, state.evaluations)
        print(f"{compilations.count} programs compiled; {time.time() - started:.0f} s in all; report: {path}")
    return 0


class Interrupts:
    """SIGTERM and Ctrl-C ask for an end after the step; a second Ctrl-C ends at once."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> Interrupts:
        self._previous = {kind: signal.signal(kind, self._request) for kind in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _request(self, kind: int, frame) -> None:
        if self.requested and kind == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        print("\nfinishing this step, then saving (Ctrl-C again to end at once)", file=sys.stderr, flush=True)

    def __exit__(self, *_) -> None:
        for kind, handler in self._previous.items():
            signal.signal(kind, handler)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST with 1 <= FIRST <= LAST")
    return int(first), int(last)


if __name__ == "__main__":
    cli.guarded(main)
