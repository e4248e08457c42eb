def solve(n):
    return sum(int(digit) ** 2 for digit in str(n))
