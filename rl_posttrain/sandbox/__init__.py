"""What running a completion shows: candidate code in bubblewrap, verdicts decided outside.

    with Pool(PoolConfig(slots=2)) as pool:
        verdict = judge(pool, code, FunctionTests("add", (Call((1, 2), 3),)))

The sandbox returns answers, never verdicts. Expected values and their comparison stay in `judge`, on
this side; the candidate gets one question at a time and sends plain data back, so nothing inside is
worth forging, finding or patching.

    judge.py       verdicts: function-call and stdin/stdout tests
    compare.py     is an answer the expected one? Assumes that the answer is hostile
    codec.py       plain values as bytes, the only thing that crosses
    pool.py        slots, lent one run at a time, recycled, retried
    slot.py        one container and the pipes of the run in it
    launcher.py    the small process that starts containers, so that a large trainer never forks
    forkserver.py  inside a container: one run at a time, each in fresh namespaces
    harness.py     inside a run: loads the candidate and answers questions
    bubblewrap.py  command lines, and what to do where bubblewrap does not work
    seccomp.py     the system calls that a run may not make
    limits.py      what a run may use

Standard library and pyseccomp only.
"""
