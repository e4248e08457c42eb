"""Inside a slot's container: serves one run at a time, each in fresh namespaces. Never imported by the trainer.

Per run: a process with new pid, mount, IPC and host name namespaces; this pid 1 (trusted) mounts a fresh
/tmp, forks the candidate (pid 2), waits for it under a CPU limit, kills whatever else lives in the
namespace, and reports. The candidate has no capabilities, its resource limits and the system call filter.
Pid 1 is not the candidate because signals to oneself are ignored there. Standard library only, Python 3.9
or newer.

    first message: {"filters": {name: base64}, "paths": [...], "preload": [...]}; answer {"ready": version}
    message:       {"run", "mode": "calls"|"program"|"suite"|"referee"|"command", "filter", "limits": {...},
                   "channels": [name of each descriptor that comes with it], "argv", "environment", "proc"}
    message:       {"kill": run}
    answer:        {"run", "status", "cpu_s", "peak_memory_bytes", "left", "cpu_limit"} or {"run", "failed"}

Channels: stdin (else /dev/null), stdout, stderr, requests, replies; "file:NAME" becomes /tmp/NAME of the
run; "artifact:NAME" receives what the run leaves there.
"""

import base64
import ctypes
import functools
import gc
import json
import math
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time

import harness  # from the same folder

# Imported once, so that candidates find them loaded. All harmless without descriptors or capabilities.
PRELOADED = (
    "array bisect cmath collections copy dataclasses datetime decimal enum fractions functools heapq io "
    "itertools json math operator random re statistics string textwrap typing"
).split()

NEW_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000  # mount, host name, IPC, pid
CLONE_VM, CLONE_VFORK = 0x100, 0x4000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
LAST_CAPABILITY, KEPT_CAPABILITIES = 63, (21, 8)  # CAP_SYS_ADMIN and CAP_SETPCAP, in this user namespace alone
INODES = 2048
STACK_BYTES = 64 << 20
# Tasks that live in the slot's user namespace beside the candidate's: bubblewrap's pid 1, this process,
# the run's pid 1.
OTHER_TASKS = 3
SHORTEST_CHECK = 0.005  # seconds between looks at the candidate's CPU clock
ORPHANS_CHECK = 0.05  # seconds between looks for ended orphans, which count against the process limit
REQUESTS, REPLIES, CONTROL = 3, 4, 5  # of the candidate; the last only until it is confined

libc = ctypes.PyDLL(None, use_errno=True)


class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def check(result, what):
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result


class Spawner:
    """Runs a function as pid 1 of fresh namespaces and waits for its end."""

    def __init__(self):
        # Candidates are forked from a call on this stack and keep it. Its lowest page is a guard.
        self._stack = mmap.mmap(-1, STACK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._stack))
        check(libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), 0), "guard page")
        self._top = ctypes.c_void_p(start + STACK_BYTES - 64)
        self._type = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

    def run(self, function):
        """Calls `function()` in the new process. True when it ended by itself.

        The process borrows this one's memory, as after vfork, and this one waits: a copy of the page tables
        and the faults that follow it would cost more than everything else that pid 1 does. It has to return
        normally, or the interpreter's state here would be lost.
        """
        if sys.version_info >= (3, 14):  # its stack checks do not know of other stacks
            pid = self._fork(function)
        else:
            call = self._type(lambda _: function())
            flags = ctypes.c_int(NEW_NAMESPACES | CLONE_VM | CLONE_VFORK | signal.SIGCHLD)
            pid = check(libc.clone(call, self._top, flags, None), "clone")
        return os.waitpid(pid, 0)[1] == 0

    def _fork(self, function):
        ctypes.pythonapi.PyOS_BeforeFork()
        flags = ctypes.c_ulong(NEW_NAMESPACES | signal.SIGCHLD)
        pid = libc.syscall(SYS_CLONE[os.uname().machine], flags, None, None, None, None)
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            function()
            os._exit(0)
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        return check(pid, "clone")


def mount(source, target, kind, flags, options):
    check(libc.mount(source, target, kind, ctypes.c_ulong(flags), options), f"mount {target.decode()}")


