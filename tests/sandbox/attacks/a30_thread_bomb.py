# With small stacks, so that threads run out before memory does.
import threading
import time

threading.stack_size(1 << 16)


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
