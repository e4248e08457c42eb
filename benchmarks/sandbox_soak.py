"""Many runs, right programs and hostile ones mixed at random, and what they leave behind."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import platform
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from experiments import attacks
from rl_posttrain.observability.progress import Progress, print_table
from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable
from rl_posttrain.sandbox.judge import submit
from rl_posttrain.sandbox.kinds import Call, CheckTests, FunctionTests, StdioTests, Tests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.seccomp import Profile
from rl_posttrain.types import Verdict

SLOTS = 4
RUNS_PER_SLOT = 200  # so that containers are replaced, too
IN_FLIGHT = 8 * SLOTS
RIGHT_LIMITS = Limits(cpu_seconds=10.0, wall_seconds=60.0)  # no right program takes a second
HOSTILE_LIMITS = Limits(cpu_seconds=0.5, wall_seconds=2.0)
SETTLE_SECONDS = 15.0
GROWTH_MB = 16.0  # of this process in the second half: more counts as a leak, less is what the allocator scatters
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Program:
    name: str
    code: str
    tests: Tests
    right: bool  # whether it has to pass
    profile: Profile | None = None
    language: str = "python"
    limits: Limits = RIGHT_LIMITS


SQUARES = FunctionTests("solve", tuple(Call(a, b) for a, b in (((7,), 49), ((12,), 5), ((999,), 243), ((1024,), 21))))
DOUBLE = StdioTests((("21\n", "42\n"), ("-3\n", "-6\n")))
RIGHT = (
    Program("function", "def solve(n):\n    return sum(int(c) ** 2 for c in str(n))\n", SQUARES, True),
    Program(
        "method",
        "class Solution:\n    def root(self, x):\n        return {'root': x**0.5, 'of': [x]}\n",
        FunctionTests("Solution.root", (Call((2.0,), {"root": 1.41421356, "of": [2.0]}),), tolerance=1e-6),
        True,
    ),
    Program(
        "threads",
        "from concurrent.futures import ThreadPoolExecutor\n\n\ndef solve(n):\n    with ThreadPoolExecutor(2) as e:\n"
        "        return sum(e.map(lambda c: int(c) ** 2, str(n)))\n",
        SQUARES,
        True,
    ),
    Program("program", "print(int(input()) * 2)\n", DOUBLE, True),
    Program(
        "children",
        "import subprocess\nsubprocess.run(['/bin/true'])\nprint(int(input()) * 2)\n",
        DOUBLE,
        True,
        "multi",
    ),
    Program(
        "check",
        "def solve(n):\n    return sum(int(c) ** 2 for c in str(n))\n",
        CheckTests("def check(candidate):\n    assert candidate(7) == 49\n    assert candidate(12) == 5\n", "solve"),
        True,
    ),
)

# Each is the start of a module whose `solve` does not exist, or is what it tries.
INLINE: dict[str, tuple[Profile, str]] = {
    "exits": ("single", "import os\nos._exit(0)\n"),
    "kills all": ("multi", "import os, signal\nos.kill(-1, signal.SIGKILL)\n"),
    "spins": ("single", "while True:\n    pass\n"),
    "sleeps": ("single", "import time\ntime.sleep(60)\n"),
    "memory": ("single", "x = [bytearray(1 << 24) for _ in range(1 << 12)]\n"),
    "forks": ("multi", "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"),
    "daemon": (
        "multi",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(3600)\n",
    ),
    "floods": ("single", "while True:\n    print('PASSED ' * 1000)\n"),
    "fills disk": ("single", "with open('/tmp/x', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 20))\n"),
    "descriptors": ("single", "import os\nkept = [os.dup(1) for _ in range(10_000)]\n"),
    "equals all": (
        "single",
        "class All(int):\n    __eq__ = lambda self, other: True\n    __hash__ = None\n\n\nsolve = lambda n: All(-1)\n",
    ),
    "frames": (
        "single",
        "import os\nfor n in range(3, 64):\n    try:\n        os.write(n, b'{\"value\":49}' * 8)\n    except OSError:\n"
        "        pass\nsolve = lambda n: 49\n",
    ),
}
PRINTS = {  # programs that should double a number
    "one answer": "print(42)\n",
    "exit code": "print(int(input()) * 2)\nraise SystemExit(1)\n",
    "PASSED": "print('1 passed in 0.01s')\n",
}
ESCAPE = """
for folder in ("/tmp", "/var/tmp", "/dev/shm", {folder!r}):
    try:
        open(f"{{folder}}/{marker}", "w").write("escaped")
    except OSError:
        pass
