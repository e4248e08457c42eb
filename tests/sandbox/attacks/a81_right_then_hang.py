# The right answer in time, then a wait until the end is forced.
import time

n = input()
print(sum(int(c) ** 2 for c in n), flush=True)
while True:
    time.sleep(60)
