"""What compilers made of sources, in memory, so that many tests need one compilation. Hostile bytes, never run here."""

from __future__ import annotations

import collections
import os
import threading

from rl_posttrain.types import Execution

MAXIMUM_BYTES = 256 << 20
MAXIMUM_ENTRIES = 512  # each is an open descriptor


class Artifacts:
    """Files in memory by key, the least recently used dropped first; failed compilations as their `Execution`."""

    def __init__(self) -> None:
        self._entries: collections.OrderedDict[str, int | Execution] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._bytes = 0

    def get(self, key: str) -> int | Execution | None:
        """A descriptor that the caller closes, how the compilation failed, or None where there was none yet."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return os.dup(entry) if isinstance(entry, int) else entry

    def put(self, key: str, entry: int | Execution) -> None:
        """Keeps a copy of the descriptor, or the failure."""
        with self._lock:
            if key in self._entries:
                return
            if isinstance(entry, int):
                entry = os.dup(entry)
                self._bytes += os.fstat(entry).st_size
            self._entries[key] = entry
            while self._bytes > MAXIMUM_BYTES or len(self._entries) > MAXIMUM_ENTRIES:
                self._drop(self._entries.popitem(last=False)[1])

    def _drop(self, entry: int | Execution) -> None:
        if isinstance(entry, int):
            self._bytes -= os.fstat(entry).st_size
            os.close(entry)

    def close(self) -> None:
        """Closes all descriptors."""
        with self._lock:
            while self._entries:
                self._drop(self._entries.popitem()[1])
