# Claims to be out of memory, as if it were the machine's fault.
def solve(n):
    raise MemoryError("cannot allocate memory")
