"""Verdicts on candidate code, decided here, outside the sandbox.

The candidate sees inputs, one question at a time, and its answers come back as plain data. Expected
values and the comparison never leave this process. What the sandbox sends is taken for hostile bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rl_posttrain.sandbox import languages
from rl_posttrain.sandbox.answers import Setting
from rl_posttrain.sandbox.calls import judge_calls
from rl_posttrain.sandbox.job import InfrastructureError
from rl_posttrain.sandbox.kinds import CheckTests, FunctionTests, PytestTests, StdioTests, Tests, WhiteBoxTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Place, Pool, Submission
from rl_posttrain.sandbox.programs import judge_programs
from rl_posttrain.sandbox.referees import judge_check, judge_pytest
from rl_posttrain.sandbox.seccomp import Profile
from rl_posttrain.sandbox.whitebox import judge_whitebox
from rl_posttrain.types import Execution, Flag, Verdict

ANY_LANGUAGE = (StdioTests, WhiteBoxTests)


def judge(
    pool: Pool,
    code: str,
    tests: Tests,
    *,
    language: str = "python",
    profile: Profile | None = None,
    limits: Limits | None = None,
) -> Verdict:
    """Runs `code` against `tests`. A failure of the sandbox is "infra_error", never a wrong answer.

    Args:
      language: a key of `languages.LANGUAGES`. Only `StdioTests` and `WhiteBoxTests` have others than Python.
      profile: "single" refuses new processes (threads are fine), which makes the memory limit a hard bound;
        "multi" allows fork and exec. None: what programs of the language need.
      limits: of each run; None: the pool's.

    Raises:
      ValueError: no such language, or these tests are for Python alone.
      SandboxUnavailable: this machine cannot run candidate code; the message says what to do.
    """
    entry = languages.find(language)
    if language != "python" and not isinstance(tests, ANY_LANGUAGE):
        raise ValueError(
            f"{type(tests).__name__} is for Python; language={language!r} has StdioTests and WhiteBoxTests"
        )
    setting = Setting(pool, entry, profile or entry.profile, limits or pool.config.limits)
    try:
        return pool.use(lambda place: _judge(place, setting, code, tests))
    except InfrastructureError as error:
        return Verdict(
            status="infra_error",
            detail=str(error),
            executions=(Execution(status="infra_error"),),
            flags=(Flag("infra_error", str(error)),),
        )


def _judge(place: Place, setting: Setting, code: str, tests: Tests) -> Verdict:
    match tests:
        case FunctionTests():
            return judge_calls(place, setting, code, tests)
        case StdioTests():
            return judge_programs(place, setting, code, tests)
        case CheckTests():
            return judge_check(place, setting, code, tests)
        case PytestTests():
            return judge_pytest(place, setting, code, tests)
        case WhiteBoxTests():
            return judge_whitebox(place, setting, code, tests)


def submit(
    pool: Pool,
    code: str,
    tests: Tests,
    *,
    language: str = "python",
    profile: Profile | None = None,
    limits: Limits | None = None,
    priority: int = 0,
) -> Submission:
    """`judge` on the pool's own threads; a future of the verdict. Lower priorities run first.

    Waits while `pool.config.pending` others wait. `concurrent.futures.as_completed` gives verdicts as they come;
    `cancel` drops one that waits and ends one that runs.
    """
    work = partial(judge, pool, code, tests, language=language, profile=profile, limits=limits)
    return pool.submit(work, priority=priority)


def judge_many(
    pool: Pool,
    items: Sequence[tuple[str, Tests]],
    *,
    language: str = "python",
    profile: Profile | None = None,
    limits: Limits | None = None,
) -> list[Verdict]:
    """`judge` of every (code, tests) pair, on all slots at once; verdicts in the order of the items."""
    futures = []
    try:
        for code, tests in items:
            futures.append(submit(pool, code, tests, language=language, profile=profile, limits=limits))
        return [future.result() for future in futures]
    finally:
        for future in futures:  # when one raised: nobody waits for the others
            future.cancel()
