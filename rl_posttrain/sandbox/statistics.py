"""What a pool did, for the metrics: counts and times since they were last taken."""

from __future__ import annotations

import collections
import threading
import time

SAMPLES = 100_000  # times kept between two takings; of more, the last


class Statistics:
    """Counters and times of one pool; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: collections.Counter[str] = collections.Counter()
        self._clear()

    def _clear(self) -> None:
        self._since = time.monotonic()
        self._counts: collections.Counter[str] = collections.Counter(
            dict.fromkeys(("runs", "retries", "infra_errors"), 0)
        )
        self._runs: collections.deque[float] = collections.deque(maxlen=SAMPLES)
        self._queued: collections.deque[float] = collections.deque(maxlen=SAMPLES)

    def add(self, name: str) -> int:
        """Counts one; how many there have been since the beginning."""
        with self._lock:
            self._counts[name] += 1
            self._totals[name] += 1
            return self._totals[name]

    def ran(self, seconds: float) -> None:
        """Counts a run that took so long."""
        with self._lock:
            self._counts["runs"] += 1
            self._runs.append(seconds)

    def waited(self, seconds: float) -> None:
        """Notes how long a submission waited for its turn."""
        with self._lock:
            self._queued.append(seconds)

    def take(self) -> dict[str, float]:
        """Everything since the last call: "runs", "retries", "infra_errors", "containers", "runs_per_second", and
        the median and 99th percentile of queue and run times in seconds (0.0 where there were none)."""
        with self._lock:
            found: dict[str, float] = {"containers": 0, **self._counts}
            found["runs_per_second"] = found["runs"] / max(time.monotonic() - self._since, 1e-9)
            for name, times in (("queue", self._queued), ("run", self._runs)):
                ordered = sorted(times) or [0.0]
                found[f"{name}_p50_s"] = ordered[len(ordered) // 2]
                found[f"{name}_p99_s"] = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
            self._clear()
            return found
