"""Assertions and checkers that run in a sandbox of their own, and what passes between it and the candidate's.

Trusted tests run in the referee's container, see `referee.py`, and the candidate in its own, see `objects.py`.
Every value that the candidate sends is decoded here, as hostile bytes, and written anew for the referee.

A failure counts against the candidate as soon as the tests have had anything from it. Tests that fail, or
pass, without asking it anything are unusable, and so is a checker that cannot judge its own expected answer:
that is an error of who wrote them, raised as `UnusableTests`, and never a wrong answer.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_posttrain.sandbox.answers import (
    LIMIT_STATUSES,
    TAMPERING,
    Answer,
    Setting,
    ask,
    clean,
    decide,
    void,
    why_ended,
)
from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable, make_readable
from rl_posttrain.sandbox.codec import Malformed, Members, Opaque, Pairs, decode, to_json
from rl_posttrain.sandbox.job import Job, RunEnded
from rl_posttrain.sandbox.kinds import CheckTests, PytestTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Place
from rl_posttrain.sandbox.session import Session
from rl_posttrain.types import Execution, Verdict

# The referee's own. Its clock also runs while the candidate thinks.
LIMITS = Limits(cpu_seconds=20, wall_seconds=60, memory_bytes=1 << 30, output_bytes=1 << 20, file_bytes=64 << 20)
STRETCH = 10  # how far a candidate's wall limit may stretch on a busy machine
PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
OLDER_PYTHON = ("exceptiongroup", "tomli", "typing_extensions")  # what pytest needs besides before Python 3.11
KINDS = ("value", "items", "class", "error")


class UnusableTests(ValueError):
    """Tests that cannot judge anybody: a mistake of their author's."""


def judge_check(place: Place, setting: Setting, code: str, tests: CheckTests) -> Verdict:
    """The verdict on `code` by assertions over its function or class `tests.entry`: one test.

    Raises:
      UnusableTests: the assertions fail whatever the candidate does, or never ask it anything.
    """
    relay = Relay(place, setting, code, {"check": tests.source, "entry": tests.entry})
    return relay.verdict(("check",), "check(candidate)")


def judge_pytest(place: Place, setting: Setting, code: str, tests: PytestTests) -> Verdict:
    """The verdict on `code` by a pytest file: one test per pytest id, in pytest's order or that of `tests.names`.

    Skipped tests and expected failures do not count as passed.

    Raises:
      UnusableTests: pytest finds no tests, or other ones than `tests.names`, whatever the candidate does; or the
        tests ask it nothing.
      SandboxUnavailable: pytest is not installed.
    """
    place.share("tools", copy_pytest)
    relay = Relay(place, setting, code, {"pytest": tests.source})
    try:
        return relay.verdict(tests.names, "the pytest file")
    finally:
        if relay.report is not None and relay.report["late"]:
            place.discard()  # the referee's next container finds pytest when it starts, and loads it once


def copy_pytest(folder: Path) -> None:
    """Copies pytest and what it needs from the running environment to `folder`.

    Raises:
      SandboxUnavailable: it is not installed.
    """
    for name in (*PYTEST, *OLDER_PYTHON):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            if name in OLDER_PYTHON:
                continue
            raise SandboxUnavailable(f"tests with pytest need the module {name!r}: `pip install pytest`")
        origin = Path(found.origin)
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, folder / name)
        else:
            shutil.copy2(origin, folder)
    make_readable(folder)


