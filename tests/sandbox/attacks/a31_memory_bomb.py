def solve(n):
    blocks = []
    while True:
        blocks.append(bytearray(b"x" * (32 << 20)))
