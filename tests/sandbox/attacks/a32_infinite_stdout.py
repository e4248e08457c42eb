def solve(n):
    while True:
        print("x" * 1000)
