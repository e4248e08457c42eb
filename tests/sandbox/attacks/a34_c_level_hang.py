# One long call in C, which holds the interpreter's lock: nothing inside can interrupt it.
def solve(n):
    return (9**9**7) % n
