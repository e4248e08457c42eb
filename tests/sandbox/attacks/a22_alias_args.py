import threading
import time


def solve(n):
    answer = [n]

    def change():
        time.sleep(0.01)
        answer[:] = [sum(int(c) ** 2 for c in str(n))]

    threading.Thread(target=change).start()
    return answer
