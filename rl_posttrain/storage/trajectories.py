"""The trajectory store: every completion with its verdict, as immutable Parquet segments. Imports no JAX.

A segment holds whole steps and is named by their range, `00000101-00000200-0.parquet`. `pandas.read_parquet`
and DuckDB read the folder as one table. What follows a checkpoint is dropped when a run resumes from it.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rl_posttrain.storage import filesystem
from rl_posttrain.types import Rollout, Verdict

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),  # loop step (over both stages) that sampled and used this completion
        ("task", pa.string()),  # Task.id
        ("domain", pa.string()),
        ("index", pa.int64()),
        ("sample", pa.int32()),  # within the group
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),  # of the completion, as sampled
        ("logprobs", pa.list_(pa.float32())),  # one per token, at `temperature`
        ("finish_reason", pa.string()),
        ("temperature", pa.float64()),
        ("policy_version", pa.int64()),
        ("status", pa.string()),  # Verdict.status
        ("tests", pa.list_(pa.bool_())),
        ("flags", pa.list_(pa.string())),
        ("reward", pa.float64()),  # null: left its group (infrastructure error, or filtered as overlong)
        ("advantage", pa.float64()),
        ("detail", pa.string()),
    ]
)
_NAME = re.compile(r"(\d{8,})-(\d{8,})-(\d+)\.parquet")


@dataclass(frozen=True)
class Segment:
    """One immutable file: the completions of steps `first` to `last`, both included."""

    first: int
    last: int
    url: str


def record(rollout: Rollout, verdict: Verdict, reward: float | None, advantage: float, step: int) -> dict[str, Any]:
    """One row of the store, with the columns of `SCHEMA`."""
    return {
        "step": step,
        "task": rollout.task.id,
        "domain": rollout.task.domain,
        "index": rollout.task.index,
        "sample": rollout.sample,
        "prompt": _text(rollout.task.prompt),
        "text": _text(rollout.text),
        "prompt_tokens": list(rollout.prompt_tokens),
        "tokens": list(rollout.completion_tokens),
        "logprobs": list(rollout.behaviour_logprobs),
        "finish_reason": rollout.finish_reason,
        "temperature": rollout.temperature,
        "policy_version": rollout.policy_version,
        "status": verdict.status,
        "tests": list(verdict.tests),
        "flags": [flag.name for flag in verdict.flags],
        "reward": reward,
        "advantage": advantage,
        "detail": _text(verdict.detail),
    }


class TrajectoryWriter:
    """Appends to the store. Rows wait in memory until `flush`, or until a segment is full."""

    def __init__(self, directory: str | os.PathLike[str], rows_per_segment: int = 1024) -> None:
        """`directory`: local path or URL. One writer per directory: give each process a folder of its own."""
        if rows_per_segment < 1:
            raise ValueError(f"rows_per_segment={rows_per_segment} would never write: use at least 1")
        self.directory = filesystem.join(directory)
        self.rows_per_segment = rows_per_segment
        self._rows: list[dict[str, Any]] = []
        filesystem.makedirs(self.directory)

    def append(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Adds the rows of `step`, made by `record`. Steps never go back.

        Raises:
          ValueError: a row has other columns than `SCHEMA` or another step, or `step` is before the last one.
        """
        if self._rows and step < self._rows[-1]["step"]:
            raise ValueError(f"step {step} comes after step {self._rows[-1]['step']}: append in order")
        for row in records:
            if row.keys() != set(SCHEMA.names):
                odd = sorted(row.keys() ^ set(SCHEMA.names))
                raise ValueError(f"columns {odd} are missing or unknown: make rows with trajectories.record")
            if row["step"] != step:
                raise ValueError(f"a row of step {row['step']} was appended as step {step}")
        if self._rows and step > self._rows[-1]["step"] and len(self._rows) >= self.rows_per_segment:
            self.flush(self._rows[-1]["step"])  # at a step's end, so that a segment holds whole steps
        self._rows.extend(records)

    def flush(self, step: int) -> None:
        """Writes the rows up to `step`, a checkpoint's; rows of later steps stay in memory."""
        due = [row for row in self._rows if row["step"] <= step]
        if not due:
            return
        _write(self.directory, pa.Table.from_pylist(due, SCHEMA), due[0]["step"], due[-1]["step"])
        self._rows = self._rows[len(due) :]


def segments(directory: str | os.PathLike[str]) -> list[Segment]:
    """The segments in a folder and below it, in order of steps."""
    found = []
    for url in filesystem.list(directory, recursive=True):
        match = _NAME.fullmatch(url.rsplit("/", 1)[-1])
        if match:
            found.append(Segment(int(match[1]), int(match[2]), url))
    return sorted(found, key=lambda segment: (segment.first, segment.last, segment.url))


def read(directory: str | os.PathLike[str], columns: Sequence[str] | None = None) -> pa.Table:
    """The whole store as one table, in order of steps; empty, with the columns, when there is nothing."""
    tables = [read_segment(segment, columns) for segment in segments(directory)]
    names = list(SCHEMA.names if columns is None else columns)
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table().select(names)


def read_segment(segment: Segment, columns: Sequence[str] | None = None) -> pa.Table:
    """One segment as a table."""
    names = None if columns is None else list(columns)
    return pq.read_table(io.BytesIO(filesystem.read(segment.url)), columns=names)


def truncate_after(directory: str | os.PathLike[str], step: int) -> int:
    """Drops the rows of steps past `step`, when a run resumes from there. Returns how many segments changed.

    Killed in between, it can be run again: the rewritten part of a straddling segment has a fixed name.
    """
    changed = [segment for segment in segments(directory) if segment.last > step]
    for segment in changed:
        if segment.first <= step:
            table = read_segment(segment)
            kept = table.filter(pc.field("step") <= step)
            folder, name = segment.url.rsplit("/", 1)
            last = kept["step"][-1].as_py()  # rows stand in order of steps
            target = f"{segment.first:08d}-{last:08d}-{name.rsplit('-', 1)[1]}"
            filesystem.write_atomic(filesystem.join(folder, target), _parquet(kept))
        filesystem.remove(segment.url)
    return len(changed)


def _write(directory: str, table: pa.Table, first: int, last: int) -> None:
    """Under the first free number: a step can be flushed in parts, and segments are never replaced."""
    number = 0
    while filesystem.exists(url := filesystem.join(directory, f"{first:08d}-{last:08d}-{number}.parquet")):
        number += 1
    filesystem.write_atomic(url, _parquet(table))


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _text(text: str) -> str:
    """`text` as valid UTF-8: a lone surrogate, which a model can emit, shows as its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
