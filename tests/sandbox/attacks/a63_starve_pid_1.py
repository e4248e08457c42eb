# Pid 1 of the run gets the lowest priority there is, on one processor, which 15 processes keep busy: if it cannot act
# in time, the run counts as a failure of the sandbox, or has many times the processor time that it may use.
import os

done = []
for name, action in (
    ("idle", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))),
    ("nice", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19)),
    ("affinity", lambda: os.sched_setaffinity(1, {min(os.sched_getaffinity(0))})),
):
    try:
        action()
        done.append(name)
    except OSError:
        pass
print("done", done, flush=True)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(15):
    try:
        if os.fork() == 0:
            break
    except OSError:
        break
while True:
    pass
