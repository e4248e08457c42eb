"""Memory and process limits by control groups, on machines that let us make some; version 2, else version 1.

A pool makes `rl_posttrain-<pid>-...` and one child per slot below it. Groups of others keep their settings, and
only a process that moves itself changes its group:

    for path in group.enter:  # the launcher, which has one thread, before it starts the container
        write "0" to path
    ... start it; what it starts stays inside for ever ...
    for path in groups.leave:  # and back, also when one of the steps above failed
        write "0" to path

What a slot's own processes use (about 12 MB, 4 tasks) counts in its group.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

NEEDED = {"memory", "pids"}
NAME = re.compile(r"rl_posttrain-(\d+)-(\d+)-\d+")  # process, its pid namespace, number of the pool
CLOSE_SECONDS = 5.0
PROBE = 'for path in "$@"; do echo 0 > "$path" || exit; done'  # sh moves itself
NOT_DELEGATED = (
    "start the trainer with `systemd-run --user --scope -p Delegate=yes`, or as root where systemd runs the machine"
)
_numbers = itertools.count()


@dataclass(frozen=True)
class Hierarchy:
    """Where a tree of groups is mounted, and the folder of our own group in it."""

    mount: str
    own: str


class Group:
    """The control group of one slot. For one thread at a time.

    Counters run for the group's life: take differences. They raise OSError once the group is removed.
    """

    def __init__(self, version: int, folders: dict[str, str]):
        self.enter = tuple(f"{folder}/{_entrance(version)}" for folder in dict.fromkeys(folders.values()))
        self._version, self._folders = version, folders
        self.limited = False  # have there been limits? They stay until others are set
        self._peak: int | None = None
        self._earlier_peak = 0
        if "memory" in folders:
            peak = "memory.peak" if version == 2 else "memory.max_usage_in_bytes"
            if os.path.exists(self._path("memory", peak)):  # version 2 has it since Linux 5.19
                self._peak = _open_peak(self._path("memory", peak))

    def limit(self, memory_bytes: int, pids: int) -> None:
        """Sets the limits, of memory without swap and of tasks (threads count), and forgets the peak.

        Lowering the memory limit below what is in use ends processes in version 2 and fails in version 1.

        Raises:
          OSError: the kernel refuses, or the group is gone.
        """
        self.limited = True
        if "pids" in self._folders:
            _write(self._path("pids", "pids.max"), str(pids))
        if "memory" not in self._folders:
            return
        if self._version == 2:
            _write(self._path("memory", "memory.max"), str(memory_bytes))
        else:
            both = self._path("memory", "memory.memsw.limit_in_bytes")  # memory and swap; never below the other
            swap = os.path.exists(both)
            if swap:
                _write(both, "-1")
            _write(self._path("memory", "memory.limit_in_bytes"), str(memory_bytes))
            if swap:
                _write(both, str(memory_bytes))
        self._forget_peak()

    def _forget_peak(self) -> None:
        if self._peak is None:
            return
        try:
            os.write(self._peak, b"0")  # in version 2 for this descriptor alone
            self._earlier_peak = 0
        except OSError:  # version 2 before Linux 6.12
            self._earlier_peak = int(os.pread(self._peak, 64, 0))

    def peak_bytes(self) -> int | None:
        """Most memory in use at once since `limit`, with cached files, tmpfs and the kernel's own.

        None when unknown: no memory group, or a kernel that cannot forget an earlier peak, which was as high.
        """
        if self._peak is None:
            return None
        peak = int(os.pread(self._peak, 64, 0))
        return peak if peak > self._earlier_peak else None

    def kills(self) -> int:
        """Rises when the kernel ends processes because the group is at its memory limit (not their exact number).

        In version 2 that ends everything inside, the slot with it; in version 1 the largest process: a slot that
        broke while this number rose met the memory limit, and is no fault of the sandbox.
        """
        if "memory" not in self._folders:
            return 0
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        return _field(self._path("memory", name), "oom_kill")

    def cpu_seconds(self) -> float | None:
        """CPU time of everything that was ever in the group, whoever waited for it. None where not counted."""
        if "cpu" not in self._folders:
            return None
        if self._version == 2:
            return _field(self._path("cpu", "cpu.stat"), "usage_usec") / 1e6
        return int(_read(self._path("cpu", "cpuacct.usage"))) / 1e9

    def empty(self) -> bool:
        """Whether all its processes have ended, and been collected."""
        return not any(_read(path) for path in self.enter)

    def close(self) -> None:
        """Removes the group, for which its processes must be dead or dying. Safe to call twice.

        Raises:
          TimeoutError: some are alive after CLOSE_SECONDS.
        """
        if self._peak is not None:
            os.close(self._peak)
            self._peak = None
        for folder in dict.fromkeys(self._folders.values()):
            _remove(folder)

    def _path(self, controller: str, name: str) -> str:
        return f"{self._folders[controller]}/{name}"


class Groups:
    """The control groups of one pool; see `find`."""

    def __init__(self, version: int, folders: dict[str, str], homes: list[str]):
        self.version = version
        self.holds = tuple(folders)  # of "memory", "pids" (limits) and "cpu" (counted)
        self.leave = tuple(f"{home}/{_entrance(version)}" for home in dict.fromkeys(homes))
        self._folders = folders

    def slot(self, name: str) -> Group:
        """A new group for one slot. Close it once the slot's processes have been killed.

        Raises:
          OSError: it cannot be made, or there is one of this name.
        """
        folders = {controller: f"{folder}/{name}" for controller, folder in self._folders.items()}
        made: list[str] = []
        try:
            for folder in dict.fromkeys(folders.values()):
                os.mkdir(folder)
                made.append(folder)
            if self.version == 2:
                _write(f"{folders['memory']}/memory.oom.group", "1")
                if os.path.exists(f"{folders['memory']}/memory.swap.max"):
                    _write(f"{folders['memory']}/memory.swap.max", "0")
            return Group(self.version, folders)
        except OSError:
            for folder in made:
                os.rmdir(folder)
            raise

    def close(self) -> None:
        """Removes all groups of the pool, slots' included. Safe to call twice.

        Raises:
          TimeoutError: there are processes in one after CLOSE_SECONDS.
        """
        for folder in dict.fromkeys(self._folders.values()):
            for child in _subfolders(folder):
                _remove(child)
            _remove(folder)


def find() -> tuple[Groups | None, str]:
    """Makes the groups of a pool where the machine lets us, having tried that a process can move there and back.

    With them, or None, comes what is limited and what is not, and why, as text. Groups that dead trainers left in
    the same place are removed. Takes some milliseconds.

    Version 2: in the nearest group above our own that hands the memory and pids controllers to its children, but
    never outside a memory limit that was set for us. Version 1: only where our own group is the root of what is
    mounted. Deeper ones are kept by somebody (systemd, the container engine) who counts and ends our processes by
    listing the group, and would miss those in a group below it.
    """
    with open("/proc/self/cgroup") as cgroup, open("/proc/self/mountinfo") as mounts:
        found = hierarchies(cgroup.read(), mounts.read())
    reasons = []
    if "unified" in found:
        for place, reason in places(found["unified"]):
            if reason is None:
                try:
                    groups = _make(2, ["memory", "pids", "cpu"], place, found["unified"].own)
                    return groups, f"version 2: memory, pids, cpu: below {place}"
                except OSError as error:
                    reason = str(error)
            reasons.append(reason)
    groups, text = _version_1(found)
    texts = [f"version 2: {'; '.join(reasons)}"] if reasons else []
    texts += [text] if groups else [text, NOT_DELEGATED]
    return groups, "; ".join(texts)


def _version_1(found: dict[str, Hierarchy]) -> tuple[Groups | None, str]:
    folders: dict[str, str] = {}
    texts = []
    wanted = {name: found[name] for name in ("memory", "pids", "cpu") if name in found}
    for hierarchy in dict.fromkeys(wanted.values()):  # one for each controller, as a rule
        controllers = [name for name in wanted if wanted[name] == hierarchy]
        if hierarchy.own != hierarchy.mount:
            reason = f"{hierarchy.own} is kept by whoever made it"
        else:
            try:
                folders |= _make(1, controllers, hierarchy.mount, hierarchy.own)._folders
                reason = f"below {hierarchy.mount}"
            except OSError as error:
                reason = str(error)
        texts.append(f"{', '.join(controllers)}: {reason}")
    text = f"version 1: {'; '.join(texts) or 'no memory or pids controller is mounted'}"
    groups = Groups(1, folders, [found[controller].own for controller in folders])
    if folders.keys() & NEEDED:
        return groups, text
    groups.close()
    return None, text


def hierarchies(cgroup: str, mounts: str) -> dict[str, Hierarchy]:
    """Where this process is, by /proc/self/cgroup and /proc/self/mountinfo.

    "unified" is version 2; "memory", "pids" and "cpu" (accounting alone: in a hierarchy that also schedules, a
    group would change who gets how much) are version 1.
    """
    own = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(",") if controllers else ["unified"], path)
    found: dict[str, Hierarchy] = {}
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        root, folder = (re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), part) for part in mount.split()[3:5])
        options = set(kind.split()[2].split(","))
        names = {}
        if kind.startswith("cgroup2 "):
            names = {"unified": "unified"}
        elif kind.startswith("cgroup "):
            names = {name: name for name in NEEDED & options}
            if "cpuacct" in options and "cpu" not in options:
                names["cpu"] = "cpuacct"
        for name, controller in names.items():
            path = own.get(controller)
            if path is None or ".." in path.split("/"):  # outside of our cgroup namespace
                continue
            if root == "/" or path == root or path.startswith(root + "/"):
                below = path if root == "/" else path[len(root) :]
                found.setdefault(name, Hierarchy(folder, folder + below.rstrip("/")))
    return found


def places(hierarchy: Hierarchy) -> Iterator[tuple[str, str | None]]:
    """Version 2 groups from our own upwards, each with the reason why it cannot have ours below it, or None.

    A group with processes of its own hands no controllers on, the root excepted; so ours is a sibling of our own
    group, or further up.
    """
    folder = hierarchy.own
    while True:
        try:
            missing = NEEDED - set(_read(f"{folder}/cgroup.subtree_control").split())
        except OSError as error:
            yield folder, str(error)
            return
        lacks = f"{folder} does not hand {' and '.join(sorted(missing))} to its children" if missing else None
        yield folder, lacks
        limit = f"{folder}/memory.max"
        if folder == hierarchy.mount:
            return
        if os.path.exists(limit) and _read(limit).strip() != "max":
            yield os.path.dirname(folder), f"a group outside {folder} would lift its memory limit"
            return
        folder = os.path.dirname(folder)


def _make(version: int, controllers: list[str], place: str, own: str) -> Groups:
    """Makes our group below `place` and tries it out. Leaves nothing behind when it raises OSError."""
    _remove_leftovers(place)
    folder = f"{place}/rl_posttrain-{os.getpid()}-{_namespace()}-{next(_numbers)}"
    groups = Groups(version, dict.fromkeys(controllers, folder), [own])
    os.mkdir(folder)
    try:
        if version == 2:
            _write(f"{folder}/cgroup.subtree_control", "+memory +pids")
        group = groups.slot("probe")
        try:
            group.limit(64 << 20, 64)
            files = [*group.enter, *groups.leave]
            probe = subprocess.run(["/bin/sh", "-c", PROBE, "sh", *files], capture_output=True, text=True)
            if probe.returncode:
                raise OSError(f"no process can move to {group.enter[0]} and back: {probe.stderr.strip()}")
        finally:
            group.close()
    except OSError:
        groups.close()
        raise
    return groups


def _remove_leftovers(place: str) -> None:
    for folder in _subfolders(place):
        name = NAME.fullmatch(os.path.basename(folder))
        if name is None or int(name[2]) != _namespace() or os.path.exists(f"/proc/{name[1]}"):
            continue
        for path in (*_subfolders(folder), folder):
            try:
                os.rmdir(path)
            except OSError:  # processes live in it, or another trainer was faster, or it is another user's
                continue


def _subfolders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _remove(folder: str) -> None:
    """Waits for the end of what is inside, for a killed process takes a while."""
    deadline = time.monotonic() + CLOSE_SECONDS
    while True:
        try:
            os.rmdir(folder)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{folder} cannot be removed ({error.strerror}): processes "
                    f"{_read(f'{folder}/cgroup.procs').split()} are still in it; end them first"
                ) from error
            time.sleep(0.005)


def _entrance(version: int) -> str:
    # `tasks` moves the one thread that writes, for which the kernel need not stop all forks of the machine.
    return "cgroup.procs" if version == 2 else "tasks"


def _namespace() -> int:
    """Our pid namespace: of another's trainers we cannot know whether they live."""
    return os.stat("/proc/self/ns/pid").st_ino


def _open_peak(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # version 2 before Linux 6.12: it cannot be written
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _field(path: str, name: str) -> int:
    for line in _read(path).splitlines():
        key, value = line.split()
        if key == name:
            return int(value)
    raise OSError(f"{path} has no {name}: this kernel is too old (Linux 4.13 has it)")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise type(error)(error.errno, f"{error.strerror} ({text!r})", path) from error
    finally:
        os.close(descriptor)
