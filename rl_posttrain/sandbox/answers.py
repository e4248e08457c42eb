"""What the kinds of test share: asking questions, errors as the candidate reports them, verdicts from outcomes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_posttrain.sandbox.codec import Malformed, decode
from rl_posttrain.sandbox.job import RunEnded
from rl_posttrain.sandbox.languages import Language
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool
from rl_posttrain.sandbox.seccomp import Profile
from rl_posttrain.sandbox.session import Session
from rl_posttrain.types import Execution, Flag, Outcome, Verdict, VerdictStatus

TAMPERING = {"unsolicited_frame", "forged_frame", "passes_twin"}
# A program that was cut off does not pass, even if its answers came first: whether they do is a race.
LIMIT_STATUSES = ("time_limit", "memory_limit", "output_limit")
SHOWN = 200  # characters of a value in a verdict's detail


@dataclass(frozen=True)
class Setting:
    """How a candidate runs."""

    pool: Pool
    language: Language
    profile: Profile
    limits: Limits


@dataclass(frozen=True)
class Answer:
    """What became of one test."""

    outcome: Outcome
    detail: str = ""


def ask(session: Session, question: dict[str, Any], wanted: bytes) -> bytes | Answer:
    """The bytes after `wanted` in the reply to a question, or why there are none.

    The reply has to repeat the question's random id: one that was prepared before the question cannot.

    Raises:
      RunEnded: the run has ended, or is being killed, before an answer.
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
        return Answer("error", note_error(session, body[len(b'"error":') :]))
    return Answer("malformed", "the reply is neither a value nor an error")


def note_error(session: Session, data: bytes) -> str:
    """One line on an exception that the candidate's process reported; its first one goes to the execution."""
    try:
        parts = decode(data, 1 << 18)
    except Malformed as error:
        return f"an unreadable error report: {error}"
    if not (type(parts) is list and len(parts) == 3 and all(type(part) is str for part in parts)):
        return "an unreadable error report"
    if session.error is None:
        session.error = [clean(part) for part in parts]
    return clean(f"{parts[0]}: {parts[1]}")[: 2 * SHOWN]


def clean(text: str) -> str:
    """Without lone surrogates, so that it can be written anywhere."""
    return text.encode("utf-8", "replace").decode("utf-8")


def decide(answers: Sequence[Answer], count: int, executions: Sequence[Execution], unanswered: Answer) -> Verdict:
    """The verdict on `count` tests of which `answers` are known; the first of the others met `unanswered`."""
    flags = tuple(flag for execution in executions for flag in execution.flags)
    answers = list(answers)[:count]
    tampering = [flag for flag in flags if flag.name in TAMPERING]
    if tampering:
        return void(count, f"tampering: {tampering[0].detail}", tuple(executions), flags)
    if len(answers) < count:
        answers.append(unanswered)
    answers += [Answer("skipped", "not run")] * (count - len(answers))
    tests = tuple(answer.outcome == "pass" for answer in answers)
    outcomes: tuple[Outcome, ...] = tuple(answer.outcome for answer in answers)
    if all(tests):
        return Verdict("pass", tests, "", tuple(executions), flags, outcomes)
    failed = next(answer for answer in answers if answer.outcome != "pass")
    status: VerdictStatus = "error" if failed.outcome == "skipped" else failed.outcome
    detail = f"test {tests.index(False) + 1}: {failed.detail}"
    return Verdict(status, tests, detail, tuple(executions), flags, outcomes)


def void(count: int, detail: str, executions: tuple[Execution, ...], flags: tuple[Flag, ...]) -> Verdict:
    """The verdict on a candidate that tampered: every test fails, whatever it answered."""
    outcomes: tuple[Outcome, ...] = ("malformed",) * count
    return Verdict("malformed", (False,) * count, detail, executions, flags, outcomes)


def why_ended(execution: Execution) -> Answer:
    """Why a run gave no answer, or none that counts."""
    if execution.status == "time_limit":
        used = f"{execution.cpu_s:.2f} s of CPU, {execution.wall_s:.2f} s of wall time"
        return Answer("timeout", f"time limit: {used}")
    if execution.status in ("memory_limit", "output_limit"):
        details = "; ".join(flag.detail for flag in execution.flags)
        return Answer("error", f"{execution.status.replace('_', ' ')} {details}".rstrip())
    return Answer("error", f"the program ended with {how_ended(execution)} before it answered")


def how_ended(execution: Execution) -> str:
    """ "signal 9" or "exit code 1"."""
    return f"signal {execution.signal}" if execution.signal else f"exit code {execution.exit_code}"
