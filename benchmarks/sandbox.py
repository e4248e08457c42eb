"""What the sandbox costs, beside what it is compared with, and whether it is ever fooled or leaks.

    python -m benchmarks.sandbox [--figures fast_vs_bwrap ...] [--seconds 2] [--rounds 7] [--soak 10000]

Speeds are of right candidates with two workers. Contenders take turns, each in a process of its own, in several
rounds, forwards and backwards, because machines drift; a ratio is that of the medians over the rounds. About five
minutes without the soak.

    fast_vs_bwrap, fast_vs_bare        fast mode, five calls of a small function; against bubblewrap and `python3 -I -S`
                                       per run, and against the interpreter alone (verdicts/s, so more is better)
    imports_vs_bwrap, numpy_vs_bwrap   the same with 18 standard modules imported, and with numpy
    safe_vs_bwrap                      one run per container, against bubblewrap per run, both with the 18 modules
    safe_p50_vs_bwrap                  the same in median seconds from arrival to verdict, with runs arriving evenly,
                                       at half the rate that bubblewrap per run can serve (less is better)
    fast_vs_multiprocessing            against a grader that forks its trainer and `exec`s candidate and asserts
    multiprocessing_large_parent       how many times slower that grader is in a trainer of 2 GB; ...
    fast_large_parent                  ... and ours
    overhead_100ms                     a program that takes 100 ms: wall time here over wall time in a bare interpreter
    slot_rss_mb                        resident memory of one idle slot, all its processes (shared pages in each)
    soak_false_pass, soak_false_fail, soak_leaks   over right and hostile programs, mixed
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import machine, publish, sandbox_soak
from benchmarks.sandbox_contenders import (
    ADD,
    CALLS,
    IMPORTS,
    NUMPY,
    Contender,
    Host,
    bare_command,
    bubblewrap_command,
    with_asserts,
)
from experiments import cli
from rl_posttrain.observability.progress import Progress, print_table
from rl_posttrain.sandbox.bubblewrap import find_bubblewrap, find_interpreter
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import Call, FunctionTests
from rl_posttrain.sandbox.pool import Pool, PoolConfig

LARGE_PARENT_MB = 2048
PAUSE_SECONDS = 0.3  # between batches, so that one contender's containers do not start in the next one's time
BUSY_SECONDS = 0.1
TRIAL = 1_000_000  # rounds of a loop that tell how many take BUSY_SECONDS
# What is divided by what: runs per second.
RATIOS = {
    "fast_vs_bwrap": ("fast", "bwrap"),
    "fast_vs_bare": ("fast", "bare"),
    "fast_vs_multiprocessing": ("fast", "multiprocessing"),
    "multiprocessing_large_parent": ("multiprocessing", "multiprocessing, large parent"),
    "fast_large_parent": ("fast", "fast, large parent"),
    "imports_vs_bwrap": ("fast, imports", "bwrap, imports"),
    "safe_vs_bwrap": ("safe, imports", "bwrap, imports"),
    "numpy_vs_bwrap": ("fast, numpy", "bwrap, numpy"),
}
LATENCY, OVERHEAD, MEMORY = "safe_p50_vs_bwrap", "overhead_100ms", "slot_rss_mb"
SOAK = ("soak_false_pass", "soak_false_fail", "soak_leaks")
NAMES = (*RATIOS, LATENCY, OVERHEAD, MEMORY, *SOAK)
Figures = dict[str, float]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.sandbox", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="only these")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each batch; a round has one per contender")
    parser.add_argument("--rounds", type=int, default=7, help="batches of each contender")
    parser.add_argument("--soak", type=int, default=2000, metavar="RUNS", help="the published figure takes 10000")
    arguments = parser.parse_args(argv)
    for name, least in (("seconds", 0.05), ("rounds", 1), ("soak", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: at least {least}")
    measure(tuple(arguments.figures), arguments.seconds, arguments.rounds, arguments.soak)
    return 0


def measure(names: Sequence[str], seconds: float, rounds: int, soak_runs: int) -> Figures:
    """Measures, prints the tables and the JSON line, and returns its figures."""
    place = machine() | software()
    figures: Figures = {}
    with ExitStack() as stack:
        packages = None
        if "numpy_vs_bwrap" in names:
            packages = numpy_packages(stack.enter_context(readable_folder()))
            if packages is None:
                names = [name for name in names if name != "numpy_vs_bwrap"]
        table = contenders(packages)
        figures |= rate_figures(table, names, seconds, rounds)
        if OVERHEAD in names:
            figures |= overhead_figures(seconds, rounds)
    if MEMORY in names:
        figures |= memory_figures()
    if any(name in names for name in SOAK):
        figures |= sandbox_soak.measure(soak_runs)
    rows = [[name, value] for name, value in figures.items()]
    print_table("figures", ["name", "value"], rows)
    publish("sandbox", place, figures)
    return figures


def software() -> dict[str, str]:
    """Versions that the speeds depend on."""
    versions = [
        subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        for program in (find_interpreter()[0], find_bubblewrap())
    ]
    return {"kernel": platform.release(), "candidates_python": versions[0], "bubblewrap": versions[1]}


def contenders(packages: str | None) -> dict[str, Contender]:
    """All of them by name, similar ones side by side. `packages`: a folder with numpy, None to leave it out."""
    table = {
        "bare": Contender("command", ADD, argv=bare_command(with_asserts(ADD))),
        "fast": Contender("pool", ADD),
        "bwrap": Contender("command", ADD, argv=bubblewrap_command(with_asserts(ADD))),
        "multiprocessing": Contender("multiprocessing", ADD),
        "multiprocessing, large parent": Contender("multiprocessing", ADD, ballast_mb=LARGE_PARENT_MB),
        "fast, large parent": Contender("pool", ADD, ballast_mb=LARGE_PARENT_MB),
        "fast, imports": Contender("pool", IMPORTS),
        "bwrap, imports": Contender("command", IMPORTS, argv=bubblewrap_command(with_asserts(IMPORTS))),
        "safe, imports": Contender("pool", IMPORTS, runs_per_slot=1),
    }
    if packages is not None:
        command = bubblewrap_command(with_asserts(NUMPY), packages)
        table["bwrap, numpy"] = Contender("command", NUMPY, argv=command)
        table["fast, numpy"] = Contender("pool", NUMPY, packages=packages, preload=("numpy",))
    return table


class readable_folder(tempfile.TemporaryDirectory):
    """A temporary folder that the sandbox's unprivileged user can read, too."""

    def __enter__(self) -> str:
        folder = super().__enter__()
        os.chmod(folder, 0o755)
        return folder


