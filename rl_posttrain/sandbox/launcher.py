"""The process that starts slots' containers, so that the trainer never forks. A script, never imported.

Forking costs in proportion to the parent's memory (0.1 ms for a small process, 270 ms at 4 GB), and
bubblewrap's --die-with-parent follows the thread that started it; this process is small and has one
thread. It is told what to start over a socket, drops root for an unprivileged user first, and collects
whatever ends. When the trainer ends in any way, it kills every container and ends itself. Standard
library only.

    message: {"argv": [...], "environment": {...}, "user": uid or null, "enter": [...], "leave": [...]}
             with the descriptors [stderr of the container, more that argv refers to as "{0}", "{1}", ...];
             the process lists of the container's control groups, and of ours, are in "enter" and "leave"
    answer:  {"pid": ...} or {"error": ...}
    message: {"kill": pid}; no answer
"""

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, MNT_DETACH = 0x20000, 2
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DESCRIPTORS = 16

libc = ctypes.CDLL(None, use_errno=True)


def move(process_lists):
    """Enters control groups, by their lists of processes."""
    for path in process_lists:
        with open(path, "w") as file:
            file.write("0")


def start(message, descriptors):
    """Starts one container; the answer to the trainer."""
    errors, *files = descriptors
    argv = [part.format(*files) if part.startswith("{") else part for part in message["argv"]]
    user = message["user"]
    drop = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    try:
        # This process itself goes in and, below, out again: so no child is ever outside.
        move(message["enter"])
        child = subprocess.Popen(
            argv,
            env=message["environment"],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=files,
            **drop,
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return None, {"error": f"{argv[0]}: {error}"}
    finally:
        move(message["leave"])
    # `reap` collects it. Otherwise Popen would when it is forgotten, behind our back, and a later kill
    # could hit whoever has the number by then.
    child.returncode = 0
    return child.pid, {"pid": child.pid}


def reap(alive):
    """Collects every ended descendant: what bubblewrap leaves behind comes to this process too."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid in alive:
            alive.discard(pid)
            kill_orphans(alive)


def kill_orphans(alive):
    """Kills what is left of containers that have ended: killed while it booted, one leaves its inner process behind."""
    try:
        with open("/proc/thread-self/children") as file:
            children = map(int, file.read().split())
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return
    for pid in children:
        if pid not in alive:
            os.kill(pid, signal.SIGKILL)  # ours and not yet reaped, so the number is still its own


def end(alive):
    """Kills all containers and waits until nothing of them is left."""
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while reap(alive) and time.monotonic() < deadline:
        kill_orphans(alive)
        time.sleep(0.005)


def mount(source, target, flags):
    if libc.mount(source, target, None, ctypes.c_ulong(flags), None) < 0:
        raise OSError(ctypes.get_errno(), f"mount {target}")


def show(binds, shown):
    """Mounts folders, read-only, where an unprivileged user can reach them; seen by this process's children alone.

    `shown` receives those that are mounted, also when a later step fails.
    """
    if libc.unshare(CLONE_NEWNS) < 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount(b"none", b"/", MS_REC | MS_PRIVATE)
    for source, target in binds:
        mount(source.encode(), target.encode(), MS_BIND)
        shown.append((source, target))
        mount(b"none", target.encode(), MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def hide(shown):
    """Undoes `show`, so that removing the folders around the mounts cannot reach what is mounted. Whether it worked."""
    return all(libc.umount2(target.encode(), MNT_DETACH) == 0 for _, target in shown)


def serve(control, trainer):
    alive = set()
    wake, woken = os.pipe()
    for end_of_pipe in (wake, woken):
        os.set_blocking(end_of_pipe, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    for descriptor in (control.fileno(), trainer, wake):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if wake in ready:
            os.read(wake, 4096)
            reap(alive)
        if trainer in ready:
            return end(alive)
        if control.fileno() not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 18, DESCRIPTORS)
        if not data:
            return end(alive)
        message = json.loads(data)
        if "kill" in message:
            if message["kill"] in alive:
                os.kill(message["kill"], signal.SIGKILL)
            continue
        pid, answer = start(message, descriptors)
        if pid is not None:
            alive.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps(answer).encode())


def main():
    control = socket.socket(fileno=int(sys.argv[1]))
    trainer_pid = int(sys.argv[2])
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    trainer = os.pidfd_open(trainer_pid)
    if os.getppid() != trainer_pid:  # it ended before the line above, and the number may be another's by now
        return
    folder, binds = sys.argv[3], json.loads(sys.argv[4])
    shown = []
    try:
        if binds:
            show(binds, shown)
    except OSError as error:  # not our machine's root after all: what needs them is refused by name when it is run
        print(f"the sandbox cannot show {', '.join(source for source, _ in binds)}: {error}", file=sys.stderr)
    try:
        serve(control, trainer)
    finally:
        # What containers show of it is in use until the last of them has ended, and that is now.
        if hide(shown):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
