"""The pipes of one run: questions, answers and output, all bounded, and the clock. For one thread at a time."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from rl_posttrain.sandbox import cgroups, processes
from rl_posttrain.sandbox.job import InfrastructureError, Job, RunEnded
from rl_posttrain.types import Execution, Flag

LINGER_SECONDS = 1.0  # from the last answer to the end of the process
KILL_SECONDS = 10.0  # from a kill to the end of the run; beyond it the slot is broken
WATCH_SECONDS = 0.05  # between looks at the memory of runs that no rlimit bounds as a whole
RUNNABLE_SECONDS = 0.25  # by which the limit moves on while the run computes, or waits for its turn to
STARVED_FACTOR = 10  # a wall limit is never stretched further than this
CHUNK = 1 << 16
ERROR_SIGNALS = (6, 7, 11)  # what a failed allocation in C ends with: SIGABRT, SIGBUS, SIGSEGV
SLOT_BYTES, SLOT_TASKS = 48 << 20, 6  # what a slot's own processes may use of its control group
PERMANENT = 3  # a slot's processes that are there between runs, or are a run's pid 1: the first in its tree


class GroupUsage:
    """What one run uses, by its slot's control group; nothing where there is none, or no such controller."""

    def __init__(self, group: cgroups.Group | None, job: Job):
        self._group = group
        if group is not None:
            limits = job.limits
            # A compiler or a JVM has more than candidates do: what belongs to the slot, and the files in its /tmp.
            memory = limits.memory_bytes + limits.file_bytes + SLOT_BYTES
            group.limit(memory + (job.reserved_bytes or 0), limits.processes + SLOT_TASKS)
            self._kills, self._cpu = group.kills(), group.cpu_seconds()

    def killed(self) -> bool:
        """Whether the kernel ended processes of this run for want of memory."""
        return self._group is not None and self._group.kills() > self._kills

    def peak_bytes(self) -> int:
        """Most memory at once, of the whole slot; 0 where unknown."""
        return (self._group.peak_bytes() or 0) if self._group is not None else 0

    def cpu_seconds(self) -> float:
        """Processor time of everything in the slot since the run began; 0.0 where unknown."""
        now = self._group.cpu_seconds() if self._group is not None else None
        return 0.0 if now is None or self._cpu is None else now - self._cpu


