"""Hostile programs against the sandbox of this machine: each has to fail, change nothing and leave nothing.

    with canary() as guard, attack_pool(PoolConfig()) as pool:
        for attack in load_attacks():
            print(run_attack(pool, attack, guard).problems)

The programs and their table, `attacks.json`, lie in tests/sandbox/attacks. To add one, put it there and give it
a row: `file`; `kind`, a key of KINDS; what it `tries`; the `right` outcome, for people, and as `verdicts`, the
statuses that its verdict may have. Optional: `executions`, the statuses that its last execution may have;
`flags` that have to be raised; `partial`: single tests may pass; `limits` that differ; `machines` whose
instructions it holds; `slow`: takes a second or more. All are asked for `solve(n)`, the sum of the squares of
n's decimal digits. A good attack computes the right answer only if it got through, so that a missing
protection shows as a pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import (
    Call,
    CheckTests,
    FunctionTests,
    PytestTests,
    StdioTests,
    Tests,
    WhiteBoxTests,
)
from rl_posttrain.sandbox.languages import LANGUAGES
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.processes import descendants
from rl_posttrain.sandbox.seccomp import Profile
from rl_posttrain.types import Verdict

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "sandbox" / "attacks"
LIMITS = Limits(cpu_seconds=2.0, wall_seconds=4.0)
CANARY = "/srv/CANARY"  # the name in the programs, for which the canary's own path is put
LEAKS = ("root:x:0:0",)  # how the machine's /etc/passwd begins
SHARED_MEMORY_BYTES = 20 << 20  # by which the machine's shared memory may grow meanwhile, for other reasons
SETTLE_SECONDS = 5.0  # until what ends has ended

VALUES = ((7, 49), (12, 5), (999, 243), (1024, 21))
CALLS = FunctionTests("solve", tuple(Call((n,), value) for n, value in VALUES))
CASES = StdioTests(tuple((f"{n}\n", f"{value}\n") for n, value in VALUES))
CHECK = CheckTests(
    "def check(candidate):\n    assert candidate(candidate(7)) == 97\n"
    + "".join(
        f"    got = candidate({n})\n    assert got == {v} and not got != {v} and got in [{v}]\n" for n, v in VALUES
    ),
    "solve",
)
PYTEST = PytestTests(
    "import pytest\nfrom solution import solve\n\n\n"
    f"@pytest.mark.parametrize(('n', 'value'), {VALUES!r})\n"
    "def test_value(n, value):\n    assert solve(n) == value\n",
    tuple(f"test_value[{n}-{value}]" for n, value in VALUES),
)
# In the candidate's names, as some benchmarks do it.
PYTEST_STAR = PytestTests(
    "import pytest\nfrom math import isclose\nfrom solution import *\n\n\n"
    f"@pytest.mark.parametrize(('n', 'value'), {VALUES!r})\n"
    "def test_value(n, value):\n    assert isclose(solve(n), value) and sorted([1, solve(n)])[0] == 1\n",
    PYTEST.names,
)
WHITE_BOX = WhiteBoxTests(PYTEST.source)
WHITE_BOX_LITERALS = WhiteBoxTests(
    "from solution import solve\n"
    + "".join(f"\n\ndef test_{n}():\n    assert solve({n}) == {value}\n" for n, value in VALUES)
)


@dataclass(frozen=True)
class Kind:
    """How an attack is run, and a right program of that kind."""

    tests: Tests
    right: str  # its file
    language: str = "python"
    profile: Profile | None = None
    times: int = 1  # the last verdict counts: it must not have seen the earlier runs


KINDS = {
    "func": Kind(CALLS, "right.py", profile="single"),
    "func_exec": Kind(CALLS, "right.py", profile="multi"),
    "func_pair": Kind(CALLS, "right.py", profile="single", times=2),
    "stdio": Kind(CASES, "right_stdio.py"),
    "c": Kind(CASES, "right.c", "c"),
    "c_pair": Kind(CASES, "right.c", "c", times=2),
    "cpp": Kind(CASES, "right.cpp", "cpp"),
    "js": Kind(CASES, "right.js", "javascript"),
    "sh": Kind(CASES, "right.sh", "bash"),
    "pytest": Kind(PYTEST, "right.py"),
    "pytest_star": Kind(PYTEST_STAR, "right.py"),
    "check": Kind(CHECK, "right.py"),
    "whitebox": Kind(WHITE_BOX, "right.py"),
    "whitebox_literals": Kind(WHITE_BOX_LITERALS, "right.py"),
}


@dataclass(frozen=True)
class Attack:
    """A row of the table; see this module's docstring."""

    file: str
    kind: str
    tries: str
    right: str
    verdicts: Sequence[str]
    executions: Sequence[str] = ()
    flags: Sequence[str] = ()
    partial: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)
    machines: Sequence[str] = ()
    slow: bool = False

    @property
    def name(self) -> str:
        return Path(self.file).stem

    def source(self, guard: Canary) -> str:
        """The program, looking for this canary."""
        return (FOLDER / self.file).read_text(encoding="utf-8").replace(CANARY, str(guard.path))


