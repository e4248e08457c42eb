def solve(n):
    return 1 << 30_000_000
