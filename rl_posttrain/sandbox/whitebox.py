"""Suites that live in the candidate's own process, with a twin that every right program fails."""

from __future__ import annotations

from rl_posttrain.sandbox.answers import Setting
from rl_posttrain.sandbox.kinds import WhiteBoxTests
from rl_posttrain.sandbox.pool import Place
from rl_posttrain.types import Verdict


def judge_whitebox(place: Place, setting: Setting, code: str, tests: WhiteBoxTests) -> Verdict:
    """The verdict on `code` by a suite and its twin.

    Raises:
      NotImplementedError: always, for an hour.
    """
    raise NotImplementedError
