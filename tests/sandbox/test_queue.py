"""Submissions: their order, back-pressure, cancellation and statistics; that none is lost and none runs twice."""

import threading
import time
from concurrent.futures import CancelledError, Future, as_completed

import pytest

from rl_posttrain.sandbox import judge as judge_module
from rl_posttrain.sandbox import processes
from rl_posttrain.sandbox.job import InfrastructureError
from rl_posttrain.sandbox.judge import judge, judge_many, submit
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.session import PERMANENT, Session
from rl_posttrain.sandbox.slot import Slot

GOOD = "def solve(n): return n + 1"
TESTS = FunctionTests("solve", (Call((1,), 2),))
HANGING = "import time\ndef solve(n): time.sleep(600)"
PATIENT = Limits(cpu_seconds=2.0, wall_seconds=600.0)  # so that only a cancel ends what hangs
SECONDS = 60.0  # within which everything else here ends, on the slowest machine


@pytest.fixture
def pool():
    with Pool(PoolConfig(slots=1)) as pool:
        yield pool


class Gate:
    """Occupies a worker until it is opened."""

    def __init__(self, pool):
        self._inside, self._opened = threading.Event(), threading.Event()
        self.future = pool.submit(self._stay)
        assert self._inside.wait(SECONDS)

    def _stay(self):
        self._inside.set()
        assert self._opened.wait(SECONDS)

    def open(self):
        self._opened.set()


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(future):
    """Whether the candidate's own process is there."""
    slots = list(future.slots)
    return bool(slots) and len(processes.descendants(slots[0].pid)) > PERMANENT


def queued(pool):
    return pool.statistics()["pending"]


# ---- order ----


def test_lower_priorities_run_first_then_in_order_of_submission(pool):
    gate, order = Gate(pool), []
    for name, priority in (("a", 3), ("b", 1), ("c", 2), ("d", 1), ("e", -1), ("f", 1)):
        pool.submit(lambda name=name: order.append(name), priority=priority)
    gate.open()
    pool.submit(lambda: None, priority=9).result(SECONDS)
    assert "".join(order) == "ebdfca"


def test_judgements_have_priorities_too(pool):
    gate, order = Gate(pool), []
    for priority in (2, 0, 1):
        future = submit(pool, GOOD, TESTS, priority=priority)
        future.add_done_callback(lambda future, priority=priority: order.append((priority, future.result().passed)))
    gate.open()
    pool.submit(lambda: None, priority=9).result(SECONDS)
    assert order == [(0, True), (1, True), (2, True)]


def test_a_hanging_program_delays_nobody_and_results_come_as_completed():
    with Pool(PoolConfig(slots=2)) as pool:
        hanging = submit(pool, HANGING, TESTS, limits=PATIENT)
        quick = [submit(pool, GOOD, TESTS) for _ in range(6)]
        finished = as_completed([hanging, *quick], timeout=SECONDS)
        assert all(next(finished).result().passed for _ in quick)
        assert not hanging.done()
        assert hanging.cancel()
        assert next(finished) is hanging


# ---- back-pressure ----


def start_submitter(pool):
    """A thread that submits one more; its list receives the future, or the error."""
    found = []

    def work():
        try:
            found.append(pool.submit(lambda: "late"))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, found


def test_submit_waits_while_too_many_wait():
    with Pool(PoolConfig(slots=1, pending=2)) as pool:
        gate = Gate(pool)
        waiting = [pool.submit(lambda n=n: n) for n in range(2)]
        thread, found = start_submitter(pool)
        thread.join(0.3)
        assert thread.is_alive() and found == [] and queued(pool) == 2
        gate.open()
        thread.join(SECONDS)
        assert [future.result(SECONDS) for future in (*waiting, *found)] == [0, 1, "late"]


def test_a_cancelled_submission_makes_room():
    with Pool(PoolConfig(slots=1, pending=2)) as pool:
        gate = Gate(pool)
        waiting = [pool.submit(lambda n=n: n) for n in range(2)]
        thread, found = start_submitter(pool)
        assert waiting[0].cancel()
        thread.join(SECONDS / 4)
        alive, count = thread.is_alive(), queued(pool)
        gate.open()
        thread.join(SECONDS)
        assert not alive and count == 2
        assert [future.result(SECONDS) for future in (waiting[1], *found)] == [1, "late"]