"""
ESCAPE_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def all_programs(pool: Pool, guard: attacks.Canary, marker: str) -> list[Program]:
    """Right programs and hostile ones: those below, and the attack suite's where it is at hand."""
    programs = [*RIGHT]
    inline = {**INLINE, "escapes": ("single", ESCAPE.format(folder=str(guard.path.parent), marker=marker))}
    for name, (profile, code) in inline.items():
        programs.append(Program(name, code, SQUARES, False, profile, limits=HOSTILE_LIMITS))
    for name, code in PRINTS.items():
        programs.append(Program(name, code, DOUBLE, False, limits=HOSTILE_LIMITS))
    own = len(programs) - len(RIGHT)
    try:
        table = attacks.load_attacks()
    except FileNotFoundError as error:
        print(error)
        table = ()
    missing = attacks.missing_kinds() if table else {}
    for name in {attack.kind: None for attack in table if attack.kind not in missing}:
        kind = attacks.KINDS[name]
        code = (attacks.FOLDER / kind.right).read_text(encoding="utf-8")
        programs.append(Program(f"right {name}", code, kind.tests, True, kind.profile, kind.language))
    for attack in table:
        here = not attack.machines or platform.machine() in attack.machines
        if here and attack.kind not in missing:
            kind, limits = attacks.KINDS[attack.kind], replace(HOSTILE_LIMITS, **attack.limits)
            program = Program(attack.name, attack.source(guard), kind.tests, False, kind.profile, kind.language, limits)
            programs.append(program)
    hostile = sum(not program.right for program in programs)
    print(f"{len(programs) - hostile} right programs; {hostile} hostile ones, {hostile - own} from the attack suite")
    for name, reason in missing.items():
        print(f"no attacks of the kind {name}: {reason}")
    return programs


# ---- what this process and its descendants hold ----


@dataclass(frozen=True)
class Holdings:
    processes: frozenset[int]  # descendants, zombies included
    descriptors: int  # open in this process and in its children, the launcher above all
    mounts: int  # in view of the same
    files: frozenset[str]  # temporary


def descendants(of: int) -> dict[int, int]:
    """Every process below `of`, zombies included: pid to its parent."""
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):  # ended just now
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: dict[int, int] = {}
    layer = {of}
    while layer:
        layer = {pid for pid, parent in parents.items() if parent in layer and pid not in found}
        found |= {pid: parents[pid] for pid in layer}
    return found


