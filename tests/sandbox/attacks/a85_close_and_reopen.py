# Closes its output and opens others in its place; a child of the right kind would inherit them.
import os

n = input()
os.closerange(0, 64)
for _ in range(3):
    os.open("/dev/full", os.O_RDWR)
os.write(1, b"%d\n" % sum(int(c) ** 2 for c in n))
