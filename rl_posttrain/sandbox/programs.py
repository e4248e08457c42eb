"""Programs that read stdin and write stdout, in any language: compiled once, run once per case, compared out here."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator

from rl_posttrain.sandbox.answers import (
    LIMIT_STATUSES,
    SHOWN,
    Answer,
    Setting,
    decide,
    how_ended,
    note_error,
    why_ended,
)
from rl_posttrain.sandbox.bubblewrap import SANDBOX_ENVIRONMENT
from rl_posttrain.sandbox.job import Job
from rl_posttrain.sandbox.kinds import StdioTests
from rl_posttrain.sandbox.languages import COMPILE_LIMITS
from rl_posttrain.sandbox.pool import Place
from rl_posttrain.sandbox.referees import Checker
from rl_posttrain.sandbox.session import Session
from rl_posttrain.types import Execution, Outcome, Verdict

SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")  # of Python: found before anything ran
# Python's, Java's and JavaScript's exceptions, C++'s; Go's.
ERROR_LINE = re.compile(r"(Exception in \S+ \S+ )?[\w.]*(Error|Exception)\b|what\(\): |panic: |fatal error: ")
HINT = "note: run with `RUST_BACKTRACE"  # the last line of Rust's panics, below the one that names the error


class CompileError(Exception):
    """The compiler refused the program, or reached a limit. The argument is its `Execution`."""

    @property
    def execution(self) -> Execution:
        return self.args[0]


def judge_programs(place: Place, setting: Setting, code: str, tests: StdioTests) -> Verdict:
    """The verdict on `code` by what it prints for each input."""
    executions: list[Execution] = []
    answers: list[Answer] = []
    count = len(tests.cases)
    try:
        with program(place, setting, code) as run:
            for stdin, expected in tests.cases:
                execution = run(stdin)
                executions.append(execution)
                answers.append(_grade(execution, expected, tests))
                if execution.status == "time_limit":  # the other cases would likely cost as much, for nothing
                    break
    except CompileError as error:
        return refused(error.execution, count)
    if tests.checker is not None:
        answers = _check(place, tests, executions, answers)
    return decide(answers, count, executions, Answer("skipped", "not run"))


def refused(execution: Execution, count: int) -> Verdict:
    """The verdict on a program that was not compiled."""
    words = (execution.stderr.strip() or execution.stdout.strip()).splitlines()  # Go's compiler writes to stdout
    if execution.status == "compile_error":
        detail = next((line for line in words if "error" in line), words[0] if words else how_ended(execution))
    else:
        detail = why_ended(execution).detail
    outcomes: tuple[Outcome, ...] = ("compile_error",) * count
    return Verdict(
        "compile_error", (False,) * count, f"compiling: {detail[: 2 * SHOWN]}", (execution,), execution.flags, outcomes
    )


@contextlib.contextmanager
def program(place: Place, setting: Setting, code: str) -> Iterator:
    """`run(stdin) -> Execution` of a program, which is compiled first where its language is.

    Raises:
      CompileError: it does not compile.
    """
    language = setting.language
    if not language.run:
        yield lambda stdin: _run_python(place, setting, code, stdin)
        return
    artifact = _compile(place, setting, code) if language.compile else None
    files = {language.source: _bytes(code)} if artifact is None else {language.artifact: artifact}
    job = Job(
        "command",
        language.limits(setting.limits),
        setting.profile,
        argv=language.command(setting.limits),
        environment={**SANDBOX_ENVIRONMENT, **language.environment},
        files=files,
        proc=language.proc,
        reserved_bytes=language.reserved_bytes,
    )

    def run(stdin: str) -> Execution:
        execution, _ = place.run(dataclasses.replace(job, stdin=_bytes(stdin)), lambda session: session.wait())
        out = execution.status == "error" and any(words in execution.stderr for words in language.out_of_memory)
        return dataclasses.replace(execution, status="memory_limit") if out else execution

    try:
        yield run
    finally:
        if artifact is not None:
            os.close(artifact)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _compile(place: Place, setting: Setting, code: str) -> int:
    """A descriptor of the compiled program, which the caller closes."""
    language, artifacts = setting.language, place.artifacts
    key = hashlib.sha256("\0".join((language.name, *language.compile, code)).encode("utf-8", "replace")).hexdigest()
    found = artifacts.get(key)
    if found is None:
        found = _run_compiler(place, setting, code)
        artifacts.put(key, found)
    if isinstance(found, Execution):
        raise CompileError(found)
    return found


def _run_compiler(place: Place, setting: Setting, code: str) -> int | Execution:
    language = setting.language
    if language.share is not None:
        place.share(language.name, language.share)
    job = Job(
        "command",
        COMPILE_LIMITS,
        "multi",
        argv=language.compile,
        environment={**SANDBOX_ENVIRONMENT, **language.environment},
        files={language.source: _bytes(code)},
        artifact=language.artifact,
        proc=language.proc,
        reserved_bytes=0,
    )

    def driver(session: Session) -> int | None:
        session.wait()
        return session.artifact()

    execution, artifact = place.run(job, driver)
    if execution.status == "ok" and artifact is not None:
        return artifact
    if artifact is not None:
        os.close(artifact)
    limited = execution.status in LIMIT_STATUSES
    return execution if limited else dataclasses.replace(execution, status="compile_error")


def _run_python(place: Place, setting: Setting, code: str, stdin: str) -> Execution:
    """A Python program in the harness's own interpreter, which is three times as fast as a new one."""

    def driver(session: Session) -> None:
        identity = secrets.token_hex(8)
        reply = session.wait(json.dumps({"id": identity, "code": code}).encode())
        if reply is None:
            return
        prefix = b'{"id":"%s","error":' % identity.encode()
        if reply.startswith(prefix) and reply.endswith(b"}"):
            note_error(session, reply[len(prefix) : -1])
        else:
            session.kill("unsolicited_frame", "a reply from a program that was asked nothing")

    job = Job("program", setting.limits, setting.profile, _bytes(stdin))
    return place.run(job, driver)[0]


