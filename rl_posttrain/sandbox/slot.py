"""One slot: a container with a fork server, and the pipes of the one run in it. For one thread at a time."""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rl_posttrain.sandbox.bubblewrap import SANDBOX_ENVIRONMENT, SandboxUnavailable, explain, slot_command
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.seccomp import Profile
from rl_posttrain.types import Execution, Flag

SOURCES = ("forkserver.py", "harness.py", "codec.py")
START_SECONDS = 30.0
LINGER_SECONDS = 1.0  # from the last answer to the end of the process
KILL_SECONDS = 10.0  # from a kill to the end of the run; beyond it the slot is broken
CHUNK = 1 << 16
STATUS_BYTES = 4096
ERROR_SIGNALS = (6, 7, 11)  # what a failed allocation in C ends with: SIGABRT, SIGBUS, SIGSEGV


class InfrastructureError(RuntimeError):
    """The sandbox failed, which says nothing about the candidate."""


class RunEnded(Exception):
    """The run is over, or is being killed, before it gave an answer."""


class Launcher(Protocol):
    """Starts and kills containers; see `launcher.py`."""

    bubblewrap: str  # the program's path

    def start(self, argv: list[str], environment: dict, user: int | None, files: list[int]) -> int: ...

    def kill(self, pid: int) -> None: ...


@dataclass(frozen=True)
class Job:
    """What to run. The candidate's code goes to the run itself, as the first question."""

    mode: Literal["calls", "program"]
    limits: Limits
    profile: Profile = "single"
    stdin: bytes = b""


class Slot:
    """A container that serves runs until it is closed or breaks."""

    def __init__(self, launcher: Launcher, filters: dict[Profile, bytes], user: int | None):
        """Starts the container.

        Raises:
          SandboxUnavailable: it does not start; the message holds bubblewrap's own and what to do.
        """
        self.runs = 0
        self._launcher = launcher
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors = os.memfd_create("slot-stderr")
        opened = [os.open(Path(__file__).parent / name, os.O_RDONLY) for name in SOURCES]
        # "{0}" and so on become the descriptors' numbers in the launcher.
        sources = {name: f"{{{index + 1}}}" for index, name in enumerate(SOURCES)}
        try:
            argv = slot_command(launcher.bubblewrap, sources, "{0}")
            self.pid = launcher.start(argv, SANDBOX_ENVIRONMENT, user, [errors, theirs.fileno(), *opened])
            theirs.close()
            hello = {name: base64.b64encode(data).decode() for name, data in filters.items()}
            self._start(json.dumps({"filters": hello}).encode(), errors)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            for descriptor in (errors, *opened):
                os.close(descriptor)

    def _start(self, hello: bytes, errors: int) -> None:
        self._control.settimeout(START_SECONDS)
        try:
            self._control.send(hello)
            answer = self._control.recv(CHUNK)
        except (OSError, TimeoutError) as error:
            answer, reason = b"", repr(error)
        else:
            reason = ""
        if not answer:
            os.lseek(errors, 0, os.SEEK_SET)
            said = os.read(errors, CHUNK).decode("utf-8", "replace")
            raise SandboxUnavailable(explain(said or reason))
        version = tuple(json.loads(answer)["ready"])
        if version < (3, 9):
            raise SandboxUnavailable(f"the sandbox's Python is {version}; it needs 3.9 or newer")
        self._control.setblocking(True)

    def close(self) -> None:
        """Ends the container. Safe to call twice."""
        self._control.close()
        if hasattr(self, "pid"):
            self._launcher.kill(self.pid)

    def run(self, job: Job, driver: Callable[[Session], Any]) -> tuple[Execution, Any]:
        """One run. `driver` asks the questions through the session; its result comes with the execution.

        Raises:
          InfrastructureError: the container or its plumbing failed; close this slot.
        """
        self.runs += 1
        try:
            session = Session(self._control, self.runs, job)
            try:
                result = session.drive(driver)
            finally:
                session.close()
            return session.execution(), result
        except OSError as error:
            raise InfrastructureError(f"slot {self.pid}: {error!r}") from error