def mount_fresh(file_bytes, proc):
    """A fresh /tmp, bounded in bytes and in inodes, that no other run ever sees. With `proc`, a /proc of the run's."""
    mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    options = f"size={file_bytes},nr_inodes={INODES},mode=700,uid={os.getuid()},gid={os.getgid()}"
    mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())
    if proc:
        mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, b"subset=pid")


def placed_bytes(channels):
    """What `place_files` takes of /tmp, in whole pages: the program itself does not count against the file limit."""
    sizes = [os.fstat(descriptor).st_size for name, descriptor in channels.items() if name.startswith("file:")]
    return sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)


def place_files(channels):
    for name, descriptor in channels.items():
        if name.startswith("file:"):
            target = os.open("/tmp/" + name[len("file:") :], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
            copy(descriptor, target, os.fstat(descriptor).st_size)
            os.close(target)


def copy(source, target, count):
    offset = 0
    while offset < count:
        offset += os.sendfile(target, source, offset, count - offset)


def collect_artifacts(channels, limit):
    """What the run left, if it is an ordinary file within the limit; an empty artifact otherwise."""
    for name, descriptor in channels.items():
        if not name.startswith("artifact:"):
            continue
        try:
            source = os.open("/tmp/" + name[len("artifact:") :], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # there is none, or a link in its place
            continue
        found = os.fstat(source)
        if found.st_mode & 0o170000 == 0o100000 and found.st_size <= limit:
            copy(source, descriptor, found.st_size)
        os.close(source)


def restrict(limits, instructions):
    """Resource limits, then no capabilities, then the filter. Nothing of it can be undone."""
    cpu = math.ceil(limits["cpu_seconds"]) + 1  # pid 1 watches the exact limit; this one holds for every process
    for what, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, limits["address_space"]),
        (resource.RLIMIT_DATA, limits["data_bytes"]),
        (resource.RLIMIT_STACK, min(STACK_BYTES, limits["memory_bytes"])),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + OTHER_TASKS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 128),
    ):
        resource.setrlimit(what, (value, value))
    for capability in KEPT_CAPABILITIES:
        check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "capability bounding set")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    program = Filter(len(instructions) // 8, ctypes.cast(instructions, ctypes.c_void_p).value)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def candidate(control, job, channels, instructions):
    """Pid 2 of the run, up to the point where the harness or the program takes over. Does not return."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir("/tmp")
        stdin = channels.get("stdin")
        if stdin is None:
            stdin = os.open("/dev/null", os.O_RDONLY)
        wanted = [stdin, channels["stdout"], channels["stderr"], channels.get("requests"), channels.get("replies")]
        # Through high numbers first: a low one may still be another channel's.
        wanted = [None if descriptor is None else os.dup2(descriptor, 100 + i) for i, descriptor in enumerate(wanted)]
        os.dup2(control.fileno(), CONTROL)
        for number, descriptor in enumerate(wanted):
            if descriptor is None:
                os.closerange(number, number + 1)
            else:
                os.dup2(descriptor, number, inheritable=True)
        os.closerange(CONTROL + 1, 1 << 20)
        if job["mode"] == "command" and not os.access(job["argv"][0], os.X_OK):
            raise FileNotFoundError(job["argv"][0])  # of ours: no fault of the candidate's
        restrict(job["limits"], instructions)
    except BaseException as error:
        failed = {"run": job["run"], "failed": f"set-up of the run: {error!r}"}
        socket.socket(fileno=CONTROL).send(json.dumps(failed).encode())
        os._exit(1)
    os.close(CONTROL)
    try:
        if job["mode"] == "command":
            execute(job["argv"], job["environment"])
        harness.MODES[job["mode"]]()
    finally:
        os._exit(1)  # the harness itself was broken by the candidate


def execute(argv, environment):
    try:
        os.execve(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def first_process(control, job, channels, instructions):
    """Pid 1 of the run: sets up, waits for the candidate, kills what is left, reports."""
    try:
        os.setsid()
        mount_fresh(job["limits"]["file_bytes"] + placed_bytes(channels), job["proc"])
        place_files(channels)
        pid = os.fork()
        if pid == 0:
            candidate(control, job, channels, instructions)
        answer = watch(control, job, pid)
        collect_artifacts(channels, job["limits"]["file_bytes"])
    except BaseException as error:
        kill_all()
        answer = {"failed": f"pid 1 of the run: {error!r}"}
    try:
        control.send(json.dumps({"run": job["run"], **answer}).encode())
    except OSError:  # the trainer is gone, and so will be this container
        pass
    return 0


def watch(control, job, pid):
    """Waits for the candidate `pid` and everything else in the namespace; returns what it used."""
    found = {"left": 0, "cpu_s": 0.0, "peak_memory_bytes": 0, "cpu_limit": False}
    cpu_seconds = job["limits"]["cpu_seconds"]
    clock = ~pid << 3 | 2  # CPUCLOCK_SCHED: the CPU time of that process, all its threads
    # With so many threads at most, the limit cannot be reached earlier than after this fraction of it.
    cores = min(os.cpu_count() or 1, job["limits"]["processes"])
    longest = ORPHANS_CHECK if job["filter"] == "multi" else math.inf
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(control.fileno(), select.POLLIN)
    pause = cpu_seconds / cores
    killed = False
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(min(pause, longest) * 1000 + 1)}
        if process in ready:
            break
        if control.fileno() in ready and not killed:
            message = control.recv(1 << 16)
            if not message or json.loads(message).get("kill") == job["run"]:
                kill_all()
                killed = True
                poll.unregister(control.fileno())  # nothing more can be asked of this run
        reap(found, pid)
        left = cpu_seconds - found["cpu_s"] - time.clock_gettime(clock)
        if left <= 0:
            found["cpu_limit"] = True
            kill_all()
        pause = max(left / cores, SHORTEST_CHECK)
    os.close(process)
    _, found["status"], usage = os.wait4(pid, 0)
    add(found, usage)
    found["cpu_limit"] |= found["cpu_s"] >= cpu_seconds
    kill_all()
    while True:
        try:
            _, _, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return found
        add(found, usage)
        found["left"] += 1


def reap(found, pid):
    """Collects orphans that have ended; the candidate itself stays, its pidfd tells of it."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == pid:
            return
        add(found, os.wait4(ended.si_pid, 0)[2])


def add(found, usage):
    found["cpu_s"] += usage.ru_utime + usage.ru_stime
    found["peak_memory_bytes"] = max(found["peak_memory_bytes"], usage.ru_maxrss << 10)


def kill_all():
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:  # nothing but pid 1 is left
        pass


def prepare(message):
    """Imports what runs shall find, gives up what they shall not have; the filters by name."""
    sys.path[1:1] = message["paths"]
    for name in (*PRELOADED, *message["preload"]):
        __import__(name)
    for capability in range(LAST_CAPABILITY + 1):
        if capability not in KEPT_CAPABILITIES:
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused for numbers that this kernel does not have
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # not to be traced by candidates
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    filters = {}
    for name, text in message["filters"].items():
        data = base64.b64decode(text)
        filters[name] = ctypes.create_string_buffer(data, len(data))
    return filters


def main():
    gc.disable()  # what is imported now stays
    control = socket.socket(fileno=int(sys.argv[1]))
    message = json.loads(control.recv(1 << 18))
    try:
        filters = prepare(message)
    except ImportError as error:
        control.send(json.dumps({"failed": f"preload: {error}"}).encode())
        return
    spawner = Spawner()
    gc.freeze()  # keeps the collector from touching, hence copying, pages that runs share
    gc.enable()
    control.send(json.dumps({"ready": list(sys.version_info[:3])}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 64)
        if not message:
            return
        job = json.loads(message)
        if "kill" in job:  # it crossed the end of its run
            continue
        channels = dict(zip(job["channels"], descriptors))
        instructions = filters[job["filter"]]
        try:
            ended = spawner.run(functools.partial(first_process, control, job, channels, instructions))
        except OSError as error:
            control.send(json.dumps({"run": job["run"], "failed": str(error)}).encode())
        else:
            if not ended:
                return  # pid 1 was killed: the interpreter's state is not to be trusted any more
        for descriptor in descriptors:
            os.close(descriptor)