# ---- comparison ----


def _grade(execution: Execution, expected: str, tests: StdioTests) -> Answer:
    if execution.status in LIMIT_STATUSES:
        return why_ended(execution)
    if execution.status != "ok":
        said = _last_words(execution.traceback or execution.stderr)
        syntax = execution.traceback and said.startswith(SYNTAX_ERRORS)
        return Answer("compile_error" if syntax else "error", f"{how_ended(execution)}{': ' * bool(said)}{said}")
    if tests.checker is not None or _agree(execution.stdout, expected, tests):
        return Answer("pass")
    return Answer("wrong", f"expected {expected[:SHOWN]!r}, got {execution.stdout[:SHOWN]!r}")


def _last_words(text: str) -> str:
    """The line that names the error, of what a program left on stderr."""
    lines = [line.strip() for line in text.strip().splitlines() if not line.startswith(HINT)] or [""]
    return next((line for line in reversed(lines) if ERROR_LINE.match(line)), lines[-1])[:SHOWN]


def _agree(stdout: str, expected: str, tests: StdioTests) -> bool:
    if tests.comparison == "exact":
        return stdout == expected
    if tests.comparison == "lines":
        return _lines(stdout) == _lines(expected)
    got, want = stdout.split(), expected.split()
    return len(got) == len(want) and all(_same_word(g, w, tests.tolerance) for g, w in zip(got, want, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_word(got: str, want: str, tolerance: float) -> bool:
    if got == want or not tolerance:
        return got == want
    try:
        left, right = float(got), float(want)
    except ValueError:
        return False
    if math.isnan(right):
        return math.isnan(left)
    if any(math.isinf(number) and any(map(str.isdigit, word)) for number, word in ((left, got), (right, want))):
        return False  # a number beyond the range of floats, which is not infinity: equal by its text alone
    return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)


def _check(place: Place, tests: StdioTests, executions: list[Execution], answers: list[Answer]) -> list[Answer]:
    """The answers with those of the trusted checker, for the cases that ran to their end."""
    assert tests.checker is not None
    ran = [index for index, answer in enumerate(answers) if answer.outcome == "pass"]
    cases = [(tests.cases[index][0], executions[index].stdout, tests.cases[index][1]) for index in ran]
    checked = Checker(tests.checker).check(place, cases) if cases else []
    for index, answer in zip(ran, checked, strict=True):
        answers[index] = answer
    return answers
