"""Function-call tests: one question at a time into the candidate's process, answers compared out here."""

from __future__ import annotations

from rl_posttrain.sandbox.answers import LIMIT_STATUSES, SHOWN, Answer, Setting, ask, decide, why_ended
from rl_posttrain.sandbox.codec import Malformed, decode, encode, to_json
from rl_posttrain.sandbox.compare import normalise, same
from rl_posttrain.sandbox.job import Job, RunEnded
from rl_posttrain.sandbox.kinds import Call, FunctionTests
from rl_posttrain.sandbox.pool import Place
from rl_posttrain.sandbox.referees import Checker
from rl_posttrain.sandbox.session import Session
from rl_posttrain.types import Verdict


def judge_calls(place: Place, setting: Setting, code: str, tests: FunctionTests) -> Verdict:
    """The verdict on `code` by calls of its function `tests.entry`."""
    values: list[bytes | Answer] = []  # as they came, for a checker to look at afterwards
    answers: list[Answer] = []

    def driver(session: Session) -> None:
        try:
            load = ask(session, {"code": code}, b'"ok":')
            if isinstance(load, Answer):
                # It never ran: the grammar refused it.
                syntax = session.error is not None and session.error[0] in (
                    "SyntaxError",
                    "IndentationError",
                    "TabError",
                )
                answers.extend([Answer("compile_error", load.detail)] * len(tests.calls) if syntax else [load])
                return
            for call in tests.calls:
                question = {"entry": tests.entry, "arguments": to_json(list(call.arguments))}
                value = ask(session, question, b'"value":')
                values.append(value)
                if tests.checker is None:
                    answers.append(_grade(value, call, tests.tolerance))
        except RunEnded:
            return

    execution, _ = place.run(Job("calls", setting.limits, setting.profile), driver)
    if tests.checker is not None and not answers:
        answers = _check(place, tests, values)
    count = len(tests.calls)
    if len(answers) == count and execution.status in LIMIT_STATUSES and answers[-1].outcome == "pass":
        answers[-1] = why_ended(execution)
    return decide(answers, count, [execution], why_ended(execution))


def _grade(data: bytes | Answer, call: Call, tolerance: float) -> Answer:
    if isinstance(data, Answer):
        return data
    try:
        value = decode(data, len(data))  # the session bounded its size
    except Malformed as error:
        return Answer("malformed", str(error))
    if same(normalise(call.expected, "expected"), value, tolerance):
        return Answer("pass")
    want = encode(call.expected)[:SHOWN].decode("ascii", "replace")
    got = data[:SHOWN].decode("ascii", "replace")
    return Answer("wrong", f"expected {want}, got {got}")


def _check(place: Place, tests: FunctionTests, values: list[bytes | Answer]) -> list[Answer]:
    """Answers by the trusted checker, in a sandbox where the candidate's code never was."""
    assert tests.checker is not None
    cases, kept = [], []
    for index, data in enumerate(values):
        call = tests.calls[index]
        if isinstance(data, Answer):
            kept.append(data)
            continue
        try:
            value = decode(data, len(data))
        except Malformed as error:
            kept.append(Answer("malformed", str(error)))
            continue
        kept.append(None)
        cases.append((list(call.arguments), value, call.expected))
    checked = iter(Checker(tests.checker).check(place, cases))
    return [answer if answer is not None else next(checked) for answer in kept]