@dataclass
class Relay:
    """One judgement by the referee: passes its questions on to the candidate, and the answers back."""

    place: Place
    setting: Setting
    code: str
    request: dict[str, Any]
    report: dict[str, Any] | None = None  # the referee's last word; None if it had none
    load: Answer | None = None  # why the candidate did not load
    execution: Execution | None = None  # the candidate's; None if it was never asked
    used: bool = False  # did the candidate answer more than what its names are?
    ended: bool = False
    errors: list[list[str]] = field(default_factory=list)  # the candidate's exceptions, as the referee counts them

    def verdict(self, names: Sequence[str], what: str) -> Verdict:
        wall = LIMITS.wall_seconds + STRETCH * self.setting.limits.wall_seconds
        referee, _ = self.place.run_referee(Job("referee", replace(LIMITS, wall_seconds=wall)), self._talk)
        if self.report is not None and self.report["missing"]:
            raise SandboxUnavailable(
                f"pytest cannot be imported by the sandbox's Python ({self.report['missing']}): for one older than "
                "3.11, `pip install exceptiongroup tomli`; or give it the version of your own with sandbox.interpreter"
            )
        if self.report is not None and self.report["unusable"]:
            raise UnusableTests(f"{what} is unusable: {self.report['unusable']}")
        if self.execution is None:
            said = f"{why_ended(referee).detail} {referee.stderr[-500:]}".rstrip()
            raise UnusableTests(f"{what} is unusable: it ends before it asks the candidate anything: {said}")
        expected = tuple(names) or ("all tests",)
        if self.load is not None:
            return self._fail(expected, self.load)
        if self.report is None:
            if not self.used:
                raise UnusableTests(f"{what} is unusable: {why_ended(referee).detail}, having asked nothing")
            answer = why_ended(self.execution)
            if not self.ended:
                answer = Answer("error", f"with the candidate's answers, the tests met their own {referee.status}")
            return self._fail(expected, answer)
        rows = {name: row for name, *row in self.report["tests"]}
        if self.report["collection"] or not rows:
            rows = {"collection": next(iter(self.report["collection"]), ["error", "no tests are left", None, False])}
            return self._fail(expected, self._answer(rows["collection"]))
        if names and set(names) != rows.keys():
            missing, others = sorted(set(names) - rows.keys()), sorted(rows.keys() - set(names))
            detail = f"tests that did not run: {missing}; tests that are not expected: {others}"
            if not self.report["influenced"]:
                raise UnusableTests(f"{what} is unusable: {detail}")
            return self._fail(expected, Answer("error", detail))
        answers = [self._answer(rows[name]) for name in names or rows]
        if self.execution.status in LIMIT_STATUSES and answers[-1].outcome == "pass":
            answers[-1] = why_ended(self.execution)
        return decide(answers, len(answers), [self.execution], why_ended(self.execution))

    def _fail(self, names: Sequence[str], answer: Answer) -> Verdict:
        assert self.execution is not None
        tampering = [flag for flag in self.execution.flags if flag.name in TAMPERING]
        if tampering:
            return void(len(names), f"tampering: {tampering[0].detail}", (self.execution,), self.execution.flags)
        return decide([answer] * len(names), len(names), [self.execution], answer)

    def _answer(self, row: list[Any]) -> Answer:
        outcome, text, _, ended = row
        if ended and self.execution is not None and self.execution.status in LIMIT_STATUSES:
            return why_ended(self.execution)
        return Answer(outcome, clean(text))

    def _talk(self, referee: Session) -> None:
        """The referee's run. The candidate's starts inside it, at the first question."""
        try:
            message = json.loads(referee.ask(json.dumps(self.request).encode()))
        except RunEnded:
            return
        if "report" in message:
            self.report = message["report"]
            return
        job = Job("objects", self.setting.limits, self.setting.profile)
        self.execution, _ = self.place.run(job, lambda candidate: self._relay(referee, candidate, message))

    def _relay(self, referee: Session, candidate: Session, message: dict[str, Any]) -> None:
        try:
            load = ask(candidate, {"code": self.code}, b'"ok":')
        except RunEnded:
            self.ended = True
        else:
            if isinstance(load, Answer):
                syntax = candidate.error is not None and candidate.error[0] in (
                    "SyntaxError",
                    "IndentationError",
                    "TabError",
                )
                self.load = Answer("compile_error", load.detail) if syntax else load
                return
        try:
            while "ask" in message:
                reply = self._question(candidate, message["ask"])
                message = json.loads(referee.ask(json.dumps(reply).encode()))
        except RunEnded:  # the referee's: the candidate's is an answer
            return
        self.report = message["report"]
        serials = [row[-2] for row in (*message["report"]["tests"], *message["report"]["collection"])]
        unexpected = [serial for serial in serials if serial is not None]
        if unexpected:
            candidate.error = [clean(part) for part in self.errors[unexpected[0]]]

    def _question(self, candidate: Session, question: dict[str, Any]) -> dict[str, Any]:
        if not self.ended:
            try:
                data = ask(candidate, question, b'"result":')
            except RunEnded:
                self.ended = True
            else:
                result = self._result(data)
                # The name of a function or a class says nothing yet. Anything with contents does: reading it may
                # already have cost the tests their time.
                kind, body = result[:2]
                named = kind == "class" or (kind == "value" and isinstance(body, dict) and "o" in body)
                self.used |= question["operation"] != "get" or question["handle"] is not None or not named
                return {"result": result}
        self.used = True
        return {"ended": "the candidate's process has ended"}

    def _result(self, data: bytes | Answer) -> list[Any]:
        """The candidate's answer for the referee, whatever these bytes are."""
        try:
            if isinstance(data, Answer):
                raise Malformed(data.detail)
            decoded = decode(data, len(data))  # the session bounded its size
            kind, body, mutated, printed = decoded if type(decoded) is list and len(decoded) == 4 else (None,) * 4
            if kind not in KINDS or not (mutated is None or type(mutated) is list) or type(printed) is not str:
                raise Malformed("not an answer of the harness's")
            if kind == "class":
                _require_family(body)
            elif kind == "items" and type(body) is not list:
                raise Malformed("items that are not a list")
            elif kind == "error":
                self.errors.append(_require_error(body))
        except Malformed as error:
            parts = ["RuntimeError", f"the candidate's answer is malformed: {error}", ""]
            kind, mutated, printed = "error", None, ""
            body = [parts, [[None, "RuntimeError"]], [parts[1]], Opaque("-1 RuntimeError")]
            self.errors.append(parts)
        return [kind, rewrite(body), rewrite(mutated), printed]