class Session:
    """The pipes of one run: its questions, answers and output, all bounded, and the clock."""

    def __init__(self, control: socket.socket, run: int, job: Job):
        self.flags: dict[str, str] = {}
        self.error: list[str] | None = None  # [type, message, traceback] of the first exception reported
        self._control, self._run, self._limits = control, run, job.limits
        self._ends: dict[str, int] = {}
        self._incoming = {name: bytearray() for name in ("stdout", "stderr", "replies", "status")}
        self._outgoing = {"stdin": memoryview(job.stdin), "requests": memoryview(b"")}
        self._closing = {"stdin"}  # ends to close once everything is written
        self._truncated = self._ended = self._killed = self._drained = self._waiting = False
        self._started = time.monotonic()
        self._deadline = self._started + job.limits.wall_seconds
        message = {"run": run, "mode": job.mode, "profile": job.profile, "limits": asdict(job.limits)}
        theirs = []
        try:
            for name in ("stdin", "stdout", "stderr", "requests", "replies", "status"):
                reading, writing = os.pipe()
                mine, other = (writing, reading) if name in self._outgoing else (reading, writing)
                self._ends[name] = mine
                theirs.append(other)
                os.set_blocking(mine, False)
            socket.send_fds(control, [json.dumps(message).encode()], theirs)
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def close(self) -> None:
        for name in list(self._ends):
            self._close(name)

    def _close(self, name: str) -> None:
        # Every descriptor is closed exactly once: its number may be another thread's a moment later.
        if name in self._ends:
            os.close(self._ends.pop(name))

    # ---- for drivers ----

    def ask(self, question: bytes) -> bytes:
        """Sends a question and waits for the answer's bytes.

        Raises:
          RunEnded: there is no answer: the run ended, was killed by a limit, or had answered before the
          question.
        """
        if self._incoming["replies"]:
            self.kill("unsolicited_frame", "a reply before its question")
            raise RunEnded
        self._send(question)
        self._waiting = True
        replies = self._incoming["replies"]
        while True:
            if len(replies) >= 4:
                (length,) = struct.unpack_from(">I", replies)
                if length > self._limits.reply_bytes:
                    self.kill("result_too_big", f"{length} bytes; at most {self._limits.reply_bytes}")
                    raise RunEnded
                if len(replies) >= 4 + length:
                    answer = bytes(replies[4 : 4 + length])
                    del replies[: 4 + length]
                    self._waiting = False
                    return answer
            if self._ended or self._killed:
                raise RunEnded
            self._step(self._deadline)

    def wait(self, question: bytes) -> bytes | None:
        """Sends the only question and waits for the run's end; the reply written by then, if there is one."""
        self._send(question)
        self._closing.add("requests")
        while not (self._ended or self._killed):
            self._step(self._deadline)
        self._end()
        replies = self._incoming["replies"]
        if len(replies) < 4:
            return bytes(replies) or None
        answer = bytes(replies[4:])
        replies.clear()
        return answer

    def kill(self, flag: str, detail: str = "") -> None:
        """Ends the run, noting why."""
        self.flags.setdefault(flag, detail)
        if not (self._killed or self._ended):
            self._killed = True
            self._control.send(json.dumps({"kill": self._run}).encode())

    # ---- plumbing ----

    def _send(self, question: bytes) -> None:
        frame = struct.pack(">I", len(question)) + question
        self._outgoing["requests"] = memoryview(bytes(self._outgoing["requests"]) + frame)

    def drive(self, driver: Callable[[Session], Any]) -> Any:
        try:
            return driver(self)
        finally:
            self._end()
            # While a question is open, what is left is a part of its answer: the run was cut off.
            if self._incoming["replies"] and not self._waiting:
                self.flags.setdefault("unsolicited_frame", "a reply that no question asked for")

    def _end(self) -> None:
        """Waits for the end of the run, at first without force, and takes in what the pipes still hold."""
        if self._drained:
            return
        self._closing.add("requests")
        lingering = min(self._deadline, time.monotonic() + LINGER_SECONDS)
        while not (self._ended or self._killed):
            self._step(lingering, "lingering")
        deadline = time.monotonic() + KILL_SECONDS
        while not self._ended:
            if time.monotonic() > deadline:
                raise InfrastructureError(f"run {self._run} did not end within {KILL_SECONDS} s of its kill")
            self._step(deadline)
        for _ in range(256):  # the run is dead: what is in the pipes is all there will be
            if not self._step(0):
                break
        self._drained = True

    def _step(self, deadline: float, at_deadline: str = "wall_timeout") -> bool:
        """Serves the pipes once, waiting until `deadline` for one to be ready. False when none was."""
        for name in self._closing & self._outgoing.keys():
            if not self._outgoing[name]:
                self._close(name)
        poll = select.poll()
        names = {}
        for name, descriptor in self._ends.items():
            if name in self._incoming or self._outgoing[name]:
                poll.register(descriptor, select.POLLIN if name in self._incoming else select.POLLOUT)
                names[descriptor] = name
        if not self._ended:
            poll.register(self._control, select.POLLIN)
            names[self._control.fileno()] = "control"
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            if not self._ended and not self._killed:
                self.kill(at_deadline, f"after {time.monotonic() - self._started:.2f} s")
            return False
        for descriptor, _ in ready:
            name = names[descriptor]
            if name == "control":
                self._control_message()
            elif name in self._incoming:
                self._read(name)
            else:
                self._write(name)
        return True

    def _control_message(self) -> None:
        data = self._control.recv(CHUNK)
        message = json.loads(data) if data else {"failed": "the slot's process ended"}
        if "failed" in message:
            raise InfrastructureError(message["failed"])
        self._ended = message["run"] == self._run

    def _write(self, name: str) -> None:
        try:
            count = os.write(self._ends[name], self._outgoing[name][:CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:  # the candidate does not read, which is its own affair
            self._outgoing[name] = memoryview(b"")
            return self._close(name)
        self._outgoing[name] = self._outgoing[name][count:]

    def _read(self, name: str) -> None:
        try:
            data = os.read(self._ends[name], CHUNK)
        except BlockingIOError:
            return
        if not data:
            return self._close(name)
        buffer = self._incoming[name]
        room = self._room(name) - len(buffer)
        buffer += data[: max(room, 0)]
        if len(data) > room:
            self._truncated |= name in ("stdout", "stderr")
            flag = "result_too_big" if name == "replies" else "output_limit"
            self.kill(flag, f"{name}: more than {self._room(name)} bytes")

    def _room(self, name: str) -> int:
        if name == "replies":
            return self._limits.reply_bytes + 4
        return STATUS_BYTES if name == "status" else self._limits.output_bytes

    def execution(self) -> Execution:
        """What the run showed.

        Raises:
          InfrastructureError: its set-up failed, or its pid 1 did not report although nobody killed it.
        """
        report: dict[str, Any] = {}
        for line in bytes(self._incoming["status"]).splitlines():
            report.update(json.loads(line))
        if "failed" in report:
            raise InfrastructureError(report["failed"])
        if "status" not in report and not self._killed:
            raise InfrastructureError(f"run {self._run} ended without a report")
        status = report.get("status", 9)
        signal = status & 0x7F or None
        memory = report.get("peak_memory_bytes", 0)
        return Execution(
            status=self._status(status, signal, report.get("cpu_limit", False), memory),
            stdout=self._incoming["stdout"].decode("utf-8", "replace"),
            stderr=self._incoming["stderr"].decode("utf-8", "replace"),
            truncated=self._truncated,
            traceback=self.error[2] if self.error else "",
            exit_code=None if signal else status >> 8,
            signal=signal,
            cpu_s=report.get("cpu_s", 0.0),
            wall_s=time.monotonic() - self._started,
            peak_memory_bytes=memory,
            processes_left=report.get("left", 0),
            flags=tuple(Flag(name, detail) for name, detail in self.flags.items()),
        )

    def _status(self, status: int, signal: int | None, cpu_limit: bool, memory: int) -> Any:
        if self.flags.keys() & {"output_limit", "result_too_big"}:
            return "output_limit"
        if cpu_limit or "wall_timeout" in self.flags:
            return "time_limit"
        out_of_memory = self.error is not None and self.error[0] == "MemoryError"
        crashed_full = signal in ERROR_SIGNALS and memory > 0.8 * self._limits.memory_bytes
        if out_of_memory or crashed_full:
            return "memory_limit"
        return "ok" if status == 0 else "error"
