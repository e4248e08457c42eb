"""The trainer's end of `launcher.py`, the small process that starts containers."""

from __future__ import annotations

import collections
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from rl_posttrain.sandbox import cgroups
from rl_posttrain.sandbox.bubblewrap import (
    SandboxUnavailable,
    explain,
    make_readable,
    reachable_copy,
    readable_by_sandbox,
)
from rl_posttrain.sandbox.job import InfrastructureError

CLOSE_SECONDS = 15.0
ANSWER_SECONDS = 30.0  # for the launcher to start a container, without waiting for it


HARNESS = ("forkserver.py", "harness.py", "codec.py", "objects.py", "proxies.py", "exceptions.py", "referee.py")


def _compile_harness(folder: Path, interpreter: str) -> Path:
    """Copies the modules that run inside: the package may lie where the unprivileged user cannot look.

    Compiling them at each start would cost a container in safe mode a fifth of its processor time.

    Raises:
      SandboxUnavailable: the interpreter does not run.
    """
    folder.mkdir()
    for name in HARNESS:
        shutil.copy(Path(__file__).parent / name, folder)
    mode = "py_compile.PycInvalidationMode.UNCHECKED_HASH"
    program = f"import py_compile, sys; [py_compile.compile(f, invalidation_mode={mode}) for f in sys.argv[1:]]"
    done = subprocess.run(
        [interpreter, "-I", "-S", "-c", program, *HARNESS], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        raise SandboxUnavailable(explain(done.stderr or f"{interpreter} ended with {done.returncode}"))
    make_readable(folder)
    return folder


def remove_leftovers() -> None:
    """Removes the folders of trainers that were killed together with their launchers."""
    for path in Path(tempfile.gettempdir()).glob(f"sandbox-*-{_namespace()}-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and path.stat().st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)


def _namespace() -> int:
    """The number of our process namespace: in another, our numbers of processes mean nothing."""
    return os.stat("/proc/self/ns/pid").st_ino


class LauncherProcess:
    """A running launcher, with a folder for what its containers share; both end with the trainer.

    Attributes:
      shared: the folder that containers see, read-only.
      toolchains: folders of compilers by language, as containers can be shown them.
      harness: the folder of the sandbox's own modules, compiled for the candidates' interpreter.
      building: held while something is put there.
      groups: the control groups, or None; `delegation` says what they hold, or why there are none.
    """

    def __init__(self, bubblewrap: str, interpreter: str, toolchains: Mapping[str, str]) -> None:
        self.building = threading.Lock()
        self.toolchains = dict(toolchains)
        self.groups: cgroups.Groups | None = None
        self._names = itertools.count()
        self._retired: collections.deque[cgroups.Group] = collections.deque()
        self._lock = threading.Lock()
        # First of all: where no descriptors are left, there is then no folder to remove without them.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        remove_leftovers()
        self._folder = Path(tempfile.mkdtemp(prefix=f"sandbox-{os.getpid()}-{_namespace()}-"))
        try:
            self._start(bubblewrap, interpreter, theirs)
        except BaseException:
            self._control.close()
            theirs.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            if self.groups is not None:
                self.groups.close()
            raise
        theirs.close()

    def _start(self, bubblewrap: str, interpreter: str, theirs: socket.socket) -> None:
        self._folder.chmod(0o755)
        self.shared = self._folder / "shared"
        self.shared.mkdir()
        self.harness = str(_compile_harness(self._folder / "harness", interpreter))
        self.bubblewrap = reachable_copy(bubblewrap, self._folder)
        binds = []
        for name, path in self.toolchains.items():
            if not readable_by_sandbox(path):  # below /root, say; the launcher, as root, shows it elsewhere
                target = self._folder / "toolchains" / name
                target.mkdir(parents=True)
                binds.append((path, str(target)))
                self.toolchains[name] = str(target)
        self.groups, self.delegation = cgroups.find()
        script = str(Path(__file__).parent / "launcher.py")
        number = theirs.fileno()
        # No preexec_fn and no change of user: Python then starts it with vfork, whatever this process's size.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, str(number), str(os.getpid()), str(self._folder), json.dumps(binds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(number,),
            start_new_session=True,  # Ctrl-C is for the trainer, which then closes the pool
        )

    def group(self) -> cgroups.Group | None:
        """A control group for a new slot; None where they are not delegated."""
        if self.groups is None:
            return None
        try:  # making and removing them costs a container in safe mode more than anything else here
            group = self._retired.popleft()
        except IndexError:
            return self.groups.slot(str(next(self._names)))
        if group.empty():
            return group
        self._retired.append(group)
        return self.groups.slot(str(next(self._names)))

    def retire(self, group: cgroups.Group) -> None:
        """Takes back the group of a slot that has been killed; another slot has it when its processes are gone."""
        self._retired.append(group)

    def start(
        self, argv: list[str], environment: dict, user: int | None, files: list[int], group: cgroups.Group | None
    ) -> int:
        """Starts a container in its group; its pid. `files`: its stderr, then what argv calls "{0}", "{1}", ...

        Raises:
          SandboxUnavailable: the program cannot be executed.
          InfrastructureError: the launcher is gone, or did not answer and has been ended.
        """
        message = {"argv": argv, "environment": environment, "user": user, "enter": [], "leave": []}
        if group is not None and self.groups is not None:
            message |= {"enter": group.enter, "leave": self.groups.leave}
        with self._lock:
            try:
                self._control.settimeout(ANSWER_SECONDS)
                socket.send_fds(self._control, [json.dumps(message).encode()], files)
                data = self._control.recv(1 << 16)
            except OSError as error:
                self._process.kill()  # a late answer would be taken for another's
                self._process.wait()
                raise InfrastructureError(f"the launcher ended: {error!r}") from error
        if not data:
            raise InfrastructureError("the launcher ended")
        answer = json.loads(data)
        if "error" in answer:
            raise SandboxUnavailable(
                f"bubblewrap cannot be started: {answer['error']}. It runs as an unprivileged user, who "
                "has to be able to reach it: `apt-get install bubblewrap`"
            )
        return answer["pid"]

    def kill(self, pid: int) -> None:
        """Kills a container."""
        with self._lock:
            try:
                self._control.send(json.dumps({"kill": pid}).encode())
            except OSError:  # the launcher is gone, and its containers with it
                return

    def ended(self) -> bool:
        """Whether the launcher is gone."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends all containers and the launcher."""
        with self._lock:
            self._control.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        while self._retired:
            self._retired.popleft().close()
        if self.groups is not None:
            self.groups.close()
        shutil.rmtree(self._folder, ignore_errors=True)  # for a launcher that was killed