def _require_family(body: Any) -> None:
    rows = type(body) is list and all(type(row) is list and len(row) == 2 for row in body) and len(body) <= 20
    if not rows or not all(type(row[1]) is str and (row[0] is None or type(row[0]) is Opaque) for row in body):
        raise Malformed("not the classes of an exception")


def _require_error(body: Any) -> list[str]:
    if not (type(body) is list and len(body) == 4 and type(body[2]) is list and type(body[3]) is Opaque):
        raise Malformed("not an exception")
    parts = body[0]
    if not (type(parts) is list and len(parts) == 3 and all(type(part) is str for part in parts)):
        raise Malformed("not an exception")
    _require_family(body[1])
    return parts


def rewrite(value: Any) -> Any:
    """A decoded value as what `json` can write, for another reader of `codec`."""
    if type(value) is Pairs:
        return {"d": [[rewrite(key), rewrite(item)] for key, item in value]}
    if type(value) is Members:
        return {"s": [rewrite(item) for item in value]}
    if type(value) is list:
        return [rewrite(item) for item in value]
    if type(value) is tuple:
        return {"t": [rewrite(item) for item in value]}
    return {"o": value.name} if type(value) is Opaque else to_json(value)


@dataclass(frozen=True)
class Checker:
    """Trusted Python source that defines `check(first, second, expected) -> bool`."""

    source: str

    def check(self, place: Place, cases: Sequence[tuple[Any, Any, Any]]) -> list[Answer]:
        """One answer per case, decided in the referee's container; the second value is the candidate's.

        An answer on which the checker fails, or runs out of time, is wrong if the checker is content to be asked
        about the expected value in its place. After a checker has died on an answer, the other cases are skipped.

        Raises:
          UnusableTests: it does not load; or on the expected value, too, it raises or returns no bool.
        """
        answers: list[Answer] = []

        def driver(session: Session) -> None:
            try:
                self._load(session)
                for first, second, third in cases:
                    answers.append(self._ask(session, first, second, third))
            except RunEnded:
                return

        execution, _ = place.run_referee(Job("referee", LIMITS), driver)
        if len(answers) < len(cases):
            first, _, third = cases[len(answers)]
            why = f"the checker ended on this answer: {why_ended(execution).detail}"
            job = Job("referee", LIMITS)
            _, content = place.run_referee(job, lambda session: self._try(session, first, third, why))
            if not content:
                raise UnusableTests(f"{why}; and on the expected value, too. The checker: {self.source[:500]!r}")
            answers.append(Answer("wrong", why))
            answers += [Answer("skipped", "not checked")] * (len(cases) - len(answers))
        return answers

    def _load(self, session: Session) -> None:
        reply = json.loads(session.ask(json.dumps({"checker": self.source}).encode()))
        if "failed" in reply:
            raise UnusableTests(f"the checker does not load: {reply['failed']}. It is {self.source[:500]!r}")

    def _ask(self, session: Session, first: Any, second: Any, third: Any) -> Answer:
        case = [_tree(first), rewrite(second), _tree(third)]
        reply = json.loads(session.ask(json.dumps({"case": case}).encode()))
        if "result" in reply:
            return Answer("pass") if reply["result"] else Answer("wrong", "the checker refuses it")
        if "malformed" in reply:
            return Answer("malformed", reply["malformed"])
        why = f"the checker fails on this answer: {clean(reply['failed'])}"
        self._expected(session, first, third, why)
        return Answer("wrong", why)

    def _try(self, session: Session, first: Any, third: Any, why: str) -> bool:
        """Whether the checker lives to judge the expected value."""
        try:
            self._load(session)
            self._expected(session, first, third, why)
        except RunEnded:
            return False
        return True

    def _expected(self, session: Session, first: Any, third: Any, why: str) -> None:
        case = [_tree(first), _tree(third), _tree(third)]
        reply = json.loads(session.ask(json.dumps({"case": case}).encode()))
        if "result" not in reply:
            raise UnusableTests(f"{why}; and on the expected value: {reply}. The checker: {self.source[:500]!r}")


def _tree(value: Any) -> Any:
    """A trusted value; or one decoded already, as a checker's other cases may hold."""
    return rewrite(value) if type(value) in (Pairs, Members) else to_json(value)