def test_close_frees_a_submitter_and_drops_what_waits():
    pool = Pool(PoolConfig(slots=1, pending=1))
    gate = Gate(pool)
    waiting = pool.submit(lambda: "never")
    thread, found = start_submitter(pool)
    thread.join(0.1)
    closer = threading.Thread(target=pool.close)
    closer.start()
    thread.join(SECONDS)
    assert isinstance(found[0], RuntimeError) and "closed" in str(found[0])
    assert waiting.cancelled() and closer.is_alive()  # it waits for what runs
    gate.open()
    closer.join(SECONDS)
    assert not closer.is_alive() and gate.future.result() is None
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(lambda: None)


def test_close_lets_a_run_in_progress_finish_and_drops_the_others():
    with Pool(PoolConfig(slots=1)) as pool:
        code = "import time\ndef solve(n):\n    time.sleep(0.5)\n    return n + 1"
        futures = [submit(pool, code, TESTS) for _ in range(4)]
        wait_for(lambda: running(futures[0]))
    assert futures[0].result(0).passed
    assert all(future.cancelled() for future in futures[1:])


def test_a_forked_copy_refuses_submissions():
    with Pool(PoolConfig(slots=1)) as pool:
        assert submit(pool, GOOD, TESTS).result(SECONDS).passed
        pool._owner += 1  # what a fork looks like from inside: none of the threads is there
        with pytest.raises(RuntimeError, match="after fork"):
            submit(pool, GOOD, TESTS)
        pool._owner -= 1


# ---- cancellation ----


def test_what_is_cancelled_before_its_turn_never_runs(pool):
    gate, ran = Gate(pool), []
    future = pool.submit(lambda: ran.append(1))
    assert future.cancel() and future.cancelled()
    gate.open()
    pool.submit(lambda: None).result(SECONDS)
    assert ran == []
    with pytest.raises(CancelledError):
        future.result(0)


@pytest.mark.parametrize("tests", [TESTS, StdioTests((("", "1"), ("", "2")))], ids=["function", "program"])
def test_a_run_that_is_cancelled_ends_and_its_slot_serves_the_next(pool, tests):
    assert judge(pool, GOOD, TESTS).passed
    future = submit(pool, f"{HANGING}\nif __name__ == '__main__': solve(1)", tests, limits=PATIENT)
    wait_for(lambda: running(future))
    slot = next(iter(future.slots))
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(SECONDS)
    assert future.done() and not future.cancel()
    seen = submit(pool, GOOD, TESTS)
    assert seen.result(SECONDS).passed
    assert pool._places[-1]._slots["candidate"] is slot  # no container was lost
    wait_for(lambda: len(processes.descendants(slot.pid)) < PERMANENT)  # and nothing of the run is left in it


@pytest.mark.parametrize("moment", ["before the job is sent", "after the job was sent"])
def test_a_cancel_is_not_lost_whenever_it_comes(pool, monkeypatch, moment):
    assert judge(pool, GOOD, TESTS).passed
    original, made = Session.__init__, threading.Event()

    def start(self, *arguments):
        assert made.wait(SECONDS)
        if moment == "before the job is sent":
            future.cancel()
        original(self, *arguments)
        if moment == "after the job was sent":
            future.cancel()

    monkeypatch.setattr(Session, "__init__", start)
    future = submit(pool, HANGING, TESTS, limits=Limits(cpu_seconds=2.0, wall_seconds=40.0))
    made.set()
    with pytest.raises(CancelledError):
        future.result(20.0)
    monkeypatch.undo()
    assert judge(pool, GOOD, TESTS).passed


def test_a_cancel_between_two_runs_of_a_judgement_ends_it(pool, monkeypatch):
    original, runs = Slot.run, []

    def run(self, job, driver):
        result = original(self, job, driver)
        runs.append(self.pid)
        future.cancel()
        return result

    gate = Gate(pool)
    future = submit(pool, "print(1)", StdioTests((("", "1"),) * 5))
    monkeypatch.setattr(Slot, "run", run)
    gate.open()
    with pytest.raises(CancelledError):
        future.result(SECONDS)
    assert len(runs) == 1


def test_a_finished_submission_cannot_be_cancelled(pool):
    future = submit(pool, GOOD, TESTS)
    assert future.result(SECONDS).passed
    assert not future.cancel() and future.result().passed


# ---- errors ----


def test_what_a_judgement_raises_reaches_its_future_and_the_worker_goes_on(pool):
    with pytest.raises(ValueError, match="klingon"):
        submit(pool, GOOD, TESTS, language="klingon").result(SECONDS)

    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        pool.submit(leave).result(SECONDS)
    assert submit(pool, GOOD, TESTS).result(SECONDS).passed


