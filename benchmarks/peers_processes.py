"""The peers benchmark's environments and processes: made, asked and ended from the parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.peers_host import Work

ROOT = Path(__file__).resolve().parents[1]
# Torch and JAX programs of one machine cannot share an environment: their pins collide.
PINS = {
    "torch": ("torch==2.13.0", "transformers==5.24.0", "trl==1.16.0", "accelerate==1.15.0"),
    "tunix": ("google-tunix==0.1.7", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "transformers==5.12.1"),
}
VENV = ["-m", "venv", "--clear"]
STAMP = "pins.txt"  # written when an environment is complete
CLOSE_SECONDS = 60.0
ANSWER_SECONDS = 900.0  # a round that takes longer is ended: some peers wait for ever when a thread of theirs fails


class Unavailable(Exception):
    """A contender that did not install, failed or ran out of memory: the message is its result."""


def environment(peers: Path, name: str | None) -> str:
    """The interpreter of an environment of `PINS`, made anew unless it is there with these pins. None: this one.

    Raises:
      Unavailable: it does not install; pip's words are in a log beside it.
    """
    if name is None:
        return sys.executable
    folder, pins = peers.absolute() / name, "\n".join(PINS[name])
    python = str(folder / "bin" / "python")
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text() == pins:
        return python
    print(f"installing {' '.join(PINS[name])} in {folder}", flush=True)
    log = peers / f"{name}-install.log"
    peers.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        for command in (
            [sys.executable, *VENV, str(folder)],
            [python, "-m", "pip", "install", "--quiet", *PINS[name]],
        ):
            if subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL).returncode:
                output.flush()
                raise Unavailable(f"does not install: {last_line(log)}")
    stamp.write_text(pins)
    return python


def last_line(log: Path) -> str:
    """The last words of a log, and where the others are."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip()[:300] if lines else 'without a word'} ({log})"


def variables(peers: Path) -> dict[str, str]:
    """The environment variables of every contender: the same for all, and no downloads."""
    # XLA_FLAGS may cut the processor into several devices, and the others choose slower code for old libraries.
    unwanted = ("XLA_FLAGS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(peers.absolute() / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    return cache | kept | {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


class Host:
    """A contender's process, ready to be measured. Close it."""

    def __init__(self, python: str, module: str, work: Work, peers: Path, name: str) -> None:
        """Returns when it has loaded.

        Args:
          python: the interpreter of its environment.
          module: in `benchmarks`.
          name: of its log.

        Raises:
          Unavailable: it has failed.
        """
        self._log = peers / "logs" / f"{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.{module}", work.encoded()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=variables(peers),
            )
        try:
            self.versions: dict[str, str] = self._receive()["ready"]
        except BaseException:
            self.close()
            raise

    def measure(self) -> dict[str, float]:
        """One measurement: `wall_s`, `other_cores`, `peak_bytes`, and the contender's own parts.

        Raises:
          Unavailable: it has failed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("measure\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(ANSWER_SECONDS, self._process.kill)
        timer.start()
        asked = time.monotonic()
        line = self._process.stdout.readline()
        late = time.monotonic() - asked >= ANSWER_SECONDS
        timer.cancel()
        if not line:
            code = self._process.wait()
            why = f"no answer within {ANSWER_SECONDS:.0f} s" if late else f"ended with exit code {code}"
            raise Unavailable(f"{why}: {last_line(self._log)}")
        answer = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process and waits for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
