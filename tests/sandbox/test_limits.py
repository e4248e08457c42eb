"""Configuration of limits and pools: strict, with the remedy in the message."""

import pytest

from rl_posttrain.config import ConfigError, build
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import PoolConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu_seconds", 0.0),
        ("cpu_seconds", float("nan")),
        ("wall_seconds", float("inf")),
        ("wall_seconds", -1.0),
        ("memory_bytes", 1 << 20),
        ("processes", 0),
        ("file_bytes", 0),
        ("output_bytes", 0),
        ("open_files", 3),
    ],
)
def test_limits_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Limits(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("slots", 0), ("slots", 10_000), ("runs_per_slot", 0)])
def test_pools_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        PoolConfig(**{field: value})


def test_a_config_section_builds_a_pool_config():
    built = build(PoolConfig, {"slots": "3", "limits": {"cpu_seconds": "1e-1", "processes": 2}})
    assert built == PoolConfig(slots=3, limits=Limits(cpu_seconds=0.1, processes=2))
    with pytest.raises(ConfigError, match="cpu_seconds"):
        build(PoolConfig, {"limits": {"cpu_second": 1.0}})
