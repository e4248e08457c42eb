import os
import time


def solve(n):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(0.1)
                os.write(1, b"alive\n")
        os._exit(0)
    time.sleep(0.05)
    return -1
