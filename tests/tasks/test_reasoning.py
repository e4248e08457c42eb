"""reasoning-gym behind its worker: contained, repeatable, and strict about what is right."""

import importlib.util
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import pytest

from rl_posttrain.config import ConfigError
from rl_posttrain.sandbox.bubblewrap import confined_command
from rl_posttrain.tasks import PromptSpaceError, Tools, heldout, load, names, reasoning, reasoning_process
from rl_posttrain.tasks.reasoning_catalogue import BLOCKED, COMPARED_EXACTLY, USABLE
from rl_posttrain.tasks.reasoning_process import Worker, WorkerDied, WorkerTimeout
from rl_posttrain.types import Task, Verdict

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = {
    "reasoning/spell_backward": {"tag": "spell", "config": {"min_word_len": 4, "max_word_len": 8}},
    "reasoning/palindrome_generation": {"tag": "pal", "config": {"min_length": 5, "max_length": 7}},
    "reasoning/chain_sum": {
        "tag": "sum",
        "config": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3},
    },
    "reasoning/string_insertion": {"tag": "ins", "config": {"min_string_length": 6, "max_string_length": 9}},
}


def unconfined(argv, *, readable=()):
    return list(argv)


@pytest.fixture(scope="module")
def tools():
    tools = Tools(confine=confined_command)
    yield tools
    tools.close()


@pytest.fixture(scope="module")
def bare():
    """Without bubblewrap, so that a text that does get executed leaves its mark on this machine."""
    tools = Tools(confine=unconfined)
    yield tools
    tools.close()


def verdicts(domain, task: Task, *texts: str) -> list[Verdict]:
    return domain.score([task] * len(texts), list(texts))


def test_catalogue_is_the_installed_library(tools):
    found = Worker(confined_command)
    try:
        assert sorted([*USABLE, *BLOCKED]) == found.ask({"op": "names"}, 60)["names"]
    finally:
        found.close()
    assert COMPARED_EXACTLY <= set(USABLE)
    assert [name for name in names() if name.startswith("reasoning/")] == sorted(
        f"reasoning/{name}" for name in USABLE
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("complex_arithmetic", "'nan'"),
        ("game_of_life_halting", "any text"),
        ("puzzle24", "given numbers"),
        ("coin_flip", "'0' on 95%"),
        ("codeio", "differ between two runs"),
        ("composite", "mixture"),
        ("boxnet", "answer=None"),
        ("countdown", "executes the completion"),
        ("intermediate_integration", "executes the completion"),
    ],
)
def test_what_cannot_be_a_reward_is_refused_with_the_reason(name, reason):
    with pytest.raises(ConfigError, match=f"{name}.*{reason}"):
        load(f"reasoning/{name}", {}, Tools())


@pytest.mark.parametrize("name", QUICKSTART)
def test_demonstrations_pass(name, tools):
    domain = load(name, QUICKSTART[name], tools)
    tasks = domain.make(0, "train", range(60))
    texts = [f"  {task.demonstration}\n" for task in tasks]
    assert Counter(verdict.status for verdict in domain.score(tasks, texts)) == {"pass": 60}
    assert not any(verdict.passed for verdict in domain.score(tasks, [""] * 60))
    wordy = [f"The answer is {task.demonstration}" for task in tasks]  # partial credit in the library
    assert not any(verdict.passed for verdict in domain.score(tasks, wordy))


@pytest.mark.parametrize("name", QUICKSTART)
def test_no_constant_pays(name, tools):
    domain = load(name, QUICKSTART[name], tools)
    tasks = heldout(domain, 0, 256)
    likely = Counter(task.demonstration for task in tasks).most_common(4)
    for text in [text for text, _ in likely] + ["0", "1", "nan", "True", "[]", "a"]:
        passed = sum(verdict.passed for verdict in domain.score(tasks, [text] * 256))
        assert passed < 26, (text, passed)


def test_other_right_answers_pass(tools):
    domain = load("reasoning/palindrome_generation", QUICKSTART["reasoning/palindrome_generation"], tools)
    for task in domain.make(0, "train", range(20)):
        answer = task.demonstration
        half = len(answer) // 2
        other = answer[:half][::-1] + answer[half : len(answer) - half] + answer[-half:][::-1]
        assert (
            verdicts(domain, task, other, answer[1:])
            == [
                Verdict("pass", detail="score 1"),
                Verdict("wrong", detail="score 0.02"),
            ]
            or other == answer
        )


def test_tag_replaces_the_fixed_wording(tools):
    long = load("reasoning/spell_backward", {}, tools).make(0, "train", range(3))
    assert all("Spell this word backward" in task.prompt for task in long)
    for task in load("reasoning/spell_backward", {"tag": "sp"}, tools).make(0, "train", range(20)):
        assert task.prompt == f"sp {task.demonstration[::-1]}"


