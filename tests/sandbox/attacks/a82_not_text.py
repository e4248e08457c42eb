# Bytes that are not UTF-8, a zero byte, and digits of another script around the right answer.
import os

n = input()
right = sum(int(c) ** 2 for c in n)
os.write(1, (b"%d\xff\n", b"\x00%d\n", b"\xef\xbb\xbf%d\n", b"%d\x00\n")[len(n) % 4] % right)
