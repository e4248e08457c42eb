"""Inside a slot's container: serves one run at a time, each in fresh namespaces. A script, never imported.

Per run: clone with new pid, mount, IPC and host name namespaces; its pid 1 (trusted) mounts a fresh
/tmp, forks the candidate (pid 2), waits for it under a CPU limit, kills whatever else lives in the
namespace, and reports. The candidate has no capabilities, its resource limits and the system call
filter. Pid 1 is not the candidate because signals to oneself are ignored there. Standard library only,
Python 3.9 or newer.

    first message: {"filters": {profile: base64}}; answer {"ready": version}
    message:       {"run", "mode": "calls"|"program", "profile", "limits": {...}} with the descriptors
                   [stdin, stdout, stderr, requests, replies, status]
    message:       {"kill": run}
    answer:        {"run", "ended": true} or {"run", "failed": why}; the status pipe carries pid 1's report
"""

import base64
import ctypes
import gc
import json
import math
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time

import harness  # from the same folder

# Imported once, so that candidates find them loaded. All harmless without descriptors or capabilities.
PRELOADED = (
    "array bisect cmath collections copy dataclasses datetime decimal enum fractions functools heapq io "
    "itertools json math operator random re statistics string textwrap typing"
).split()

NEW_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000  # mount, host name, IPC, pid
CLONE = {"x86_64": 56, "aarch64": 220}
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 16384, 1 << 18
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
LAST_CAPABILITY = 63
INODES = 2048
STACK_BYTES = 64 << 20
# Tasks that live in the slot's user namespace beside the candidate's: bubblewrap's pid 1, this process,
# the run's pid 1.
OTHER_TASKS = 3
SHORTEST_CHECK = 0.005  # seconds between looks at the candidate's CPU clock

libc = ctypes.PyDLL(None, use_errno=True)


class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def check(result, what):
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result


def clone():
    """fork() into new namespaces; the pid of the child, 0 in the child."""
    ctypes.pythonapi.PyOS_BeforeFork()
    flags = ctypes.c_ulong(NEW_NAMESPACES | signal.SIGCHLD)
    pid = libc.syscall(CLONE[platform.machine()], flags, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return check(pid, "clone")


def mount_fresh(file_bytes):
    """A fresh /tmp, bounded in bytes and in inodes, that no other run ever sees."""
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "mount /")
    options = f"size={file_bytes},nr_inodes={INODES},mode=700,uid={os.getuid()},gid={os.getgid()}"
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV)
    check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, options.encode()), "mount /tmp")
    os.chdir("/tmp")


def restrict(limits, instructions):
    """Resource limits, then no capabilities, then the filter. Nothing of it can be undone."""
    cpu = math.ceil(limits["cpu_seconds"]) + 1  # pid 1 watches the exact limit; this one holds for every process
    for what, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
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
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused for numbers that this kernel does not have
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    program = Filter(len(instructions) // 8, ctypes.cast(instructions, ctypes.c_void_p).value)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def candidate(job, descriptors, instructions):
    """Pid 2 of the run, up to the point where the harness takes over. Does not return."""
    status = descriptors[5]
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM})
        high = [os.dup2(descriptor, 40 + index) for index, descriptor in enumerate(descriptors)]
        for index in range(5):
            os.dup2(high[index], index, inheritable=True)
        os.dup2(high[5], 5)
        status = 5
        os.closerange(6, 1 << 20)
        restrict(job["limits"], instructions)
    except BaseException as error:
        report(status, {"failed": f"set-up of the run: {error!r}"})
        os._exit(1)
    os.close(status)
    try:
        if job["mode"] == "program":
            harness.run_program()
        harness.answer_calls()
    finally:
        os._exit(1)  # the harness itself was broken by the candidate


def report(status, fields):
    os.write(status, json.dumps(fields).encode() + b"\n")


def first_process(job, descriptors, instructions):
    """Pid 1 of the run: sets up, waits for the candidate, kills what is left, reports. Does not return."""
    status = descriptors[5]
    try:
        os.setsid()
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # not to be traced by the candidate
        mount_fresh(job["limits"]["file_bytes"])
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            candidate(job, descriptors, instructions)
        for descriptor in descriptors[:5]:
            os.close(descriptor)
        report(status, watch(pid, job["limits"]["cpu_seconds"], job["limits"]["processes"]))
    except BaseException as error:
        report(status, {"failed": f"pid 1 of the run: {error!r}"})
    finally:
        os._exit(0)


def watch(pid, cpu_seconds, tasks):
    """Waits for the candidate `pid` and everything else in the namespace; returns what it used."""
    found = {"left": 0, "cpu_s": 0.0, "peak_memory_bytes": 0, "cpu_limit": False}
    clock = ~pid << 3 | 2  # CPUCLOCK_SCHED: the CPU time of that process, all its threads
    # With so many threads at most, the limit cannot be reached earlier than after this fraction of it.
    cores = min(os.cpu_count() or 1, tasks)
    pause = cpu_seconds / cores
    while True:
        taken = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, pause)
        while True:
            try:
                ended, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if ended == 0:
                break
            found["cpu_s"] += usage.ru_utime + usage.ru_stime
            found["peak_memory_bytes"] = max(found["peak_memory_bytes"], usage.ru_maxrss << 10)
            if ended == pid:
                found["status"] = status
                found["cpu_limit"] |= found["cpu_s"] >= cpu_seconds
                kill_all()
                pause = 1.0
            elif "status" in found:
                found["left"] += 1
        if taken is not None and taken.si_signo == signal.SIGTERM:
            kill_all()
        if "status" not in found:
            left = cpu_seconds - found["cpu_s"] - time.clock_gettime(clock)
            if left <= 0:
                found["cpu_limit"] = True
                kill_all()
            pause = max(left / cores, SHORTEST_CHECK)


def kill_all():
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:  # nothing but pid 1 is left
        pass


def serve_run(control, job, descriptors, instructions):
    """One run from its start to its end; the answer to the trainer, or None when the trainer is gone."""
    run = job["run"]
    try:
        pid = clone()
    except OSError as error:
        return {"run": run, "failed": f"clone: {error}"}
    if pid == 0:
        control.close()
        first_process(job, descriptors, instructions)
    for descriptor in descriptors:
        os.close(descriptor)
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(control.fileno(), select.POLLIN)
    while process not in {descriptor for descriptor, _ in poll.poll()}:
        message = control.recv(1 << 16)
        if not message:
            return None
        if json.loads(message).get("kill") == run:
            os.kill(pid, signal.SIGTERM)
            ended = select.poll()
            ended.register(process, select.POLLIN)
            if not ended.poll(200):
                os.kill(pid, signal.SIGKILL)
    os.close(process)
    os.waitpid(pid, 0)
    return {"run": run, "ended": True}


def main():
    control = socket.socket(fileno=int(sys.argv[1]))
    message = json.loads(control.recv(1 << 16))
    filters = {}
    for profile, text in message["filters"].items():
        data = base64.b64decode(text)
        filters[profile] = ctypes.create_string_buffer(data, len(data))
    for name in PRELOADED:
        __import__(name)
    struct.calcsize(">I")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # keeps the collector from touching, hence copying, pages that runs share
    control.send(json.dumps({"ready": list(sys.version_info[:3])}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 8)
        if not message:
            return
        job = json.loads(message)
        if "kill" in job:  # it crossed the end of its run
            continue
        answer = serve_run(control, job, descriptors, filters[job["profile"]])
        if answer is None:
            return
        control.send(json.dumps(answer).encode())


main()
