import os
import sys
import threading

data = sys.stdin.buffer.read()
command, _, rest = data.partition(b"\n")


def deep(n):
    return 0 if n == 0 else 1 + deep(n - 1)


def endless(n):
    return 1 + endless(n + 1)


def opened(path):

    try:
        return os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError:
        return 0


match command.decode():
    case "":
        print("empty")
    case "length":
        print(len(rest))
    case "echo":
        sys.stdout.buffer.write(rest)
    case "fail":
        raise ValueError("boom 42")
    case "bytes":
        sys.stdout.buffer.write(b"\xff\xfe")
    case "threads":
        sums = []
        threads = [threading.Thread(target=lambda: sums.append(sum(range(100)))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(sum(sums))
    case "deep":
        sys.setrecursionlimit(10**6)
        print(deep(int(rest)))
    case "endless":
        print(endless(0))
    case "memory":
        print(len(bytearray(1 << 30)))
    case "files":
        print(sum(bool(opened(path)) for path in rest.decode().split()))
