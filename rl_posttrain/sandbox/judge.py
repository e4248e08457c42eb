"""Verdicts on candidate code, decided here, outside the sandbox.

The candidate sees inputs, one question at a time, and its answers come back as plain data. Expected
values and the comparison never leave this process. What the sandbox sends is taken for hostile bytes.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from rl_posttrain.sandbox.codec import Malformed, decode, encode, to_json
from rl_posttrain.sandbox.compare import normalise, same
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests, Tests
from rl_posttrain.sandbox.pool import Pool
from rl_posttrain.sandbox.seccomp import Profile
from rl_posttrain.sandbox.slot import InfrastructureError, Job, RunEnded, Session
from rl_posttrain.types import Execution, Flag, Verdict

Outcome = Literal["pass", "wrong", "error", "timeout", "malformed"]
TAMPERING = {"unsolicited_frame", "forged_frame"}
# A program that was cut off does not pass, even if its answers came first: whether they do is a race.
LIMIT_STATUSES = ("time_limit", "memory_limit", "output_limit")
SHOWN = 200  # characters of a value in a verdict's detail


def judge(pool: Pool, code: str, tests: Tests, *, profile: Profile = "single") -> Verdict:
    """Runs `code` against `tests`. A failure of the sandbox is "infra_error", never a wrong answer.

    Args:
      profile: "single" refuses new processes (threads are fine), which makes the memory limit a hard bound;
        "multi" allows fork and exec.

    Raises:
      SandboxUnavailable: this machine cannot run candidate code; the message says what to do.
    """
    try:
        if isinstance(tests, FunctionTests):
            return _judge_calls(pool, code, tests, profile)
        return _judge_cases(pool, code, tests, profile)
    except InfrastructureError as error:
        return Verdict(
            status="infra_error",
            detail=str(error),
            executions=(Execution(status="infra_error"),),
            flags=(Flag("infra_error", str(error)),),
        )


def judge_many(pool: Pool, items: Sequence[tuple[str, Tests]], *, profile: Profile = "single") -> list[Verdict]:
    """`judge` of every (code, tests) pair, on all slots at once; verdicts in the order of the items."""
    with ThreadPoolExecutor(max_workers=pool.config.slots, thread_name_prefix="judge") as executor:
        return list(executor.map(lambda item: judge(pool, *item, profile=profile), items))


# ---- function calls ----


@dataclass(frozen=True)
class _Answer:
    outcome: Outcome
    detail: str = ""


def _judge_calls(pool: Pool, code: str, tests: FunctionTests, profile: Profile) -> Verdict:
    answers: list[_Answer] = []

    def driver(session: Session) -> None:
        answers.clear()  # this may be the second attempt
        try:
            load = _ask(session, {"code": code}, b'"ok":')
            if isinstance(load, _Answer):
                answers.append(load)
                return
            for call in tests.calls:
                question = {"entry": tests.entry, "arguments": to_json(list(call.arguments))}
                answers.append(_grade(_ask(session, question, b'"value":'), call, tests.tolerance))
        except RunEnded:
            return

    job = Job("calls", pool.config.limits, profile)
    execution, _ = pool.run(job, driver)
    return _decide(answers, len(tests.calls), execution)


def _ask(session: Session, question: dict[str, Any], wanted: bytes) -> bytes | _Answer:
    """The bytes after `wanted` in the reply to a question, or why there are none.

    The reply has to repeat the question's random id: one that was prepared before the question cannot.
    """
    identity = secrets.token_hex(8)
    reply = session.ask(json.dumps({"id": identity, **question}).encode())
    prefix = b'{"id":"%s",' % identity.encode()
    if not (reply.startswith(prefix) and reply.endswith(b"}")):
        session.kill("forged_frame", "a reply without the id of its question")
        raise RunEnded
    body = reply[len(prefix) : -1]
    if body.startswith(wanted):
        return body[len(wanted) :]
    if body.startswith(b'"error":'):
        return _Answer("error", _note_error(session, body[len(b'"error":') :]))
    return _Answer("malformed", "the reply is neither a value nor an error")


def _note_error(session: Session, data: bytes) -> str:
    """One line on an exception that the candidate's process reported; its first one goes to the execution."""
    try:
        parts = decode(data, 1 << 18)
    except Malformed as error:
        return f"an unreadable error report: {error}"
    if not (type(parts) is list and len(parts) == 3 and all(type(part) is str for part in parts)):
        return "an unreadable error report"
    if session.error is None:
        session.error = [_clean(part) for part in parts]
    return _clean(f"{parts[0]}: {parts[1]}")[: 2 * SHOWN]


