"""reasoning-gym behind its worker: contained, repeatable, and strict about what is right."""

import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from rl_posttrain.config import ConfigError
from rl_posttrain.sandbox.bubblewrap import confined_command
from rl_posttrain.tasks import PromptSpaceError, Tools, heldout, load, names
from rl_posttrain.tasks.reasoning_catalogue import BLOCKED, COMPARED_EXACTLY, USABLE
from rl_posttrain.tasks.reasoning_process import Worker
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
    assert [name for name in names() if name.startswith("reasoning/")] == sorted(f"reasoning/{name}" for name in USABLE)


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


def test_the_last_number_can_be_the_answer(tools):
    domain = load("reasoning/chain_sum", {"answer": "number"}, tools)
    (task,) = domain.make(0, "train", [0])
    right = task.demonstration
    texts = [f"Adding them gives {right}.", f"{right} is wrong, it is {right}1", "none"]
    assert [verdict.status for verdict in domain.score([task] * 3, texts)] == ["pass", "wrong", "malformed"]
    whole = load("reasoning/chain_sum", {}, tools)
    assert whole.score([task], texts[:1])[0].status == "wrong"