@dataclass(frozen=True)
class Canary:
    """A file outside that everybody may change, for attacks to find."""

    path: Path
    secret: str  # its content

    def intact(self) -> bool:
        return self.path.is_file() and self.path.read_text() == self.secret


@dataclass(frozen=True)
class Result:
    """What came of one attack."""

    name: str
    kind: str
    problems: tuple[str, ...]  # what went wrong, in words; empty when all is well
    seconds: float = 0.0
    verdict: Verdict | None = None
    skipped: str | None = None  # why it was not run

    @property
    def ok(self) -> bool:
        return not self.problems and self.skipped is None


def load_attacks(folder: Path = FOLDER) -> tuple[Attack, ...]:
    """The table's rows.

    Raises:
      FileNotFoundError: the programs are not here: the message says where they are.
      ValueError: a row is not right.
    """
    table = folder / "attacks.json"
    if not table.is_file():
        raise FileNotFoundError(f"{table} does not exist: installed packages lack the attacks, run from a git clone")
    attacks = tuple(Attack(**row) for row in json.loads(table.read_text(encoding="utf-8")))
    for attack in attacks:
        if attack.kind not in KINDS:
            raise ValueError(f"{attack.file}: kind={attack.kind!r} is none of {', '.join(KINDS)}")
        if not (folder / attack.file).is_file():
            raise ValueError(f"{table} names {attack.file}, which is not there")
        if not attack.verdicts or {"pass", "infra_error"} & set(attack.verdicts):
            raise ValueError(f"{attack.file}: verdicts={attack.verdicts!r} must name the ways to fail")
    return attacks


@contextlib.contextmanager
def canary() -> Iterator[Canary]:
    """A canary for as long as the context lasts."""
    folder = Path(tempfile.mkdtemp(prefix="canary-", dir="/var/tmp"))  # a run has a /tmp of its own
    try:
        guard = Canary(folder / "CANARY", secrets.token_hex(16))
        guard.path.write_text(guard.secret)
        folder.chmod(0o777)
        guard.path.chmod(0o666)
        yield guard
    finally:
        shutil.rmtree(folder)


def attack_pool(config: PoolConfig) -> Pool:
    """A pool with one slot, so that the next run is in the place of the last one."""
    return Pool(dataclasses.replace(config, slots=1, limits=LIMITS))


def run_attack(pool: Pool, attack: Attack, guard: Canary) -> Result:
    """Runs one attack, then a right program in its place, and looks at what is left.

    Raises:
      ValueError: the pool has several slots.
      SandboxUnavailable: this machine cannot run candidate code; the message says what to do.
    """
    if pool.config.slots != 1:
        raise ValueError(f"slots={pool.config.slots}: the right program has to follow in the same place; use 1")
    kind, code = KINDS[attack.kind], attack.source(guard)
    limits = dataclasses.replace(pool.config.limits, **attack.limits)
    pool.statistics()
    before, started = shared_memory_bytes(), time.monotonic()
    problems, verdict = [], None
    try:
        for _ in range(kind.times):
            verdict = _judge(pool, kind, code, limits)
    except SandboxUnavailable:
        raise
    except Exception as error:  # a trainer would stop at it, or lose the sample
        problems.append(f"it makes the judge raise {error!r}")
    seconds = time.monotonic() - started
    if verdict is not None:
        problems += [*_outcome_problems(attack, verdict, limits.cpu_seconds), *_leaks(verdict, guard)]
    if retries := pool.statistics()["retries"]:
        problems.append(f"the sandbox failed {retries:.0f} times")
    if not guard.intact():
        problems.append("the canary outside was changed")
    if left := _settled(lambda: runs_left(), 0):
        problems.append(f"{left} processes left")
    if (grown := _settled(lambda: shared_memory_bytes() - before, SHARED_MEMORY_BYTES)) > SHARED_MEMORY_BYTES:
        problems.append(f"{grown >> 20} MiB of shared memory left")
    for name in dict.fromkeys((attack.kind, "func")):
        after = check_right(pool, name)
        problems += [f"{problem}, next in its place" for problem in after.problems]
    return Result(attack.name, attack.kind, tuple(problems), seconds, verdict)


def check_right(pool: Pool, name: str) -> Result:
    """A right program of the kind `name`, which has to pass."""
    kind = KINDS[name]
    comment = "//" if kind.language in ("c", "cpp", "javascript") else "#"
    # Never the same text twice: compiled programs are kept.
    code = (FOLDER / kind.right).read_text(encoding="utf-8") + f"\n{comment} {secrets.token_hex(4)}\n"
    started = time.monotonic()
    verdict = _judge(pool, kind, code, Limits(cpu_seconds=10.0, wall_seconds=60.0))
    problems = () if verdict.passed else (f"a right program ({name}) got {verdict.status!r}: {verdict.detail}",)
    return Result(f"right_{name}", name, problems, time.monotonic() - started, verdict)