def resident_mb() -> float:
    """Resident memory of this process, without what the allocator keeps for later: that is bounded, hence no leak."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # of glibc
        libc.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def holdings(folders: Sequence[str], marker: str) -> Holdings:
    """Looks once. Files: below `folders`, and what escaped programs leave elsewhere."""
    me = os.getpid()
    below = descendants(me)
    descriptors = mounts = 0
    for pid in (me, *(pid for pid, parent in below.items() if parent == me)):
        try:
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
            mounts += len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):  # ended just now
            continue
        except OSError as error:
            if error.errno != errno.EINVAL:  # what a zombie's mounts answer
                raise
    files = {str(path) for folder in folders for path in Path(folder).rglob("*")}
    files |= {f"{place}/{marker}" for place in ESCAPE_FOLDERS if os.path.exists(f"{place}/{marker}")}
    return Holdings(frozenset(below), descriptors, mounts, frozenset(files))


def fullest(look: Callable[[], Holdings]) -> Holdings:
    """What an idle pool holds: the most of several looks, since a container may be between an end and a start."""
    looks = []
    for _ in range(5):
        time.sleep(0.4)
        looks.append(look())
    return max(looks, key=lambda held: len(held.processes))


def settled(look: Callable[[], Holdings], wanted: Holdings) -> Holdings:
    """Holdings when they are no more than `wanted`, or after some seconds."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = look()
        fits = len(now.processes) <= len(wanted.processes) and now.descriptors <= wanted.descriptors
        if (fits and now.files <= wanted.files) or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def leaked(before: Holdings, warm: Holdings, idle: Holdings, after: Holdings, growth_mb: float) -> dict[str, int]:
    """Leaks by kind: while the pool is open, from `warm` to `idle`, and over its whole life, `before` to `after`."""
    more = lambda count: max(0, count(idle) - count(warm), count(after) - count(before))
    return {
        "processes": more(lambda held: len(held.processes)),
        "descriptors": more(lambda held: held.descriptors),
        "mounts": more(lambda held: held.mounts),
        "temporary files": more(lambda held: len(held.files)),
        f"memory (grew by {growth_mb:.1f} MB)": int(growth_mb > GROWTH_MB),
    }


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """What loses its parent comes to this process instead of the machine's first one: nothing escapes the count."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def own_temporary_folder() -> Iterator[str]:
    """Temporary files of this process and its children go to a folder that nobody else uses."""
    previous = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.chmod(folder, 0o755)  # candidates' unprivileged user has to get through
        os.environ["TMPDIR"], tempfile.tempdir = folder, None
        try:
            yield folder
        finally:
            tempfile.tempdir = None
            if previous is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = previous


# ---- the soak ----


class Tally:
    """Counts of what became of the runs; of each way and program that went wrong, how often and one verdict."""

    def __init__(self) -> None:
        self.runs = 0
        self.counts: Counter[str] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.examples: dict[tuple[str, str], str] = {}

    def add(self, program: Program, verdict: Verdict) -> None:
        self.runs += 1
        self.counts["right" if program.right else "hostile"] += 1
        wrong = None
        if verdict.status == "infra_error":
            wrong = "infra error"
        elif verdict.passed != program.right:
            wrong = "false pass" if verdict.passed else "false fail"
        if wrong is not None:
            self.counts[wrong] += 1
            self.failures[wrong, program.name] += 1
            self.examples[wrong, program.name] = f"{verdict.status}: {verdict.detail}"[:300]


def settling(programs: list[Program]) -> list[Program]:
    """Runs after which a pool and this process hold what they may keep.

    Every slot has met every kind, results of compilers are kept, and the largest answers were decoded side by side:
    the allocator does not give all of that memory back, but does not take more when it happens again.
    """
    right = [program for program in programs if program.right for _ in range(2 * SLOTS)]
    return right + [program for program in programs if not program.right for _ in range(SLOTS)]


def mixture(programs: list[Program], runs: int, seed: int) -> Iterator[Program]:
    """First those of `settling`, then right and hostile ones, half and half at random; `runs` in all."""
    first = settling(programs)[:runs]
    yield from first
    right, hostile = ([program for program in programs if program.right is kind] for kind in (True, False))
    draw = random.Random(seed)
    for _ in range(runs - len(first)):
        yield draw.choice(right if draw.random() < 0.5 else hostile)


def outcome(future: Future[Verdict]) -> Verdict:
    """The verdict. A candidate that makes the judge raise has broken it, which is counted like a broken slot.

    Raises:
      SandboxUnavailable: this machine cannot run candidate code.
    """
    try:
        return future.result()
    except SandboxUnavailable:
        raise
    except Exception as error:
        return Verdict(status="infra_error", detail=f"the judge raised {error!r}")


def run_all(pool: Pool, programs: Iterable[Program], tally: Tally, bar: Progress) -> None:
    """Runs all, as many at one time as keep every slot busy and no more: memory of this process stays flat."""
    pending: deque[tuple[Program, Future[Verdict]]] = deque()

    def take() -> None:
        program, future = pending.popleft()
        tally.add(program, outcome(future))
        shown = ("false pass", "false fail", "infra error")
        bar.update(tally.runs, "", {name: tally.counts[name] for name in shown})

    for program in programs:
        future = submit(
            pool,
            program.code,
            program.tests,
            language=program.language,
            profile=program.profile,
            limits=program.limits,
        )
        pending.append((program, future))
        if len(pending) == IN_FLIGHT:
            take()
    while pending:
        take()


def measure(runs: int) -> dict[str, float]:
    """The soak of `runs` runs: prints its tables, returns its figures."""
    tally, marker, started = Tally(), f"soak-escape-{os.getpid()}", time.perf_counter()
    with adopted_orphans(), own_temporary_folder() as folder, attacks.canary() as guard:
        look = lambda: holdings([folder, str(guard.path.parent)], marker)
        before = look()
        with Pool(PoolConfig(slots=SLOTS, runs_per_slot=RUNS_PER_SLOT)) as pool, Progress(runs, "soak") as bar:
            programs = all_programs(pool, guard, marker)
            mixed = mixture(programs, runs, seed=0)
            run_all(pool, itertools.islice(mixed, max(runs // 2, len(settling(programs)))), tally, bar)
            warm, warm_mb = fullest(look), resident_mb()
            run_all(pool, mixed, tally, bar)
            idle, growth_mb = settled(look, warm), resident_mb() - warm_mb
        after = settled(look, before)
        leaks = leaked(before, warm, idle, after, growth_mb)
        leaks["changes of the canary"] = int(not guard.intact())
    return report(tally, leaks, growth_mb, time.perf_counter() - started)


def report(tally: Tally, leaks: dict[str, int], growth_mb: float, seconds: float) -> dict[str, float]:
    """Prints what happened, and gives the figures."""
    names = ("right", "hostile", "false pass", "false fail", "infra error")
    print_table(f"soak on {SLOTS} slots, {seconds:.0f} s", names, [[tally.counts[name] for name in names]])
    print_table("left behind", ["kind", "count"], [list(row) for row in leaks.items()])
    if tally.failures:
        rows = [[*key, count, tally.examples[key]] for key, count in tally.failures.most_common()]
        print_table("went wrong", ["how", "program", "times", "a verdict"], rows)
    return {
        "soak_runs": tally.runs,
        "soak_false_pass": tally.counts["false pass"],
        "soak_false_fail": tally.counts["false fail"],
        "soak_infra_errors": tally.counts["infra error"],
        "soak_leaks": sum(leaks.values()),
        "soak_memory_growth_mb": growth_mb,
    }