def _clean(text: str) -> str:
    """Without lone surrogates, so that it can be written anywhere."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _grade(data: bytes | _Answer, call: Call, tolerance: float) -> _Answer:
    if isinstance(data, _Answer):
        return data
    try:
        value = decode(data, len(data))  # the session bounded its size
    except Malformed as error:
        return _Answer("malformed", str(error))
    if same(normalise(call.expected, "expected"), value, tolerance):
        return _Answer("pass")
    want = encode(call.expected)[:SHOWN].decode("ascii", "replace")
    got = data[:SHOWN].decode("ascii", "replace")
    return _Answer("wrong", f"expected {want}, got {got}")


def _decide(answers: list[_Answer], count: int, execution: Execution) -> Verdict:
    tampering = [flag for flag in execution.flags if flag.name in TAMPERING]
    if tampering:
        detail = f"tampering: {tampering[0].detail}"
        return Verdict("malformed", (False,) * count, detail, (execution,), execution.flags)
    passed = [answer.outcome == "pass" for answer in answers[:count]]
    tests = tuple(passed + [False] * (count - len(passed)))
    if all(tests) and execution.status in LIMIT_STATUSES:
        tests = (*tests[:-1], False)
    if all(tests):
        return Verdict("pass", tests, "", (execution,), execution.flags)
    failed = next((answer for answer in answers if answer.outcome != "pass"), None)
    if failed is None:  # the run ended before it could answer, or was cut off after it did
        failed = _Answer(*_why_ended(execution))
    detail = f"test {tests.index(False) + 1}: {failed.detail}"
    return Verdict(failed.outcome, tests, detail, (execution,), execution.flags)


def _why_ended(execution: Execution) -> tuple[Outcome, str]:
    if execution.status == "time_limit":
        return "timeout", f"time limit: {execution.cpu_s:.2f} s of CPU, {execution.wall_s:.2f} s of wall time"
    if execution.status in ("memory_limit", "output_limit"):
        details = "; ".join(flag.detail for flag in execution.flags)
        return "error", f"{execution.status.replace('_', ' ')} {details}".rstrip()
    how = f"signal {execution.signal}" if execution.signal else f"exit code {execution.exit_code}"
    return "error", f"the program ended with {how} before it answered"


# ---- stdin and stdout ----


def _judge_cases(pool: Pool, code: str, tests: StdioTests, profile: Profile) -> Verdict:
    executions = []
    answers: list[_Answer] = []
    for stdin, expected in tests.cases:
        execution = _run_program(pool, code, stdin, profile)
        executions.append(execution)
        answers.append(_grade_output(execution, expected))
        if execution.status == "time_limit":  # the other cases would likely cost as much, for nothing
            break
    flags = tuple(flag for execution in executions for flag in execution.flags)
    passed = tuple(answer.outcome == "pass" for answer in answers)
    passed += (False,) * (len(tests.cases) - len(passed))
    if any(flag.name in TAMPERING for flag in flags):
        return Verdict("malformed", (False,) * len(passed), "tampering", tuple(executions), flags)
    if all(passed):
        return Verdict("pass", passed, "", tuple(executions), flags)
    index = passed.index(False)
    detail = f"test {index + 1}: {answers[index].detail}"
    return Verdict(answers[index].outcome, passed, detail, tuple(executions), flags)


def _run_program(pool: Pool, code: str, stdin: str, profile: Profile) -> Execution:
    def driver(session: Session) -> None:
        identity = secrets.token_hex(8)
        reply = session.wait(json.dumps({"id": identity, "code": code}).encode())
        if reply is None:
            return
        prefix = b'{"id":"%s","error":' % identity.encode()
        if reply.startswith(prefix) and reply.endswith(b"}"):
            _note_error(session, reply[len(prefix) : -1])
        else:
            session.kill("unsolicited_frame", "a reply from a program that was asked nothing")

    data = stdin.encode("utf-8", "replace")
    execution, _ = pool.run(Job("program", pool.config.limits, profile, data), driver)
    return execution


def _grade_output(execution: Execution, expected: str) -> _Answer:
    if execution.status in LIMIT_STATUSES:
        return _Answer(*_why_ended(execution))
    if execution.status != "ok":
        lines = execution.traceback.strip().splitlines()
        how = f"signal {execution.signal}" if execution.signal else f"exit code {execution.exit_code}"
        return _Answer("error", f"{how}{': ' + lines[-1][:SHOWN] if lines else ''}")
    if _lines(execution.stdout) == _lines(expected):
        return _Answer("pass")
    return _Answer("wrong", f"expected {expected[:SHOWN]!r}, got {execution.stdout[:SHOWN]!r}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