def run_all(config: PoolConfig, attacks: Iterable[Attack]) -> Iterator[Result]:
    """Results of right programs of every kind, of the attacks, and of the end of their pool, as they come.

    Raises:
      SandboxUnavailable: this machine cannot run candidate code; the message says what to do.
    """
    attacks = tuple(attacks)
    known = set(descendants(os.getpid()))
    with canary() as guard, attack_pool(config) as pool:
        missing = missing_kinds()
        for name in dict.fromkeys(attack.kind for attack in attacks):
            if name not in missing:
                yield check_right(pool, name)
        for attack in attacks:
            reason = missing.get(attack.kind)
            if attack.machines and platform.machine() not in attack.machines:
                reason = f"it holds instructions of {', '.join(attack.machines)}"
            if reason is not None:
                yield Result(attack.name, attack.kind, (), skipped=reason)
            else:
                yield run_attack(pool, attack, guard)
    left = _settled(lambda: len(set(descendants(os.getpid())) - known), 0)
    yield Result("end of the pool", "", (f"{left} processes outlive the pool",) if left else ())


def missing_kinds() -> dict[str, str]:
    """The kinds whose languages or tools are not installed here, and what to do."""
    reasons = {name: LANGUAGES[kind.language].missing() for name, kind in KINDS.items()}
    if importlib.util.find_spec("pytest") is None:
        users = {name for name, kind in KINDS.items() if isinstance(kind.tests, (PytestTests, WhiteBoxTests))}
        reasons |= dict.fromkeys(users, "pytest is missing: `pip install pytest`")
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _judge(pool: Pool, kind: Kind, code: str, limits: Limits) -> Verdict:
    return judge(pool, code, kind.tests, language=kind.language, profile=kind.profile, limits=limits)


def _outcome_problems(attack: Attack, verdict: Verdict, cpu_seconds: float) -> Iterator[str]:
    if verdict.passed:
        yield "it passes"
    elif verdict.status not in attack.verdicts:
        yield f"the verdict is {verdict.status!r} instead of {' or '.join(attack.verdicts)}: {verdict.detail[:200]}"
    elif any(verdict.tests) and not attack.partial:
        yield f"it passes some tests: {verdict.tests}"
    execution = verdict.executions[-1].status if verdict.executions else None
    if attack.executions and execution not in attack.executions:
        yield f"the execution is {execution!r} instead of {' or '.join(attack.executions)}"
    used = verdict.executions[-1].cpu_s if verdict.executions else 0.0
    if used > 2 * cpu_seconds + 1 and verdict.status != "compile_error":  # compilers have limits of their own
        yield f"it used {used:.1f} s of processor time; at most {cpu_seconds} are allowed"
    for flag in sorted(set(attack.flags) - {flag.name for flag in verdict.flags}):
        yield f"the flag {flag!r} is missing"


def _leaks(verdict: Verdict, guard: Canary) -> Iterator[str]:
    texts = [verdict.detail]
    for execution in verdict.executions:
        texts += [execution.stdout, execution.stderr, execution.traceback]
    for secret in (guard.secret, *LEAKS):
        if any(secret in text for text in texts):
            yield f"a file of the machine was read: {secret!r}"


def _settled(measure: Any, bound: int) -> int:
    """What `measure()` gives once it is at most `bound`, or after a while."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (value := measure()) > bound and time.monotonic() < deadline:
        time.sleep(0.01)
    return value


def runs_left() -> int:
    """How many processes of runs there are below this process.

    Containers have a process namespace in this one's, and runs have one in theirs.
    """
    return sum(_namespaces(pid) >= _namespaces(os.getpid()) + 2 for pid in descendants(os.getpid()))


def _namespaces(pid: int) -> int:
    """How many process namespaces `pid` is in, from here inwards; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((len(line.split()) - 1 for line in lines if line.startswith("NSpid:")), 0)


def shared_memory_bytes() -> int:
    """Memory in files and shared mappings on the whole machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


def table(results: Iterable[Result]) -> Any:
    """The results for the terminal, as a rich table."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table("attack", "kind", "verdict", "seconds", "problems", box=None)
    for result in results:
        status = "skipped" if result.skipped else result.verdict.status if result.verdict else "-"
        words = Text(result.skipped or "; ".join(result.problems) or "none", "" if result.ok else "yellow")
        drawn.add_row(result.name, result.kind, status, f"{result.seconds:.2f}", words)
    return drawn


def summary(results: Sequence[Result]) -> str:
    """One line: how many there were, and which of them show a problem."""
    skipped = sum(result.skipped is not None for result in results)
    bad = [result.name for result in results if result.problems]
    line = f"{len(results) - skipped} checks of the sandbox, {len(bad)} with problems, {skipped} skipped"
    return f"{line}: {', '.join(bad)}" if bad else line
