"""Files of one JSON object a line: metrics.jsonl and alerts.jsonl. Only the last line can be torn."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_posttrain.storage import filesystem


def append(path: str | os.PathLike[str], entry: Mapping[str, Any]) -> None:
    """Writes one line and hands it to the operating system, so that a killed process loses none.

    Raises:
      ValueError: `entry` holds NaN or infinity, which is not JSON: see `clean`.
    """
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry, allow_nan=False) + "\n")


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The entries of a file; none when it is absent. A last line torn by a crash is left out.

    Raises:
      ValueError: another line is not JSON; the message has its number.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    entries = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines) or not line.strip():
            continue  # what follows the last newline is empty, or torn
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}, line {number} is not JSON: {error}") from error
    return entries


def truncate_after(path: str | os.PathLike[str], step: int) -> None:
    """Keeps the entries whose "step" is at most `step`, when a run resumes from there."""
    if not Path(path).exists():
        return
    kept = [entry for entry in read(path) if entry["step"] <= step]
    filesystem.write_atomic(path, "".join(json.dumps(entry) + "\n" for entry in kept).encode())


def clean(values: Mapping[str, Any]) -> tuple[dict[str, float | int | None], dict[str, str]]:
    """Numbers as JSON knows them, and the others by name: ({name: number or None}, {name: "nan"}).

    Accepts NumPy and JAX scalars.

    Raises:
      TypeError: a value is not a single number.
    """
    numbers: dict[str, float | int | None] = {}
    nonfinite: dict[str, str] = {}
    for name, value in values.items():
        try:
            number = value if isinstance(value, int) else float(value)
        except (TypeError, ValueError):
            raise TypeError(f"metric {name}={value!r} is not a number: pass it as text or histogram") from None
        if math.isfinite(number):
            numbers[name] = int(number) if isinstance(number, bool) else number
        else:
            numbers[name] = None
            nonfinite[name] = str(number)
    return numbers, nonfinite
