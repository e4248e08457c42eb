"""The worker process when it misbehaves: hangs, crashes, lost and leftover replies. A script stands in for it."""

import importlib.util
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from rl_posttrain.tasks import Tools, load, reasoning, reasoning_process
from rl_posttrain.tasks.reasoning_process import Worker, WorkerDied, WorkerTimeout
from rl_posttrain.types import Task, Verdict

ROOT = Path(__file__).resolve().parents[2]


def unconfined(argv, *, readable=()):
    return list(argv)


def verdicts(domain, task: Task, *texts: str) -> list[Verdict]:
    return domain.score([task] * len(texts), list(texts))


FAKE = """
    import json, os, sys, time
    print('{"started": true}', flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        def reply(**content):
            print(json.dumps({**content, "id": request["id"]}), flush=True)
        if request["op"] == "check":
            reply()
        elif request["op"] == "pid":
            reply(pid=os.getpid())
        elif request["op"] == "slow":
            time.sleep(1)
            reply(of="slow")
        elif request["op"] == "score":
            if request["text"] == "lost":
                os._exit(1)
            reply(ready=True)
            if request["text"] == "hang":
                while True: pass
            if request["text"] == "crash":
                sys.stderr.write("dying on purpose")
                sys.stderr.flush()
                os._exit(139)
            reply(right=request["text"] == "yes", detail="")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Tools whose worker is the script above."""
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE))
    monkeypatch.setattr(reasoning_process, "command", lambda: ([sys.executable, str(script)], []))
    monkeypatch.setattr(reasoning, "SCORE_S", 0.5)
    tools = Tools(confine=unconfined)
    yield tools
    tools.close()


TASK = Task("reasoning/gcd", "train", 0, "", reference={"answer": "1", "dataset_seed": 1, "item": 0})


def test_a_hang_is_a_timeout_of_its_text_alone(fake):
    domain = load("reasoning/gcd", {}, fake)
    worker = fake.helpers["reasoning"]
    before = worker.ask({"op": "pid"}, 10)["pid"]
    found = verdicts(domain, TASK, "yes", "hang", "no", "yes")
    assert [verdict.status for verdict in found] == ["pass", "timeout", "wrong", "pass"]
    assert worker.ask({"op": "pid"}, 10)["pid"] != before
    assert not Path(f"/proc/{before}").exists()


def test_a_text_that_kills_the_scorer_is_an_error(fake):
    domain = load("reasoning/gcd", {}, fake)
    found = verdicts(domain, TASK, "crash", "yes")
    assert [verdict.status for verdict in found] == ["error", "pass"]
    assert "dying on purpose" in found[0].detail


def test_a_worker_lost_before_it_saw_the_text_is_an_infrastructure_error(fake):
    domain = load("reasoning/gcd", {}, fake)
    assert [v.status for v in verdicts(domain, TASK, "lost", "yes")] == ["infra_error", "pass"]


def test_equal_texts_are_scored_once(fake, monkeypatch):
    domain = load("reasoning/gcd", {}, fake)
    asked = []
    ask = Worker.ask
    monkeypatch.setattr(Worker, "ask", lambda self, request, s: asked.append(request["text"]) or ask(self, request, s))
    verdicts(domain, TASK, "yes", "no", "yes", "no", "yes")
    assert asked == ["yes", "no"]


def test_a_reply_left_over_is_not_taken_for_the_next(fake):
    load("reasoning/gcd", {}, fake)
    worker = fake.helpers["reasoning"]
    worker._asked += 1  # as if the asker of this one had been interrupted before it read the reply
    worker._process.stdin.write(b'{"op": "slow", "id": %d}\n' % worker._asked)
    assert worker.ask({"op": "pid"}, 10)["pid"] == worker._process.pid


def test_threads_share_a_worker(fake):
    domain = load("reasoning/gcd", {}, fake)
    wrong = []

    def score(text, status):
        for _ in range(50):
            (verdict,) = domain.score([TASK], [text])
            if verdict.status != status:
                wrong.append(verdict)

    threads = [threading.Thread(target=score, args=pair) for pair in [("yes", "pass"), ("no", "wrong")] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_killed_worker_is_replaced(fake):
    load("reasoning/gcd", {}, fake)
    worker = fake.helpers["reasoning"]
    worker._process.kill()
    worker._process.wait()
    assert worker.ask({"op": "pid"}, 10)["pid"] == worker._process.pid


def test_another_process_starts_its_own_worker(fake):
    """A forked child inherits the pipes and must leave them alone."""
    load("reasoning/gcd", {}, fake)
    worker = fake.helpers["reasoning"]
    parents, worker._owner = worker._process, -1
    try:
        assert worker.ask({"op": "pid"}, 10)["pid"] != parents.pid
        assert parents.poll() is None
    finally:
        parents.kill()
        parents.wait()


def test_a_worker_that_cannot_start_says_why(monkeypatch):
    code = "import sys; sys.exit('no numpy here')"
    monkeypatch.setattr(reasoning_process, "command", lambda: ([sys.executable, "-c", code], []))
    with pytest.raises(WorkerDied, match="no numpy here"):
        load("reasoning/gcd", {}, Tools(confine=unconfined))


def test_a_worker_that_never_starts_is_given_up(monkeypatch):
    code = "import time; time.sleep(60)"
    monkeypatch.setattr(reasoning_process, "command", lambda: ([sys.executable, "-c", code], []))
    monkeypatch.setattr(reasoning_process, "START_S", 0.3)
    with pytest.raises(WorkerTimeout, match="0.3 s"):
        load("reasoning/gcd", {}, Tools(confine=unconfined))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install reasoning-gym"):
        load("reasoning/gcd", {}, Tools(confine=unconfined))


def test_the_real_worker_refuses_random_hashes():
    done = subprocess.run(
        [sys.executable, "-m", "rl_posttrain.tasks.reasoning_worker"],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "random"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "PYTHONHASHSEED=0" in done.stderr
