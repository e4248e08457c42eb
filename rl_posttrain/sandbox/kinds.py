"""Kinds of test. What they expect stays on this side; the candidate meets inputs, or a caller, only.

FunctionTests   calls of one function, answers compared here
StdioTests      programs that read stdin and write stdout, in any language, outputs compared here
CheckTests      `check(candidate)`: assertions run in a sandbox of their own, over plain values
PytestTests     a pytest file that imports `solution`, likewise
WhiteBoxTests   a suite that must live in the candidate's process: weaker, with a must-fail twin
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any, Literal

from rl_posttrain.sandbox.compare import normalise

Comparison = Literal["lines", "exact", "tokens"]


@dataclass(frozen=True)
class Call:
    """One call and the value that it should return, both plain data. `expected` never enters the sandbox."""

    arguments: tuple
    expected: Any


@dataclass(frozen=True)
class FunctionTests:
    """Calls of one Python function, in order and in one process: what one call leaves in globals, the next finds.

    A bool equals only a bool, a list never equals a tuple; otherwise equality is Python's (`compare.py`).
    """

    entry: str  # "solve", or "Solution.solve" for a method of a fresh instance
    calls: tuple[Call, ...]
    tolerance: float = 0.0  # absolute, and relative to the larger number
    # Trusted Python source that defines `check(arguments, answer, expected) -> bool`, for questions with many
    # right answers. It runs in a sandbox of its own and replaces the comparison.
    checker: str | None = None

    def __post_init__(self) -> None:
        require_entry(self.entry)
        if not self.calls:
            raise ValueError("calls is empty: a program without tests would always pass; give at least one")
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise ValueError(f"tolerance={self.tolerance!r}: must be 0 or a positive number")
        require_definition(self.checker, "check", "checker")
        for index, call in enumerate(self.calls):
            normalise(list(call.arguments), f"calls[{index}].arguments")
            normalise(call.expected, f"calls[{index}].expected")


@dataclass(frozen=True)
class StdioTests:
    """(stdin, expected stdout) pairs, each its own run.

    The program has to exit with 0 and within its limits. After a case that ran out of time the others are
    not run, and fail.
    """

    cases: tuple[tuple[str, str], ...]
    # "lines": equal without trailing white space and trailing empty lines; "exact": equal to the byte;
    # "tokens": equal words, whatever the white space between them.
    comparison: Comparison = "lines"
    tolerance: float = 0.0  # of words that are numbers, absolute and relative; only with "tokens"
    # Trusted Python source that defines `check(stdin, stdout, expected) -> bool`, instead of a comparison.
    checker: str | None = None

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("cases is empty: a program without tests would always pass; give at least one")
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise ValueError(f"tolerance={self.tolerance!r}: must be 0 or a positive number")
        if self.tolerance and self.comparison != "tokens":
            raise ValueError(
                f"tolerance={self.tolerance} has no effect with comparison={self.comparison!r}: use 'tokens'"
            )
        require_definition(self.checker, "check", "checker")


@dataclass(frozen=True)
class CheckTests:
    """Assertions in the style of HumanEval: `source` defines `check(candidate)`, which raises when it is not content.

    It runs in a second sandbox and calls the candidate across the border, with plain values. One test.
    """

    source: str
    entry: str  # the candidate's function

    def __post_init__(self) -> None:
        require_entry(self.entry)
        require_definition(self.source, "check", "source")


@dataclass(frozen=True)
class PytestTests:
    """A pytest file that imports the candidate as the module `solution`.

    Real pytest runs it in a second sandbox; `solution` there is a proxy, and only plain values cross.
    """

    source: str
    names: tuple[
        str, ...
    ] = ()  # the tests that must have run, no more and no fewer ("test_x[1-2]"); empty: those found

    def __post_init__(self) -> None:
        ast.parse(self.source)


@dataclass(frozen=True)
class WhiteBoxTests:
    """A suite in the candidate's own process. A verdict from it is evidence, not proof (`trust="tamper_evident"`).

    Python: `suite` is a pytest file that imports the module `solution`. Other languages: `suite` is appended
    to the candidate's source, and the program has to exit with 0. The twin is the suite with wrong
    expectations: every right program fails it, so one that passes it has tampered with its tests.
    """

    suite: str
    twin: str | None = None  # None: made by negating the suite's assertions

    def __post_init__(self) -> None:
        if not self.suite.strip():
            raise ValueError("suite is empty: a program without tests would always pass")


Tests = FunctionTests | StdioTests | CheckTests | PytestTests | WhiteBoxTests


def require_entry(entry: str) -> None:
    """Raises ValueError unless `entry` is "function" or "Class.method"."""
    if not all(part.isidentifier() for part in entry.split(".")):
        raise ValueError(f"entry={entry!r}: must be a function's name, or Class.method")


def require_definition(source: str | None, function: str, what: str) -> None:
    """Raises ValueError unless Python `source` is None or defines `function` at its top level."""
    if source is None:
        return
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{what} is not Python: {error}") from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body):
        raise ValueError(f"{what} must define a function {function!r} at its top level")
