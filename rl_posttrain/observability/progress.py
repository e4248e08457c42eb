"""Progress on the terminal, with time left; plain lines when the output goes to a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

PLAIN_SHARE = 0.05  # a plain line each 5% of the steps ...
PLAIN_SECONDS = 10.0  # ... or each 10 s, whichever comes first


class Progress:
    """A bar with the step's figures on a terminal; else a line now and then. Use it in a `with` block."""

    def __init__(self, total: int, description: str = "", initial: int = 0, stream: TextIO | None = None) -> None:
        """`total`: steps of the whole run; `initial`: those done before it was resumed."""
        self.total = total
        self.description = description
        self._initial = initial
        self._console = Console(file=stream or sys.stdout)
        self._started = time.monotonic()
        self._printed_at = self._started
        self._printed_step = initial
        self._bar: Bar | None = None
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("[bold]{task.description}", markup=True),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(compact=True, elapsed_when_finished=False),
                TextColumn("{task.fields[figures]}", markup=False),
                console=self._console,
            )
            self._task = self._bar.add_task(description, total=total, completed=initial, figures="")
            self._bar.start()

    def update(self, step: int, stage: str, scalars: Mapping[str, Any]) -> None:
        """Shows that `step` steps are done. `scalars`: the few worth a glance, shown in the order given."""
        figures = "  ".join(f"{name} {_short(value)}" for name, value in scalars.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=stage or self.description, figures=figures)
            return
        now = time.monotonic()
        advanced = step - self._printed_step >= PLAIN_SHARE * self.total
        if not (advanced or now - self._printed_at >= PLAIN_SECONDS or step >= self.total):
            return
        self._printed_at, self._printed_step = now, step
        title = f"{self.description} " if self.description else ""
        line = f"{title}{stage} {step}/{self.total}  left {self._left(step, now)}  {figures}"
        self._console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the bar and gives the terminal back."""
        if self._bar is not None:
            self._bar.stop()

    def _left(self, step: int, now: float) -> str:
        done = step - self._initial
        if done <= 0:
            return "?"
        return duration((now - self._started) / done * max(0, self.total - step))

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], stream: TextIO | None = None
) -> None:
    """Prints rows under their columns; numbers stand to the right, floats with four digits."""
    console = Console(file=stream or sys.stdout)
    if not console.is_terminal:
        console.width = 160  # a log file has no width of its own
    table = Table(title=title or None, title_justify="left")
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], (int, float)) or row[index] is None for row in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*("" if cell is None else _short(cell) for cell in row))
    console.print(table, markup=False, highlight=False)


def duration(seconds: float) -> str:
    """3725 as "1h02m", 125 as "2m05s", 7.4 as "7s"."""
    whole = int(round(seconds))
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def _short(value: Any) -> str:
    if isinstance(value, (str, bool, int)):
        return str(value)
    return f"{float(value):.4g}"
