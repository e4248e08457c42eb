"""What one run may use."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Below this the interpreter itself does not fit (it maps about 40 MiB before any candidate code runs).
MINIMUM_MEMORY = 96 << 20
# The harness has stdin, stdout, stderr and two pipes open, and an import needs a few more.
MINIMUM_OPEN_FILES = 16


@dataclass(frozen=True)
class Limits:
    """Limits of one run: one stdin/stdout case, or all the calls of one `FunctionTests`. All are enforced.

    CPU time decides whether a program is too slow. Wall time only ends what sleeps or waits: keep it
    several times wider, because a loaded machine stretches it.
    """

    cpu_seconds: float = 2.0  # of the whole run, import included
    wall_seconds: float = 10.0
    memory_bytes: int = 512 << 20  # address space of a process, interpreter included
    processes: int = 16  # processes and threads at one time, the main one included
    file_bytes: int = 16 << 20  # of any one file, and of all files of the run together
    output_bytes: int = 1 << 16  # of stdout, and of stderr; a returned value may take 16 times as much, encoded
    open_files: int = 64  # file descriptors of a process

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0.01 <= value <= 86_400):
                raise ValueError(f"{name}={value!r}: must be between 0.01 and 86400 seconds")
        lowest = {
            "memory_bytes": MINIMUM_MEMORY,
            "processes": 1,
            "file_bytes": 4096,
            "output_bytes": 256,
            "open_files": MINIMUM_OPEN_FILES,
        }
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)!r}: use at least {low}")

    @property
    def reply_bytes(self) -> int:
        """Largest encoded value that a function may return."""
        return 16 * self.output_bytes