def numpy_packages(folder: str) -> str | None:
    """`folder` with a copy of this environment's numpy; None, and a line that says why, where it would not load."""
    interpreter = find_interpreter()[0]
    version = "{}.{}".format(*sys.version_info)
    found = subprocess.run([interpreter, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    if not found.startswith(f"{version}."):
        print(f"numpy_vs_bwrap left out: numpy here is for Python {version}, and {interpreter} is {found}")
        return None
    import numpy

    source = Path(numpy.__file__).parent
    for part in (source, source.with_name("numpy.libs")):
        if part.is_dir():  # wheels of some systems carry no libraries
            shutil.copytree(part, Path(folder, part.name), ignore=shutil.ignore_patterns("tests"))
    subprocess.run([interpreter, "-m", "compileall", "-q", folder], check=True)  # as installing does
    return folder


# ---- speeds ----


def rate_figures(table: dict[str, Contender], names: Sequence[str], seconds: float, rounds: int) -> Figures:
    """Ratios of runs per second, and of the latency at half of bubblewrap's rate."""
    ratios = {name: pair for name, pair in RATIOS.items() if name in names}
    wanted = {contender for pair in ratios.values() for contender in pair}
    if LATENCY in names:
        wanted |= {"safe, imports", "bwrap, imports"}
    if not wanted:
        return {}
    figures: Figures = {}
    with ExitStack() as stack:
        hosts = {name: stack.enter_context(Host(table[name])) for name in table if name in wanted}
        rates = take_turns(hosts, rounds, seconds)
        show_rates(rates)
        rows = []
        for name, (ours, other) in ratios.items():
            figures[name] = statistics.median(rates[ours]) / statistics.median(rates[other])
            by_round = [one / two for one, two in zip(rates[ours], rates[other])]
            rows.append([name, figures[name], min(by_round), max(by_round)])
        print_table("ratios of runs/s", ["name", "of the medians", "lowest round", "highest round"], rows)
        if LATENCY in names:
            interval = 2 / statistics.median(rates["bwrap, imports"])
            pair = {name: hosts[name] for name in ("safe, imports", "bwrap, imports")}
            count = max(5, round(seconds / interval))
            figures[LATENCY] = latency_ratio(pair, rounds, count, interval)
    return figures


def take_turns(hosts: dict[str, Host], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Runs per second of each host, one figure a round; every other round goes backwards."""
    rates: dict[str, list[float]] = {name: [] for name in hosts}
    with Progress(rounds * len(hosts), "runs/s") as bar:
        for turn in range(rounds):
            order = list(hosts) if turn % 2 == 0 else list(hosts)[::-1]
            for position, name in enumerate(order, start=1):
                time.sleep(PAUSE_SECONDS)
                rates[name].append(hosts[name].runs_per_second(seconds))
                bar.update(turn * len(hosts) + position, "", {name: rates[name][-1]})
    return rates


def show_rates(rates: dict[str, list[float]]) -> None:
    rows = [[name, statistics.median(taken), min(taken), max(taken)] for name, taken in rates.items()]
    print_table("runs/s, two workers, all right", ["contender", "median", "lowest", "highest"], rows)


def latency_ratio(hosts: dict[str, Host], rounds: int, count: int, interval: float | None) -> float:
    """The first host's median latency over the second's; `count` runs of each in turns, in every round."""
    taken: dict[str, list[float]] = {name: [] for name in hosts}
    with Progress(rounds, "latency") as bar:
        for turn in range(rounds):
            for name, host in hosts.items() if turn % 2 == 0 else reversed(hosts.items()):
                if interval is not None:
                    time.sleep(PAUSE_SECONDS)
                taken[name] += host.latencies(count, interval)
            bar.update(turn + 1, "", {})
    rows = []
    for name, values in taken.items():
        ordered = sorted(1000 * value for value in values)
        at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: B023
        rows.append([name, len(ordered), ordered[0], at(0.1), statistics.median(ordered), at(0.9), at(0.99)])
    arrivals = "one after another" if interval is None else f"one each {1000 * interval:.1f} ms"
    columns = ["contender", "runs", "least", "p10", "p50", "p90", "p99"]
    print_table(f"milliseconds from arrival to verdict, {arrivals}", columns, rows)
    ours, other = (statistics.median(values) for values in taken.values())
    return ours / other


def overhead_figures(seconds: float, rounds: int) -> Figures:
    """A program that is busy for about 100 ms, here and in a bare interpreter, one run at a time."""
    program = "x = 0\nfor i in range({}):\n    x = (31 * x + i) % 1000003\nprint(x)\n"
    interpreter = find_interpreter()[0]
    trial = [interpreter, "-I", "-S", "-c", f"{program.format(TRIAL)}\nimport time\nprint(time.process_time())"]
    words = [subprocess.run(trial, capture_output=True, text=True, check=True).stdout.split() for _ in range(5)]
    source = program.format(int(TRIAL * BUSY_SECONDS / min(float(word[-1]) for word in words)))
    command = bare_command(source)
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours = Contender("pool", source, workers=1, output=output)
    with Host(ours) as here, Host(Contender("command", source, workers=1, argv=command)) as bare:
        turns = max(5, round(rounds * seconds / BUSY_SECONDS))
        return {OVERHEAD: latency_ratio({"fast": here, "bare": bare}, turns, count=1, interval=None)}


# ---- memory ----


def memory_figures() -> Figures:
    """Resident memory of one idle slot that has served a run: all processes below the launcher."""
    before = sandbox_soak.descendants(os.getpid())
    with Pool(PoolConfig(slots=1)) as pool:
        verdict = judge(pool, ADD, FunctionTests("add", tuple(Call(*call) for call in CALLS)))
        if not verdict.passed:
            raise RuntimeError(f"a right candidate did not pass: {verdict}")
        time.sleep(1.0)
        parents = sandbox_soak.descendants(os.getpid())
        # A child of ours is the launcher, which all slots share; the slot's processes are below it.
        slot = [pid for pid, parent in parents.items() if pid not in before and parent != os.getpid()]
        rows = [[pid, Path(f"/proc/{pid}/comm").read_text().strip(), resident_mb(pid), shared_mb(pid)] for pid in slot]
    if not rows:
        raise RuntimeError("no process of a slot was found below this one: is the launcher still its child?")
    print_table("an idle slot", ["process", "program", "RSS MB", "PSS MB"], rows)
    figures: Figures = {MEMORY: sum(row[2] for row in rows)}
    if all(row[3] is not None for row in rows):
        figures["slot_pss_mb"] = sum(row[3] for row in rows)
    return figures


def resident_mb(pid: int) -> float:
    """RSS: shared pages count in full."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def shared_mb(pid: int) -> float | None:
    """PSS: each page divided by the number of processes that share it. None where only root may know."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except PermissionError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    cli.guarded(main)