class Session:
    """The pipes of one run: its questions, answers and output, all bounded, and the clock."""

    def __init__(self, control: socket.socket, run: int, job: Job, pid: int, usage: GroupUsage):
        self.flags: dict[str, str] = {}
        self.error: list[str] | None = None  # [type, message, traceback] of the first exception reported
        self._control, self._run, self._limits, self._job, self._pid = control, run, job.limits, job, pid
        self._usage = usage
        self._ends: dict[str, int] = {}
        self._names: dict[int, str] = {control.fileno(): "control"}
        self._incoming = {"stdout": bytearray(), "stderr": bytearray()}
        self._outgoing: dict[str, memoryview] = {"stdin": memoryview(job.stdin)} if job.stdin else {}
        if job.mode != "command":
            self._incoming["replies"] = bytearray()
            self._outgoing["requests"] = memoryview(b"")
        self._closing = {"stdin"}  # ends to close once everything is written
        self._truncated = self._killed = self._drained = self._waiting = False
        self._report: dict[str, Any] | None = None
        self._artifact = -1
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._started = time.monotonic()
        self._deadline = self._started + job.limits.wall_seconds
        self._answered: float | None = None  # when, while nothing is asked: what follows is the judge's own time
        self._paused = 0.0
        self._look = self._started + WATCH_SECONDS if job.watched else float("inf")
        theirs: list[int] = []
        try:
            channels = self._open(job, theirs)
            socket.send_fds(control, [job.message(run, channels)], theirs)
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def _open(self, job: Job, theirs: list[int]) -> list[str]:
        """Makes the channels; their other ends go into `theirs`, in the order of the names returned."""
        channels = []
        for name in (*self._incoming, *self._outgoing):
            reading, writing = os.pipe()
            mine, other = (writing, reading) if name in self._outgoing else (reading, writing)
            self._ends[name] = mine
            self._names[mine] = name
            theirs.append(other)
            channels.append(name)
            os.set_blocking(mine, False)
            if name in self._incoming:
                self._poll.register(mine, select.POLLIN)
            elif name == "stdin":
                self._poll.register(mine, select.POLLOUT)
        for name, content in job.files.items():
            channels.append(f"file:{name}")
            theirs.append(os.dup(content) if isinstance(content, int) else memory_file(name, content))
        if job.artifact:
            self._artifact = os.memfd_create("artifact", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            channels.append(f"artifact:{job.artifact}")
            theirs.append(os.dup(self._artifact))
        return channels

    def close(self) -> None:
        for name in list(self._ends):
            self._close(name)
        if self._artifact >= 0:
            os.close(self._artifact)
            self._artifact = -1

    def _close(self, name: str) -> None:
        # Every descriptor is closed exactly once: its number may be another thread's a moment later.
        if name in self._ends:
            descriptor = self._ends.pop(name)
            if name in self._incoming or self._outgoing.get(name):
                self._poll.unregister(descriptor)
            del self._names[descriptor]
            os.close(descriptor)

    # ---- for drivers ----

    def ask(self, question: bytes) -> bytes:
        """Sends a question and waits for the answer's bytes.

        Raises:
          RunEnded: there is no answer: the run ended, was killed by a limit, or had answered before the
          question.
        """
        replies = self._incoming["replies"]
        if replies:
            self.kill("unsolicited_frame", "a reply before its question")
            raise RunEnded
        if self._answered is not None:
            pause = time.monotonic() - self._answered
            self._paused += pause
            self._deadline += pause
        self._send(question)
        self._waiting = True
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
                    self._answered = time.monotonic()
                    return answer
            if self._report is not None or self._killed:
                raise RunEnded
            self._step(self._deadline)

    def wait(self, question: bytes | None = None) -> bytes | None:
        """Sends the only question, if any, and waits for the run's end; the reply written by then, if there is one."""
        if question is not None:
            self._send(question)
        self._closing.add("requests")
        while self._report is None and not self._killed:
            self._step(self._deadline)
        self._end()
        replies = self._incoming.get("replies", bytearray())
        if len(replies) < 4:
            return bytes(replies) or None
        answer = bytes(replies[4:])
        replies.clear()
        return answer

    def artifact(self) -> int | None:
        """The file that the run left, as a sealed descriptor that the caller closes; None if it left none."""
        if self._artifact < 0 or os.fstat(self._artifact).st_size == 0:
            return None
        descriptor, self._artifact = self._artifact, -1
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return descriptor

    def kill(self, flag: str, detail: str = "") -> None:
        """Ends the run, noting why."""
        self.flags.setdefault(flag, detail)
        if not self._killed and self._report is None:
            self._killed = True
            self._control.send(json.dumps({"kill": self._run}).encode())

    # ---- plumbing ----

    def _send(self, question: bytes) -> None:
        frame = struct.pack(">I", len(question)) + question
        waiting = self._outgoing["requests"]
        if not waiting and "requests" in self._ends:
            self._poll.register(self._ends["requests"], select.POLLOUT)
        self._outgoing["requests"] = memoryview(bytes(waiting) + frame)
        if "requests" in self._ends:
            self._write("requests")  # mostly the pipe takes it at once

    def drive(self, driver: Callable[[Session], Any]) -> Any:
        try:
            return driver(self)
        finally:
            self._end()
            # While a question is open, what is left is a part of its answer: the run was cut off.
            if self._incoming.get("replies") and not self._waiting:
                self.flags.setdefault("unsolicited_frame", "a reply that no question asked for")

    def _end(self) -> None:
        """Waits for the end of the run, at first without force, and takes in what the pipes still hold."""
        if self._drained:
            return
        self._closing.add("requests")
        lingering = min(self._deadline, time.monotonic() + LINGER_SECONDS)
        while self._report is None and not self._killed:
            self._step(lingering, "lingering")
        deadline = time.monotonic() + KILL_SECONDS
        while self._report is None:
            if time.monotonic() > deadline:
                raise InfrastructureError(f"run {self._run} did not end within {KILL_SECONDS} s of its kill")
            self._step(deadline)
        for name in self._incoming:  # the run is dead: what is in the pipes is all there will be
            while name in self._ends and self._read(name):
                pass
        self._drained = True

    def _step(self, deadline: float, at_deadline: str = "wall_timeout") -> None:
        """Serves the pipes once, waiting until `deadline` for one to be ready."""
        for name in self._closing & self._ends.keys():
            if not self._outgoing[name]:
                self._close(name)
        now = time.monotonic()
        ready = self._poll.poll(max(0.0, min(deadline, self._look) - now) * 1000)
        if not ready:
            if time.monotonic() >= self._look:
                self._watch()
            elif self._report is None and not self._killed and not self._starved(deadline):
                self.kill(at_deadline, f"after {time.monotonic() - self._started:.2f} s")
            return
        for descriptor, _ in ready:
            name = self._names.get(descriptor)
            if name == "control":
                self._control_message()
            elif name in self._incoming:
                self._read(name)
            elif name is not None:
                self._write(name)

    def _control_message(self) -> None:
        data = self._control.recv(CHUNK)
        message = json.loads(data) if data else {"failed": "the slot's process ended"}
        if "failed" in message:
            self._drained = True  # there is nothing to wait for
            raise InfrastructureError(message["failed"])
        if message["run"] == self._run:
            self._report = message
            self._poll.unregister(self._control)

    def _watch(self) -> None:
        """Kills a run whose processes together exceed a limit that the kernel holds for each of them alone."""
        self._look = time.monotonic() + WATCH_SECONDS
        tree = processes.descendants(self._pid)
        # Of the run's pid 1 and below, which has waited for the others; a control group also knows of those that
        # nobody waited for.
        used = max(self._usage.cpu_seconds(), processes.cpu_seconds(tree[PERMANENT - 1 :]))
        if used > self._limits.cpu_seconds:
            self.kill("cpu_limit", f"{used:.2f} s in all processes")
        held = processes.memory_bytes(tree[PERMANENT:])
        if held > self._limits.memory_bytes:
            self.kill("memory_limit", f"{held} bytes in all processes; at most {self._limits.memory_bytes}")

    def _starved(self, deadline: float) -> bool:
        """Whether the run only missed `deadline` because the machine kept it waiting for a processor."""
        if deadline != self._deadline:
            return False
        now, wall, candidates = (
            time.monotonic(),
            self._limits.wall_seconds,
            processes.descendants(self._pid)[PERMANENT:],
        )
        later = self._started + self._paused + wall + processes.waited_seconds(candidates)
        if processes.runnable(candidates):  # it wants nothing but a processor, and the limit of that decides
            later = max(later, now + RUNNABLE_SECONDS)
        self._deadline = min(later, self._started + self._paused + STARVED_FACTOR * wall)
        return self._deadline > now + 0.01

    def _write(self, name: str) -> None:
        try:
            count = os.write(self._ends[name], self._outgoing[name][:CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:  # the candidate does not read, which is its own affair
            count = len(self._outgoing[name])
        self._outgoing[name] = self._outgoing[name][count:]
        if not self._outgoing[name]:
            self._poll.unregister(self._ends[name])

    def _read(self, name: str) -> bool:
        """Takes what a pipe holds. False when there was nothing, or no room for it."""
        try:
            data = os.read(self._ends[name], CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close(name)
            return False
        buffer = self._incoming[name]
        room = self._room(name) - len(buffer)
        buffer += data[: max(room, 0)]
        if len(data) > room:
            self._truncated |= name != "replies"
            flag = "result_too_big" if name == "replies" else "output_limit"
            self.kill(flag, f"{name}: more than {self._room(name)} bytes")
            return False
        return True

    def _room(self, name: str) -> int:
        return self._limits.reply_bytes + 4 if name == "replies" else self._limits.output_bytes

    def execution(self) -> Execution:
        """What the run showed."""
        report = self._report or {}
        status = report.get("status", 9)
        signal = status & 0x7F or None
        memory = report.get("peak_memory_bytes", 0)
        cpu_s = report.get("cpu_s", 0.0)
        if self._job.profile == "multi":  # children that nobody waited for have told nobody
            memory, cpu_s = max(memory, self._usage.peak_bytes()), max(cpu_s, self._usage.cpu_seconds())
        return Execution(
            status=self._status(status, signal, report.get("cpu_limit", False), memory),
            stdout=self._incoming["stdout"].decode("utf-8", "replace"),
            stderr=self._incoming["stderr"].decode("utf-8", "replace"),
            truncated=self._truncated,
            traceback=self.error[2] if self.error else "",
            exit_code=None if signal else status >> 8,
            signal=signal,
            cpu_s=cpu_s,
            wall_s=time.monotonic() - self._started,
            peak_memory_bytes=memory,
            processes_left=report.get("left", 0),
            flags=tuple(Flag(name, detail) for name, detail in self.flags.items()),
        )

    def _status(self, status: int, signal: int | None, cpu_limit: bool, memory: int) -> Any:
        if self.flags.keys() & {"output_limit", "result_too_big"}:
            return "output_limit"
        if "memory_limit" in self.flags or self._usage.killed():
            return "memory_limit"
        if cpu_limit or self.flags.keys() & {"wall_timeout", "cpu_limit"}:
            return "time_limit"
        out_of_memory = self.error is not None and self.error[0] == "MemoryError"
        crashed_full = signal in ERROR_SIGNALS and memory > 0.8 * self._limits.memory_bytes
        if out_of_memory or crashed_full:
            return "memory_limit"
        return "ok" if status == 0 else "error"


def memory_file(name: str, content: bytes) -> int:
    """A descriptor of a file in memory that holds `content`."""
    descriptor = os.memfd_create(name)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor
