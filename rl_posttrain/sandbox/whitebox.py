"""Suites that live in the candidate's own process, with a twin that every right program fails.

Nothing that such a process says can be proved. So a candidate passes when its suite says so and its twin, the
same tests with wrong expectations, does not: `trust="tamper_evident"`. Which tests there are is found out
elsewhere, in the referee's container, where the candidate cannot hide one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence

from rl_posttrain.sandbox import disguise, twins
from rl_posttrain.sandbox.answers import LIMIT_STATUSES, TAMPERING, Answer, Setting, ask, clean, decide, void, why_ended
from rl_posttrain.sandbox.codec import Malformed, decode
from rl_posttrain.sandbox.job import Job, RunEnded
from rl_posttrain.sandbox.kinds import WhiteBoxTests
from rl_posttrain.sandbox.pool import Place
from rl_posttrain.sandbox.programs import CompileError, program, refused
from rl_posttrain.sandbox.referees import LIMITS, UnusableTests, copy_pytest
from rl_posttrain.sandbox.session import Session
from rl_posttrain.types import Execution, Flag, Verdict

PYTEST_SECONDS = 3.0  # of CPU time, for loading pytest beside the candidate; three times as much on the wall
SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
OUTCOMES = ("pass", "wrong", "error", "skipped")


def judge_whitebox(place: Place, setting: Setting, code: str, tests: WhiteBoxTests) -> Verdict:
    """The verdict on `code` by a suite and its twin: one test per pytest id; one in all for other languages.

    A candidate that passes the suite and any test of the twin has the flag "passes_twin", and fails everything.
    Where no twin is given, a Python suite has two: one that looks at every assertion, and one that does not show.

    Raises:
      ValueError: a twin has to be given and is not, or the suite is not Python.
      SandboxUnavailable: pytest is not installed.
    """
    twin = tests.twin or _derive(setting.language.name, tests.suite)
    if setting.language.name == "python":
        try:
            suite = disguise.plain(tests.suite)
        except SyntaxError as error:
            raise ValueError(f"the suite is not Python: {error}") from error
        twin_tests: list[tuple[str, frozenset[str] | None]] = [(twin, None)]
        if tests.twin is None:
            # The same for the same program, so that a verdict can be repeated.
            seed = int.from_bytes(hashlib.sha256(f"{code}\0{suite}".encode("utf-8", "replace")).digest()[:8])
            twin_tests.insert(0, disguise.disguise(suite, seed))
        verdict = _judge_python(place, setting, code, suite, twin_tests)
    else:
        verdict = _judge_program(place, setting, code, twins.armed(setting.language.name, tests.suite), twin)
    return dataclasses.replace(verdict, trust="tamper_evident")


_derive = functools.lru_cache(maxsize=1024)(twins.derive)


# ---- Python ----


def _judge_python(
    place: Place, setting: Setting, code: str, suite: str, twin_tests: list[tuple[str, frozenset[str] | None]]
) -> Verdict:
    """`twin_tests`: twins, each with the tests that a right program fails in it; None: all."""
    place.share("tools", copy_pytest)
    expected = _collect(place, suite)
    rows, complaint, execution = _run(place, setting, code, suite)
    answers = [Answer(*rows.get(name, ("error", "it did not run"))) for name in expected]  # type: ignore[arg-type]
    if not rows:
        grammar = complaint.split(":")[0] in SYNTAX_ERRORS
        why = Answer("compile_error" if grammar else "error", complaint) if complaint else why_ended(execution)
        answers = [why] * len(expected)
    elif execution.status in LIMIT_STATUSES and answers[-1].outcome == "pass":
        answers[-1] = why_ended(execution)
    verdict = decide(answers, len(expected), [execution], why_ended(execution))
    for twin, wrong in twin_tests:
        if not verdict.passed:
            break
        if wrong is None or wrong:
            rows, _, second = _run(place, setting, code, twin)
            held = {
                name: row[0] == "pass" for name, row in rows.items() if wrong is None or name.split("[")[0] in wrong
            }
            verdict = _compare(verdict, held, bool(rows), second)
    return verdict


def _compare(verdict: Verdict, held: dict[str, bool], ran: bool, second: Execution) -> Verdict:
    """The verdict on a candidate that passed its suite, after the twin."""
    passed = sorted(name for name, holds in held.items() if holds)
    if passed:
        flag = Flag("passes_twin", f"passes tests with wrong expectations: {', '.join(passed)[:200]}")
        second = dataclasses.replace(second, flags=(*second.flags, flag))
    executions = (*verdict.executions, second)
    flags = tuple(flag for execution in executions for flag in execution.flags)
    count = len(verdict.tests)
    tampering = [flag for flag in flags if flag.name in TAMPERING]
    if tampering:
        return void(count, f"tampering: {tampering[0].detail}", executions, flags)
    if not ran:
        ended = why_ended(second)
        answer = Answer(ended.outcome, f"tests with wrong expectations gave no report: {ended.detail}")
        return decide([answer] * count, count, executions, answer)
    return dataclasses.replace(verdict, executions=executions, flags=flags)


def _run(place: Place, setting: Setting, code: str, suite: str) -> tuple[dict[str, tuple[str, str]], str, Execution]:
    """What the candidate's process says of each test, what it says of the whole, and the run."""
    found: list[bytes | Answer] = []

    def driver(session: Session) -> None:
        try:
            found.append(ask(session, {"code": code, "suite": suite}, b'"result":'))
        except RunEnded:
            return

    limits = setting.limits
    seconds = {"cpu_seconds": limits.cpu_seconds + PYTEST_SECONDS}
    seconds["wall_seconds"] = limits.wall_seconds + 3 * PYTEST_SECONDS
    execution, _ = place.run(Job("suite", dataclasses.replace(limits, **seconds), setting.profile), driver)
    if not found:
        return {}, "", execution
    if isinstance(found[0], Answer):
        return {}, found[0].detail, execution
    try:
        rows, complaint = _read(decode(found[0], len(found[0])))
    except Malformed as error:
        return {}, str(error), execution
    return rows, complaint, execution


