"""`python -m experiments.sandbox`: what it prints and how it exits, for each of its three uses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import cli, sandbox
from rl_posttrain.config import ConfigError
from rl_posttrain.sandbox import selftest
from rl_posttrain.sandbox.languages import LANGUAGES
from rl_posttrain.types import Verdict

ROOT = Path(__file__).resolve().parents[2]
DOUBLE = "def double(n):\n    return 2 * n\n"
READ = "print(2 * int(input()))\n"
CALLS = {"entry": "double", "calls": [[[2], 4], [[5], 10]]}
CASES = {"cases": [["2\n", "4\n"], ["5\n", "10\n"]]}
CHECK = {"entry": "double", "check": "def check(candidate):\n    assert candidate(2) == 4\n"}
PYTEST = "from solution import double\n\n\ndef test_two():\n    assert double(2) == 4\n"


@pytest.fixture
def run(tmp_path, capsys):
    """run(code, tests, *more arguments) is (exit code, what was printed)."""

    def run(code, tests, *more, name="solution.py", tests_name=None):
        (tmp_path / name).write_text(code)
        text = tests if isinstance(tests, str) else json.dumps(tests)
        path = tmp_path / (tests_name or ("test_it.py" if isinstance(tests, str) else "tests.json"))
        path.write_text(text)
        done = sandbox.main(["--run", str(tmp_path / name), "--tests", str(path), *more])
        return done, capsys.readouterr().out

    return run


# ---- --check ----


def test_check_names_every_protection_and_language(capsys):
    assert sandbox.main(["--check"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for probe in selftest.PROBES:
        assert probe.protection in shown
    for name in LANGUAGES:
        assert f"{name} yes" in shown or f"{name} no" in shown
    for part in ("bubblewrap", "kernel", "control groups", "Every protection holds."):
        assert part in shown
    assert "python yes" in shown


def test_check_tells_of_a_missing_protection_and_of_a_missing_language(monkeypatch, capsys):
    probe = selftest.PROBES[0]
    found = [(probe, Verdict("wrong", (False,), "test 1: it got through")), (selftest.PROBES[1], Verdict("pass"))]
    monkeypatch.setattr(selftest, "run", lambda pool: iter(found))
    monkeypatch.setattr(selftest, "detect", lambda pool: {"python": None, "cobol": "cobc is missing"})
    assert sandbox.main(["--check", "--safe"]) == cli.BAD_ENVIRONMENT
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 protections are missing: runs are refused" in shown and f"{probe.protection} NO wrong" in shown
    assert "cobol no cobc is missing" in shown and "safe: one run per container" in shown


# ---- --run ----


@pytest.mark.parametrize("tests", [CALLS, {**CALLS, "tolerance": 1e-6}, CHECK, PYTEST])
def test_a_right_function_passes_each_form_of_tests(run, tests):
    done, shown = run(DOUBLE, tests)
    assert done == 0 and shown.startswith("pass: ") and "(outside)" in shown
    assert "test 1: pass" in shown and "run: ok, exit code 0" in shown


def test_a_right_program_passes(run):
    done, shown = run(READ, CASES)
    assert done == 0 and shown.startswith("pass: 2 of 2 tests pass")
    assert shown.count("run: ok, exit code 0") == 2 and "stdout:\n    4\n" in shown
    tokens = {"cases": [["2", "4.0000001"]], "comparison": "tokens", "tolerance": 1e-3}
    assert run(READ, tokens)[0] == 0


def test_white_box_tests_are_labelled_as_weaker(run):
    suite = "from solution import double\n\ndef test_two():\n    assert double(2) == 4\n"
    done, shown = run(DOUBLE, {"suite": suite})
    assert done == 0 and "(tamper_evident)" in shown
    done, shown = run(DOUBLE.replace("2 *", "3 *"), {"suite": suite, "twin": suite.replace("4", "5")})
    assert done == 1 and shown.startswith("wrong: 0 of 1")


@pytest.mark.parametrize("tests", [CALLS, CHECK, PYTEST])
def test_a_wrong_function_fails_each_form_of_tests(run, tests):
    done, shown = run("def double(n):\n    return n\n", tests)
    assert done == 1 and shown.startswith("wrong: 0 of ") and "test 1: wrong" in shown


def test_a_failure_shows_output_traceback_and_outcomes(run):
    code = "import sys\ndef double(n):\n    print('hello'); print('there', file=sys.stderr)\n    return 4 // (5 - n)"
    done, shown = run(code, CALLS)
    assert done == 1 and shown.startswith("wrong: 0 of 2 tests pass")
    assert "test 1: wrong" in shown and "test 2: error" in shown
    assert "stdout:\n    hello\n" in shown and "stderr:\n    there\n" in shown
    assert "traceback:" in shown and "ZeroDivisionError" in shown and "line 4, in double" in shown


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("double.c", '#include <stdio.h>\nint main(void){int n;scanf("%d",&n);printf("%d",2*n);}'),
        ("double.js", "console.log(2 * parseInt(require('fs').readFileSync(0, 'utf8')))"),
        ("double.sh", "read -r n; echo $((2 * n))"),
    ],
)
def test_the_name_of_the_file_says_the_language(run, name, code):
    language = next(each for each in LANGUAGES.values() if Path(each.source).suffix == Path(name).suffix)
    if language.missing():
        pytest.skip(str(language.missing()))
    assert run(code, CASES, name=name)[0] == 0
    done, shown = run(code, {"cases": [["2", "5"]]}, "--language", language.name, name="double.txt")
    assert done == 1 and "wrong: 0 of 1" in shown and "expected '5', got '4" in shown


def test_a_compile_error_shows_the_compilers_words(run):
    if LANGUAGES["c"].missing():
        pytest.skip(str(LANGUAGES["c"].missing()))
    done, shown = run("int main(void) { return x; }", CASES, name="a.c")
    assert done == 1 and shown.startswith("compile_error: 0 of 2") and "run: compile_error, exit code 1" in shown
    assert "stderr:" in shown and "undeclared" in shown


def test_limits_and_flags(run):
    done, shown = run("while True: pass", CASES, "--cpu_seconds", "0.1")
    assert done == 1 and shown.startswith("timeout") and "test 2: skipped" in shown and "time_limit, signal 9" in shown
    done, shown = run("print(len(bytearray(200 << 20)))", CASES, "--memory_mib", "128", "--safe")
    assert done == 1 and "run: memory_limit" in shown
    done, shown = run("while True: print('x' * 10000)", {"cases": [["", ""]]})
    assert done == 1 and "stdout (cut):" in shown and "flag output_limit" in shown


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ({}, "has none of 'calls', 'cases', 'check', 'suite'"),
        ({"calls": [[[1], 2]]}, "has none of"),  # without an entry
        ({"entry": "double", "calls": []}, "give at least one"),
        ({"entry": "no name", "calls": [[[1], 2]]}, "entry='no name'"),
        ({"entry": "double", "calls": [[1, 2]]}, "tests.json"),
        ({"entry": "double", "calls": [[[1], 2]], "tolerence": 1}, "tolerence"),
        ({"cases": []}, "give at least one"),
        ({"cases": [["a", "b"]], "tolerance": 0.1}, "use 'tokens'"),
        ({"check": "x = 1", "entry": "double"}, "must define a function 'check'"),
        ({"check": "def check(candidate):\n    assert 1 == 2\n", "entry": "double"}, "assert"),
        ({"suite": " "}, "suite is empty"),
        ("{", "tests.json"),
        ([1, 2], "has none of"),
    ],
)
def test_tests_that_judge_nobody_are_refused(run, tests, words):
    with pytest.raises(ConfigError, match="solution.py|tests.json") as error:
        run(DOUBLE, tests, tests_name="tests.json")
    assert words in str(error.value)


def test_what_cannot_be_run_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="cobol"):
        run(DOUBLE, CASES, "--language", "cobol")
    with pytest.raises(ConfigError, match="FunctionTests is for Python"):
        run(DOUBLE, CALLS, "--language", "bash")
    with pytest.raises(ConfigError, match="memory_bytes"):
        run(DOUBLE, CALLS, "--memory_mib", "1")
    with pytest.raises(ConfigError, match="none.json"):
        sandbox.main(["--run", str(tmp_path / "solution.py"), "--tests", str(tmp_path / "none.json")])
    with pytest.raises(ConfigError, match="none.py"):
        sandbox.main(["--run", str(tmp_path / "none.py"), "--tests", str(tmp_path / "tests.json")])


# ---- the command line ----


def test_help_and_wrong_arguments(capsys):
    for arguments, code in ((["--help"], 0), ([], 2), (["--check", "--attack"], 2), (["--run", "x.py"], 2)):
        with pytest.raises(SystemExit) as ended:
            sandbox.main(arguments)
        assert ended.value.code == code
    shown = capsys.readouterr()
    for words in ("--check", "--run", "--attack", '"cases"', '"calls"', '"check"', '"suite"', "--safe"):
        assert words in shown.out
    assert "--run needs --tests" in shown.err


def test_the_command_exits_with_2_on_bad_tests_and_says_so(tmp_path):
    (tmp_path / "solution.py").write_text(DOUBLE)
    (tmp_path / "tests.json").write_text('{"cases": []}')
    command = [sys.executable, "-m", "experiments.sandbox", "--run", str(tmp_path / "solution.py"), "--tests"]
    done = subprocess.run([*command, str(tmp_path / "tests.json")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("config refused: --tests ")
    assert "give at least one" in done.stderr and "Traceback" not in done.stderr


def test_attack_runs_those_that_are_named(capsys):
    assert sandbox.main(["--attack", "--only", "a01"]) == 0
    shown = capsys.readouterr().out
    assert "a01_os_exit_import" in shown and "a02" not in shown
