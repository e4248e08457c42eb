"""What running a completion shows: candidate code in bubblewrap, verdicts decided outside. See docs/sandbox.md.

    with Pool(PoolConfig(slots=2)) as pool:
        verdict = judge(pool, code, FunctionTests("add", (Call((1, 2), 3),)))

The sandbox returns answers, never verdicts. Expected values and their comparison stay in `judge`, on
this side; the candidate gets one question at a time and sends plain data back, so nothing inside is
worth forging, finding or patching.

Verdicts, in the trainer:

    judge.py       judge, submit, judge_many
    kinds.py       kinds of test
    calls.py       function calls                        compare.py   is an answer the expected one?
    programs.py    stdin and stdout, any language        artifacts.py what compilers made, kept
    referees.py    assertions, pytest and checkers in a second sandbox, which meets plain values only
    whitebox.py    suites in the candidate's own process, with a twin that right programs fail
    answers.py     what they share
    languages.py   one entry per language
    selftest.py    is every protection there?

The engine, in the trainer:

    pool.py        places, containers, the queue          statistics.py what they did
    slot.py        one container                          job.py       what to run in it
    session.py     the pipes and the clock of one run     limits.py    what it may use
    launch.py      the trainer's end of the launcher
    bubblewrap.py  command lines, and what to do where bubblewrap does not work
    seccomp.py     the system calls that a run may not make
    cgroups.py     control groups, where they are delegated
    processes.py   what the host's /proc says of a run

Scripts that run elsewhere:

    launcher.py    the small process that starts containers, so that a large trainer never forks
    forkserver.py  inside a container: one run at a time, each in fresh namespaces
    harness.py     inside a run: loads the candidate and answers questions
    objects.py     inside a run: the candidate's objects for a referee
    referee.py, proxies.py  inside the second sandbox: trusted tests and their view of the candidate
    codec.py       plain values as bytes, the only thing that crosses; on both sides

Standard library and pyseccomp only (and pytest, for tests that are pytest files).
"""
