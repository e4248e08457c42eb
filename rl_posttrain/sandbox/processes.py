"""What the host's /proc says about a slot's processes, for limits that the kernel does not hold by itself.

A process that ends while it is looked at is normal: it counts as nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

PROC = "/proc"
ENDED = (FileNotFoundError, ProcessLookupError)  # what reading about a process that has ended raises


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, which is left out; parents before their children, zombies included.

    A process that starts or ends meanwhile may be missing, and so may a sibling of one that ends: look again
    rather than rely on one answer.
    """
    children = _children if os.path.exists(f"{PROC}/thread-self/children") else _scan()
    found = [pid]
    for parent in found:  # grows while it is walked
        found += [child for child in children(parent) if child not in found]
    return found[1:]


def _children(pid: int) -> list[int]:
    found = []
    try:
        for thread in os.listdir(f"{PROC}/{pid}/task"):  # a child belongs to the thread that made it
            found += _read(f"{pid}/task/{thread}/children").split()
    except ENDED:
        pass
    return [int(child) for child in found]


def _scan():
    """The same from the parents of all processes, for kernels without CONFIG_PROC_CHILDREN."""
    table: dict[int, list[int]] = {}
    for name in os.listdir(PROC):
        if name.isdecimal():
            try:
                # After the program's name, in which anything may stand: state, parent, ...
                parent = int(_read(f"{name}/stat").rpartition(")")[2].split()[1])
            except ENDED:
                continue
            table.setdefault(parent, []).append(int(name))
    return lambda pid: table.get(pid, [])


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes that files on disk do not back: anonymous and shared.

    An upper bound of what is mapped, since a page that several of them share counts for each. Files in a tmpfs
    that nobody maps, and the kernel's own memory, are not in it.
    """
    total = 0
    for pid in pids:
        try:
            lines = _read(f"{pid}/status").splitlines()
        except ENDED:
            continue
        # "RssAnon:      5124 kB"; a zombie has no such lines
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return total


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of these processes and of children that they have waited for, in steps of a clock tick."""
    total = 0
    for pid in pids:
        try:
            fields = _read(f"{pid}/stat").rpartition(")")[2].split()
        except ENDED:
            continue
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def runnable(pids: Iterable[int]) -> bool:
    """Whether a thread of these processes runs, or waits for nothing but a processor."""
    for pid in pids:
        try:
            threads = os.listdir(f"{PROC}/{pid}/task")
            if any(_read(f"{pid}/task/{thread}/stat").rpartition(")")[2].split()[0] == "R" for thread in threads):
                return True
        except ENDED:
            continue
    return False


def waited_seconds(pids: Iterable[int]) -> float:
    """The longest time that the main thread of one of these processes was ready to run and had no processor.

    Over the process's whole life, waits that are over only. 0.0 where the kernel does not count it. A program
    can make its own processes wait for each other, at the price of CPU time, and can wait more by lowering its
    priority: whoever extends a wall limit by this needs a ceiling.
    """
    longest = 0
    for pid in pids:
        try:
            longest = max(longest, int(_read(f"{pid}/schedstat").split()[1]))  # nanoseconds
        except ENDED:
            continue
    return longest / 1e9


def available() -> str | None:
    """None when all of this works here; else what is missing and what follows from it."""
    missing = []
    try:
        if "RssAnon:" not in _read("self/status"):
            missing.append("no RssAnon in /proc/<pid>/status: memory of programs with many processes is not watched")
    except OSError as error:
        return f"{error}: nothing is known about processes; mount a proc file system at {PROC}"
    if not os.path.exists(f"{PROC}/thread-self/children"):
        missing.append("no /proc/<pid>/task/<tid>/children (CONFIG_PROC_CHILDREN): finding processes takes longer")
    try:
        counted = _read("self/schedstat").split()[0] != "0"  # the time on a processor; all zero where switched off
    except OSError:
        counted = False
    if not counted:
        missing.append("no waiting times in /proc/<pid>/schedstat (CONFIG_SCHED_INFO): load counts against wall limits")
    return "; ".join(missing) or None


def _read(name: str) -> str:
    descriptor = os.open(f"{PROC}/{name}", os.O_RDONLY)
    data = b""
    try:
        while part := os.read(descriptor, 1 << 16):  # the kernel gives a page at most
            data += part
        return data.decode("utf-8", "replace")
    finally:
        os.close(descriptor)
