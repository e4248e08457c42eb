"""Eight virtual CPU devices for every test, compiled programs kept between tests, key reuse an error."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Otherwise programs with collectives deadlock when they come from the compilation cache (jax 0.10 and 0.12).
os.environ["XLA_FLAGS"] += " --xla_cpu_enable_concurrency_optimized_scheduler=false"

import jax  # noqa: E402  (after the environment that it reads at import)
import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with test data and attacks beside the checkout; tests that need it skip without it."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return path
