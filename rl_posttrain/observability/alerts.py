"""What fired, on which domain, with the figures behind it: `alerts.jsonl` in the workdir."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_posttrain.observability import lines

FILE = "alerts.jsonl"


@dataclass(frozen=True)
class Alert:
    """One alarm, for people and for the controller."""

    step: int
    name: str  # "ratio_off_policy", "accuracy_regression", ...
    message: str  # what happened and what was done about it
    domain: str | None = None  # None: the whole run
    figures: Mapping[str, Any] = field(default_factory=dict)  # the numbers behind it


def append(workdir: str | os.PathLike[str], alert: Alert) -> None:
    """Adds one line. Numbers that JSON does not know (NaN, infinity) are written as their names."""
    numbers, nonfinite = lines.clean(alert.figures)
    entry = {
        "step": alert.step,
        "name": alert.name,
        "domain": alert.domain,
        "message": alert.message,
        "figures": numbers | nonfinite,
    }
    lines.append(Path(workdir) / FILE, entry)


def read(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All alerts of a run, as they were written."""
    return lines.read(Path(workdir) / FILE)


def truncate_after(workdir: str | os.PathLike[str], step: int) -> None:
    """Drops the alerts past `step`, when a run resumes from there."""
    lines.truncate_after(Path(workdir) / FILE, step)
