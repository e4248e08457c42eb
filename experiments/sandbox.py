"""The sandbox of this machine: what it isolates, one program judged, the attacks.

    python -m experiments.sandbox --check                       what there is, what is missing, the remedy
    python -m experiments.sandbox --run solution.py --tests tests.json
    python -m experiments.sandbox --attack                      every attack, and the table of outcomes

Tests for --run are a pytest file (`.py`, which imports the candidate as `solution`) or a JSON file with one of

    {"entry": "solve", "calls": [[[arguments], expected], ...], "tolerance": 0.0}
    {"cases": [["stdin", "stdout"], ...], "comparison": "lines"}
    {"check": "def check(candidate): ...", "entry": "solve"}
    {"suite": "...", "twin": "..."}        in the candidate's own process: weaker, see docs/sandbox.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import cli

FAILED = 1


def main(argv: Sequence[str]) -> int:
    """Runs one of the three commands; 0 when all is well, 1 when not, 3 where candidate code cannot be run."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sandbox", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="what isolation this machine gives")
    what.add_argument("--run", metavar="FILE", help="judge this program")
    what.add_argument("--attack", action="store_true", help="run the attack suite")
    parser.add_argument("--tests", metavar="FILE", help="tests for --run, see above")
    parser.add_argument("--language", help="of --run; by default what the file's name says")
    parser.add_argument("--cpu_seconds", type=float, help="limit of --run")
    parser.add_argument("--memory_mib", type=int, help="limit of --run")
    parser.add_argument("--safe", action="store_true", help="a new container for every run (runs_per_slot=1)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="attacks whose names begin so")
    arguments = parser.parse_args(argv)
    if arguments.run and not arguments.tests:
        parser.error("--run needs --tests FILE")

    from rl_posttrain.sandbox.pool import Pool, PoolConfig

    config = PoolConfig(runs_per_slot=1) if arguments.safe else PoolConfig()
    if arguments.attack:
        return attack(config, arguments.only)
    with Pool(config) as pool:
        return check(pool) if arguments.check else run(pool, arguments)


def check(pool: Any) -> int:
    """Prints what the sandbox is made of here, every protection as probed, and the languages."""
    from rich.console import Console
    from rich.table import Table

    from rl_posttrain.sandbox import selftest

    console = Console()
    parts = Table(title="This machine", box=None, show_header=False, title_justify="left")
    for name, value in machine(pool):
        parts.add_row(name, value)
    console.print(parts)
    probes = Table("protection", "holds", "what its probe showed", title="Protections", box=None, title_justify="left")
    missing = 0
    for probe, verdict in selftest.run(pool):
        holds = verdict.status in probe.right
        missing += not holds
        probes.add_row(probe.protection, "yes" if holds else "[red]NO[/red]", f"{verdict.status} {verdict.detail[:80]}")
    console.print(probes)
    found = Table("language", "works", "", title="Languages", box=None, title_justify="left")
    for name, reason in selftest.detect(pool).items():
        found.add_row(name, "yes" if reason is None else "no", reason or "")
    console.print(found)
    console.print("Every protection holds." if not missing else f"{missing} protections are missing: runs are refused.")
    return cli.BAD_ENVIRONMENT if missing else 0


def machine(pool: Any) -> list[tuple[str, str]]:
    """Rows (what, how it is here).

    Raises:
      SandboxUnavailable: candidate code cannot be run; the message says what to do.
    """
    from rl_posttrain.sandbox import processes
    from rl_posttrain.sandbox.bubblewrap import find_bubblewrap, find_interpreter, unprivileged_user
    from rl_posttrain.sandbox.pool import FIRST_USER

    bubblewrap = find_bubblewrap()
    version = subprocess.run([bubblewrap, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    user = unprivileged_user(FIRST_USER)
    return [
        ("kernel", f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} processors"),
        ("bubblewrap", f"{version}, {bubblewrap}"),
        ("interpreter", find_interpreter(pool.config.interpreter)[0]),
        ("user", f"{os.geteuid()}; candidates run as {user if user is not None else 'the same, in a user namespace'}"),
        ("control groups", pool.delegation()),
        ("host's /proc", processes.available() or "memory of many processes and time lost to load can be seen"),
        ("mode", "safe: one run per container" if pool.config.runs_per_slot == 1 else "fast: containers are reused"),
    ]


def run(pool: Any, arguments: argparse.Namespace) -> int:
    """Judges one program and prints the verdict with what its runs showed.

    Raises:
      ConfigError: the program or its tests cannot be read, or cannot be judged this way.
    """
    from rl_posttrain.config import ConfigError
    from rl_posttrain.sandbox.judge import judge
    from rl_posttrain.sandbox.languages import LANGUAGES

    path = Path(arguments.run)
    suffixes = {Path(language.source).suffix: name for name, language in LANGUAGES.items()}
    language = arguments.language or suffixes.get(path.suffix, "python")
    tests = load_tests(Path(arguments.tests))
    try:
        code = path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise ConfigError(f"--run {path}: {error}") from error
    limits = pool.config.limits
    try:
        if (seconds := arguments.cpu_seconds) is not None:
            limits = dataclasses.replace(
                limits, cpu_seconds=seconds, wall_seconds=max(limits.wall_seconds, 5 * seconds)
            )
        if arguments.memory_mib is not None:
            limits = dataclasses.replace(limits, memory_bytes=arguments.memory_mib << 20)
        verdict = judge(pool, code, tests, language=language, limits=limits)
    except ValueError as error:  # no such language or limit, or tests that judge nobody
        raise ConfigError(f"--run {path}: {error}") from error
    print(f"{verdict.status}: {sum(verdict.tests)} of {len(verdict.tests)} tests pass ({verdict.trust})")
    if verdict.detail:
        print(verdict.detail)
    for index, outcome in enumerate(verdict.outcomes):
        print(f"  test {index + 1}: {outcome}")
    for execution in verdict.executions:
        how = f"signal {execution.signal}" if execution.signal else f"exit code {execution.exit_code}"
        print(
            f"run: {execution.status}, {how}, {execution.cpu_s:.3f} s of processor time, {execution.wall_s:.3f} s, "
            f"{execution.peak_memory_bytes / 2**20:.0f} MiB, {execution.processes_left} processes left"
        )
        for name in ("stdout", "stderr", "traceback"):
            if text := getattr(execution, name).strip():
                print(f"  {name}{' (cut)' if execution.truncated else ''}:\n    " + text.replace("\n", "\n    "))
    for flag in verdict.flags:
        print(f"flag {flag.name}: {flag.detail}")
    return 0 if verdict.passed else FAILED


def load_tests(path: Path) -> Any:
    """The tests in a file, see above.

    Raises:
      ConfigError: it cannot be read, is neither, or its values are not what such tests take.
    """
    from rl_posttrain.config import ConfigError
    from rl_posttrain.sandbox import kinds

    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            return kinds.PytestTests(text)
        fields = json.loads(text)
        match fields:
            case {"calls": calls, "entry": entry, **rest}:
                return kinds.FunctionTests(entry, tuple(kinds.Call(tuple(a), b) for a, b in calls), **rest)
            case {"cases": cases, **rest}:
                return kinds.StdioTests(tuple((stdin, stdout) for stdin, stdout in cases), **rest)
            case {"check": source, "entry": entry}:
                return kinds.CheckTests(source, entry)
            case {"suite": suite, **rest}:
                return kinds.WhiteBoxTests(suite, **rest)
    except (ValueError, TypeError, SyntaxError, OSError) as error:
        raise ConfigError(f"--tests {path}: {error}") from error
    raise ConfigError(f"--tests {path}: has none of 'calls', 'cases', 'check', 'suite'; see --help")


def attack(config: Any, only: Sequence[str] | None) -> int:
    """Runs the attack suite with progress and prints the table."""
    from rich.console import Console
    from rich.progress import track

    from experiments import attacks

    chosen = [a for a in attacks.load_attacks() if not only or a.name.startswith(tuple(only))]
    console = Console()
    results = list(
        track(
            attacks.run_all(config, chosen), description="attacks", total=len(chosen), console=console, transient=True
        )
    )
    console.print(attacks.table(results))
    print(attacks.summary(results))
    return FAILED if any(result.problems for result in results) else 0


if __name__ == "__main__":
    cli.guarded(main)
