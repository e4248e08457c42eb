"""What produced a run: `manifest.json` with versions, commit, seed, devices and the hash of the config."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from rl_posttrain.storage import filesystem

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "reasoning-gym")
FILE = "manifest.json"


def write(
    workdir: str | os.PathLike[str],
    seed: int,
    config: Mapping[str, Any],
    data: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Writes the manifest and returns it. A resumed run keeps the first one and adds itself to `resumes`.

    Args:
      config: the resolved config, as JSON data.
      data: name of a data set to the hash of its content.
    """
    path = Path(workdir) / FILE
    entry = describe(seed, config, data)
    if path.exists():
        first = json.loads(path.read_text(encoding="utf-8"))
        entry = {**first, "resumes": [*first.get("resumes", []), entry]}
    filesystem.write_atomic(path, (json.dumps(entry, indent=2) + "\n").encode())
    return entry


def describe(seed: int, config: Mapping[str, Any], data: Mapping[str, str] | None = None) -> dict[str, Any]:
    """This process and its machine, as JSON data."""
    commit, dirty = source()
    devices = jax.devices()
    return {
        "start_time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "config_sha256": config_hash(config),
        "commit": commit,
        "dirty": dirty,
        "device_kinds": sorted({device.device_kind for device in devices}),
        "device_count": len(devices),
        "process_count": jax.process_count(),
        "backend": jax.default_backend(),
        "platform": platform.platform(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "versions": {"python": platform.python_version(), **versions()},
        "data_sha256": dict(data or {}),
    }


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of the config as JSON with sorted keys: equal for equal values, whatever their order."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str | None]:
    """The installed version of each package; None for one that is absent."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def source(folder: str | os.PathLike[str] | None = None) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it) of this code; (None, None) outside a git checkout."""
    folder = Path(folder or Path(__file__).parent)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (FileNotFoundError, subprocess.SubprocessError):
        return None, None  # installed from a wheel, or git is absent: there is nothing to record


def processor() -> str:
    """The CPU model, as the operating system names it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
