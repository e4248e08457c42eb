print(sum(int(digit) ** 2 for digit in input()))
