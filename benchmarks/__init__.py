"""What the documentation's figures come from: each module measures one thing, `python -m benchmarks.step`.

A benchmark prints tables for people and, as its last line, one JSON object: {"benchmark": its name, "machine": where
it ran, "figures": {name: value}}. Names end in their unit: `_s`, `_bytes`, `_per_s`, `_share` (0 to 1), `_count`.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def machine() -> dict[str, Any]:
    """What the figures were measured on. The load average tells whether other processes ran at the same time."""
    import jax

    from rl_posttrain.observability.manifest import processor

    devices = jax.devices()
    return {
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "backend": jax.default_backend(),
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "jax": jax.__version__,
    }


def publish(benchmark: str, place: Mapping[str, Any], figures: Mapping[str, float]) -> None:
    """Prints the last line of a benchmark. `place`: what `machine` returned before the work began.

    Raises:
      ValueError: a figure that is not finite, which JSON cannot hold.
    """
    result = {"benchmark": benchmark, "machine": dict(place), "figures": dict(figures)}
    print(json.dumps(result, allow_nan=False), flush=True)


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median wall seconds of `call`, results waited for, after one call that warms up."""
    return interleaved_seconds({"call": call}, repeats)["call"]


def interleaved_seconds(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """`median_seconds` of several calls that take turns, so that a disturbance meets all of them."""
    import jax

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def scaled(value: float, unit: str) -> str:
    """1.23e9, "FLOP" as "1.23 GFLOP", for tables."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
