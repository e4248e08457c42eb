# Children that are stopped, deaf to signals, in sessions and groups of their own, with their parents gone.
import os
import signal
import time


def orphan():
    os.setsid()
    if os.fork() == 0:
        os.setpgid(0, 0)
        for number in range(1, 65):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGSTOP)


def solve(n):
    for _ in range(3):
        if os.fork() == 0:
            try:
                orphan()
            finally:
                os._exit(0)
    time.sleep(0.2)
    return -1