def test_config_reaches_the_generator(tools):
    options = {"tag": "sp", "config": {"min_word_len": 3, "max_word_len": 3}}
    tasks = load("reasoning/spell_backward", options, tools).make(0, "train", range(50))
    assert {len(task.demonstration) for task in tasks} == {3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"config": {"min_word_length": 3}},
            "min_word_length.*generator refuses|generator refuses.*min_word_length",
        ),
        ({"config": {"min_word_len": 9, "max_word_len": 3}}, "generator refuses"),
        ({"config": {"seed": 3}}, "config.seed=3: is set by the run"),
        ({"config": {"min_word_len": {1}}}, "plain JSON"),
        ({"tag": " "}, "tag=' '"),
        ({"tags": "x"}, "did you mean"),
    ],
)
def test_mistakes_are_named(options, message, tools):
    with pytest.raises(ConfigError, match=message):
        load("reasoning/spell_backward", options, tools)


def test_a_small_space_is_refused(tools):
    domain = load("reasoning/count_bits", {"config": {"min_n": 1, "max_n": 1}}, tools)
    with pytest.raises(PromptSpaceError, match="reasoning/count_bits: none of 256"):
        domain.make(0, "train", [0]) + domain.make(0, "heldout", [0])
    domain = load("reasoning/count_bits", {"config": {"min_n": 1, "max_n": 40}}, tools)
    with pytest.raises(PromptSpaceError, match=r"64 different held-out prompts.*only \d+"):
        heldout(domain, 0, 64)


def test_the_trainer_never_imports_the_library():
    code = """
        import sys
        from rl_posttrain.sandbox.bubblewrap import confined_command
        from rl_posttrain.tasks import Tools, load
        tools = Tools(confine=confined_command)
        domain = load("reasoning/gcd", {}, tools)
        tasks = domain.make(0, "train", range(3))
        print([v.status for v in domain.score(tasks, [t.demonstration for t in tasks])])
        heavy = ("reasoning_gym", "sympy", "jax", "numpy")
        print([name for name in sys.modules if name.split(".")[0] in heavy])
        tools.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["['pass', 'pass', 'pass']", "[]"], done.stderr
    assert "reasoning_gym" not in sys.modules


def test_one_worker_serves_all_domains(tools):
    load("reasoning/gcd", {}, tools)
    worker = tools.helpers["reasoning"]
    load("reasoning/lcm", {}, tools)
    assert tools.helpers == {"reasoning": worker}


def test_a_task_of_other_options_is_an_infrastructure_error(tools):
    made = load("reasoning/spell_backward", {"config": {"max_word_len": 5}}, tools)
    scored = load("reasoning/spell_backward", {"config": {"min_word_len": 8, "max_word_len": 12}}, tools)
    (task,) = made.make(0, "train", [0])
    (verdict,) = scored.score([task], [task.demonstration])
    assert verdict.status == "infra_error" and "other options" in verdict.detail


# ---- hostile texts ----


def bombs(mark: Path) -> list[str]:
    return [
        f"__import__('os').system('touch {mark}')",
        f"[__import__('os').system('touch {mark}')]",
        f"open('{mark}','w')",
        "9**9**9**9",
        "[9**9**9**9]",
        "nan",
        "inf",
        "(" * 3000,
        "[" * 3000,
        "\x00\ud800",
        "9" * 8000,
        "1e999999999",
        "a" * 9000,
    ]


@pytest.mark.parametrize("name", ["spiral_matrix", "string_insertion", "binary_matrix", "basic_arithmetic"])
def test_texts_are_not_executed(name, bare, tmp_path):
    mark = tmp_path / "executed"
    domain = load(f"reasoning/{name}", {}, bare)
    (task,) = domain.make(0, "train", [0])
    statuses = [verdict.status for verdict in verdicts(domain, task, *bombs(mark), task.demonstration)]
    assert not mark.exists()
    assert statuses[-1] == "pass"
    assert set(statuses[:-1]) == {"wrong", "malformed"}


def test_matrices_compare_whatever_the_spacing(tools):
    domain = load("reasoning/binary_matrix", {}, tools)
    (task,) = domain.make(0, "train", [0])
    spaced = task.demonstration.replace(" ", "  ").replace("\n", " \n")
    flat = task.demonstration.replace("\n", " ")
    assert [v.passed for v in verdicts(domain, task, spaced, flat)] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("name", USABLE)
def test_every_domain(name, bare, tmp_path):
    """Own answers pass, items do not depend on what was made before, hostile texts get nothing."""
    domain = load(f"reasoning/{name}", {}, bare)
    tasks = domain.make(0, "train", range(6))
    assert {v.status for v in domain.score(tasks, [task.demonstration for task in tasks])} == {"pass"}
    mark = tmp_path / "executed"
    for verdict in verdicts(domain, tasks[0], *bombs(mark)):
        assert verdict.status in ("wrong", "malformed", "timeout"), verdict
    assert not mark.exists()
    fresh = Tools(confine=confined_command)
    try:
        again = load(f"reasoning/{name}", {}, fresh).make(0, "train", range(5, -1, -1))
    finally:
        fresh.close()
    assert again[::-1] == tasks


# ---- a worker that misbehaves ----

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
    monkeypatch.setattr(
        Worker, "ask", lambda self, request, s: asked.append(request["text"]) or ask(self, request, s)
    )
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
