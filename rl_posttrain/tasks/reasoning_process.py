"""A confined, killable process that answers JSON lines (see reasoning_worker.py), seen from the trainer."""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from rl_posttrain.tasks.registry import Confine

START_S = 120.0  # importing reasoning-gym takes 2 to 5 s, more on a busy machine


class WorkerError(RuntimeError):
    """There is no proper reply from the worker."""


class WorkerDied(WorkerError):
    """The worker ended, or could not start."""


class WorkerRefusal(WorkerError):
    """The worker lives and answered with an error. `kind` is the name of the exception raised there."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class WorkerTimeout(WorkerError):
    """No reply within the deadline; the worker was killed and the next request starts a new one."""


class Worker:
    """One process, started at the first request and after every kill. Safe to use from several threads."""

    def __init__(self, confine: Confine):
        self.confine = confine
        self.lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # pid that started the process: a forked child must not talk over its parent's pipes
        self._errors: IO[bytes] | None = None
        self._buffer = b""
        self._asked = 0

    def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Sends a request and returns the next reply.

        Raises:
          WorkerTimeout: no reply in `deadline_s` seconds.
          WorkerRefusal: it answered with an error.
          WorkerDied: it could not start, or died twice.
        """
        with self.lock:
            self._start()
            try:
                return self._exchange(request, deadline_s)
            except WorkerDied:
                # Bubblewrap's child dies with the thread that started it, and the kernel kills for memory:
                # that is no fault of the request, unless it happens twice.
                self._start()
                return self._exchange(request, deadline_s)

    def _exchange(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        self._asked += 1
        try:
            self._process.stdin.write(json.dumps({**request, "id": self._asked}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died("while it was asked something") from None
        return self.reply(deadline_s)

    def reply(self, deadline_s: float) -> dict[str, Any]:
        """The next reply to a request that has several. Raises as `ask` does."""
        with self.lock:
            reply = json.loads(self._read_line(deadline_s))
            while reply["id"] != self._asked:  # left over from a request whose asker was interrupted
                reply = json.loads(self._read_line(deadline_s))
            if "error" in reply:
                raise WorkerRefusal(reply["kind"], reply["error"])
            return reply

    def close(self) -> None:
        """Kills the process, if there is one."""
        with self.lock:
            process, self._process, self._buffer = self._process, None, b""
            if process is None or self._owner != os.getpid():
                return
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended by itself
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        pass  # what was buffered for the dead process is lost, as it should be
            process.wait()

    def _start(self) -> None:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return
        self.close()
        self._errors = tempfile.TemporaryFile()
        argv, readable = command()
        self._buffer = b""
        self._process = subprocess.Popen(
            self.confine(argv, readable=readable),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is the trainer's to handle; and killpg reaches all
        )
        self._owner = os.getpid()
        self._read_line(START_S)  # {"started": true}

    def _read_line(self, deadline_s: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        end = time.monotonic() + deadline_s
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    self.close()
                    raise WorkerTimeout(f"the reasoning-gym worker gave no reply in {deadline_s:g} s")
                data = os.read(descriptor, 1 << 16)
                if not data:
                    raise self._died("before it replied")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _died(self, when: str) -> WorkerDied:
        self.close()
        assert self._errors is not None
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 2000))
        tail = self._errors.read().decode(errors="replace").strip()
        return WorkerDied(f"the reasoning-gym worker ended {when}; the end of its stderr: {tail or '(empty)'}")


def command() -> tuple[list[str], list[str]]:
    """The worker's argv, and the folders that it must be able to read."""
    spec = importlib.util.find_spec("reasoning_gym")  # looks, does not import
    if spec is None or spec.origin is None:
        raise WorkerError("reasoning-gym is not installed: pip install reasoning-gym==0.1.25")
    ours = Path(__file__).resolve().parents[1]
    library = Path(spec.origin).resolve().parents[1]
    environment = {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join([str(ours.parent), str(library)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MPLCONFIGDIR": "/tmp",
    }
    argv = [shutil.which("env") or "/usr/bin/env", *(f"{key}={value}" for key, value in environment.items())]
    # `env` and not subprocess's env=, because the wrapper may clear the environment.
    argv += [sys.executable, "-P", "-m", "rl_posttrain.tasks.reasoning_worker"]
    folders = [ours, library, Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent]
    return argv, list(dict.fromkeys(str(folder) for folder in folders))
