import sys

n = input()
print(sum(int(c) ** 2 for c in n), flush=True)
sys.exit(256 + 3)
