# A value as large as may be: a list of lists of strings that compare slowly.
def solve(n):
    return ["x" * 100] * 1_000_000