def _read(report: object) -> tuple[dict[str, tuple[str, str]], str]:
    if not (type(report) is list and len(report) == 2 and type(report[0]) is list and type(report[1]) is str):
        raise Malformed("not a report")
    rows = {}
    for row in report[0]:
        if not (type(row) is list and len(row) == 3 and all(type(part) is str for part in row) and row[1] in OUTCOMES):
            raise Malformed("not a report")
        rows[row[0]] = (row[1], clean(row[2]))
    return rows, clean(report[1])


_collected: dict[str, tuple[str, ...]] = {}  # of suites, as long as this process lives
COLLECTED = 4096


def _collect(place: Place, suite: str) -> Sequence[str]:
    """The ids of a suite's tests.

    Raises:
      UnusableTests: pytest finds none, or cannot load it without the candidate.
    """
    if suite in _collected:
        return _collected[suite]
    reports: list[dict] = []

    def driver(session: Session) -> None:
        try:
            reports.append(json.loads(session.ask(json.dumps({"collect": suite}).encode()))["report"])
        except RunEnded:
            return

    execution, _ = place.run_referee(Job("referee", LIMITS), driver)
    report = reports[0] if reports else {"tests": [], "collection": [["error", why_ended(execution).detail]]}
    if report["collection"] or not report["tests"]:
        reasons = [row[1] for row in report["collection"]] or [report.get("missing") or report.get("unusable")]
        raise UnusableTests(f"pytest cannot collect the white-box suite, with a stand-in for the candidate: {reasons}")
    if len(_collected) >= COLLECTED:
        _collected.clear()
    _collected[suite] = tuple(row[0] for row in report["tests"])
    return _collected[suite]


# ---- other languages ----


def _judge_program(place: Place, setting: Setting, code: str, suite: str, twin: str) -> Verdict:
    try:
        execution = _execute(place, setting, code, suite)
    except CompileError as error:
        return refused(error.execution, 1)
    answer = Answer("pass")
    if execution.status in LIMIT_STATUSES:
        answer = why_ended(execution)
    elif execution.status != "ok":
        words = execution.stderr.strip().splitlines()
        failed = next((line for line in words if "assert" in line.lower()), "")
        answer = Answer(
            "wrong" if failed else "error", failed[:200] or (words or [why_ended(execution).detail])[-1][:200]
        )
    verdict = decide([answer], 1, [execution], answer)
    if not verdict.passed:
        return verdict
    try:
        second = _execute(place, setting, code, twin)
    except CompileError as error:
        return refused(error.execution, 1)
    ran = second.status not in LIMIT_STATUSES
    return _compare(verdict, {"the suite": second.status == "ok"}, ran, second)


def _execute(place: Place, setting: Setting, code: str, suite: str) -> Execution:
    with program(place, setting, f"{code}\n{suite}") as run:
        return run("")
