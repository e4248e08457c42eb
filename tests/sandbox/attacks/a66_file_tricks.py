# Sparse files, hard links, named pipes, device nodes and sockets, inside /tmp and out of it.
import os
import socket
import stat


def attempts():
    yield "sparse file", lambda: os.truncate(os.open("/tmp/sparse", os.O_RDWR | os.O_CREAT), 1 << 40)
    yield "allocate", lambda: os.posix_fallocate(os.open("/tmp/full", os.O_RDWR | os.O_CREAT), 0, 1 << 30)
    yield "device", lambda: os.mknod("/tmp/memory", 0o600 | stat.S_IFCHR, os.makedev(1, 1))
    yield "socket", lambda: socket.socket(socket.AF_UNIX).bind("/tmp/socket")
    yield "setuid", lambda: os.chmod("/usr/bin/env", 0o4755)
    for source in ("/usr/bin/env", "/harness/harness.py", "/dev/null"):
        yield f"hard link to {source}", lambda source=source: os.link(source, f"/tmp/{os.path.basename(source)}")
        yield f"rename {source}", lambda source=source: os.rename(source, "/tmp/renamed")
    for folder in ("/harness", "/usr", "/usr/lib", "/dev", "/dev/shm", "/dev/pts", "/", "/proc", "/sys", "/etc"):
        yield f"folder in {folder}", lambda folder=folder: os.mkdir(f"{folder}/made")
        yield f"pipe in {folder}", lambda folder=folder: os.mkfifo(f"{folder}/pipe")
        yield f"file in {folder}", lambda folder=folder: os.open(f"{folder}/file", os.O_CREAT | os.O_WRONLY)
        yield f"link to {folder}", lambda folder=folder: through(folder)


def through(folder):
    link = "/tmp/to" + folder.replace("/", "-")
    os.symlink(folder, link)
    os.close(os.open(f"{link}/written", os.O_CREAT | os.O_WRONLY))


def solve(n):
    done = []
    for name, action in attempts():
        try:
            action()
            done.append(name)
        except OSError:
            pass
    print("done", done)
    return sum(int(c) ** 2 for c in str(n)) if done else -1