def test_judge_many_raises_the_first_error_and_drops_the_rest(pool, monkeypatch):
    original, judged = judge, []

    def raising(pool, code, tests, **options):
        judged.append(code)
        if code == "bad":
            raise OSError("injected")
        return original(pool, code, tests, **options)

    monkeypatch.setattr(judge_module, "judge", raising)
    items = [(GOOD, TESTS), ("bad", TESTS), *[(GOOD, TESTS)] * 20]
    with pytest.raises(OSError, match="injected"):
        judge_many(pool, items)
    monkeypatch.undo()
    assert judge(pool, GOOD, TESTS).passed
    assert 2 <= len(judged) < len(items)


# ---- statistics ----


def test_statistics_count_and_start_over(pool, monkeypatch):
    assert all(judge(pool, GOOD, TESTS).passed for _ in range(2))
    assert submit(pool, "print(1)", StdioTests((("", "1"), ("", "1")))).result(SECONDS).passed
    found = pool.statistics()
    assert (found["runs"], found["retries"], found["infra_errors"], found["containers"]) == (4, 0, 0, 1)
    assert 0 < found["run_p50_s"] <= found["run_p99_s"]
    assert 0 < found["queue_p50_s"] <= found["queue_p99_s"]
    assert found["runs_per_second"] > 0 and found["pending"] == 0
    found = pool.statistics()
    assert found.pop("runs_per_second") == 0.0 and not any(found.values())

    original, faults = Slot.run, 1

    def run(self, job, driver):
        nonlocal faults
        if faults:
            faults -= 1
            raise InfrastructureError("injected")
        return original(self, job, driver)

    monkeypatch.setattr(Slot, "run", run)
    assert judge(pool, GOOD, TESTS).passed
    found = pool.statistics()
    assert (found["retries"], found["infra_errors"], found["containers"]) == (1, 0, 1)
    faults = 2
    assert judge(pool, GOOD, TESTS).status == "infra_error"
    found = pool.statistics()
    assert (found["retries"], found["infra_errors"], found["containers"]) == (1, 1, 1)


def test_statistics_tell_how_many_wait(pool):
    gate = Gate(pool)
    futures = [pool.submit(lambda: None) for _ in range(3)]
    assert queued(pool) == 3
    gate.open()
    for future in futures:
        future.result(SECONDS)
    assert queued(pool) == 0


# ---- many at once ----


def test_two_hundred_submissions_from_eight_threads_are_all_judged_once():
    """Every program has an answer of its own, so that a verdict given to the wrong future shows."""
    futures: dict[int, Future] = {}

    def work(pool, first):
        for number in range(first, 200, 8):
            tests = FunctionTests("solve", (Call((2,), 2 * number if number % 5 else -1),))
            futures[number] = submit(pool, f"def solve(n): return n * {number}", tests)

    with Pool(PoolConfig(slots=2, pending=20)) as pool:
        threads = [threading.Thread(target=work, args=(pool, first)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = {number: future.result(SECONDS).status for number, future in futures.items()}
        found = pool.statistics()
    assert statuses == {number: "pass" if number % 5 else "wrong" for number in range(200)}
    assert (found["runs"], found["retries"], found["infra_errors"]) == (200, 0, 0)


def test_threads_that_judge_beside_others_that_submit():
    verdicts = []
    with Pool(PoolConfig(slots=2)) as pool:
        threads = [
            threading.Thread(target=lambda: verdicts.extend(judge(pool, GOOD, TESTS) for _ in range(5)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        futures = [submit(pool, GOOD, TESTS) for _ in range(20)]
        for thread in threads:
            thread.join(SECONDS)
        verdicts += [future.result(SECONDS) for future in futures]
    assert len(verdicts) == 40 and all(verdict.passed for verdict in verdicts)


def test_safe_mode_gives_every_run_a_container_that_was_started_before(monkeypatch):
    original, used, ahead = Slot.run, [], []

    def run(self, job, driver):
        used.append(self.pid)
        return original(self, job, driver)

    monkeypatch.setattr(Slot, "run", run)
    with Pool(PoolConfig(slots=2, runs_per_slot=1)) as pool:
        for _ in range(5):
            ahead.append({spare.pid for spare in pool._spares})
            assert submit(pool, GOOD, TESTS).result(SECONDS).passed
        assert submit(pool, "print(1)", StdioTests((("", "1"),) * 3)).result(SECONDS).passed
        wait_for(lambda: len(pool._spares) == 2)
    assert len(used) == len(set(used)) == 8
    assert ahead[0] == set() and all(used[i] in ahead[i] for i in range(1, 5))
