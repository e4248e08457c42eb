"""The sandbox benchmark: contenders tell right from wrong, leaks are seen, and a tiny run publishes its figures."""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future

import pytest

from benchmarks import sandbox, sandbox_contenders, sandbox_soak
from rl_posttrain.types import Verdict

WRONG = "def add(a, b):\n    return a - b\n"


def settled(result):
    future = Future()
    future.set_result(result)
    return future


@pytest.mark.parametrize("source, right", [(sandbox_contenders.ADD, True), (WRONG, False)])
def test_baselines_tell_right_from_wrong(source, right):
    program = sandbox_contenders.with_asserts(source)
    assert sandbox_contenders.run_command(sandbox_contenders.bare_command(program)) is right
    assert sandbox_contenders.run_command(sandbox_contenders.bubblewrap_command(program)) is right
    assert sandbox_contenders.run_in_fork(program) is right


def test_the_bubblewrap_baseline_is_isolated(tmp_path):
    (tmp_path / "package.py").write_text("name = 'package'\n")
    program = (
        "import os, package\nassert os.listdir('/tmp') == [] and os.getpid() == 2 and not os.path.exists('/proc')\n"
    )
    assert sandbox_contenders.run_command(sandbox_contenders.bubblewrap_command(program, str(tmp_path)))
    assert not sandbox_contenders.run_command(sandbox_contenders.bare_command("import os\nassert os.getpid() == 2\n"))


def test_a_run_that_does_not_pass_is_no_measurement():
    wrong = Verdict(status="wrong", detail="2 is not 3")
    with pytest.raises(RuntimeError, match="2 is not 3"):
        sandbox_contenders.runs_per_second(lambda: settled(wrong), seconds=0.05, depth=4)
    with pytest.raises(RuntimeError, match="did not pass"):
        sandbox_contenders.latencies(lambda: settled(False), count=3, interval=None)
    with pytest.raises(RuntimeError, match="too few"):
        sandbox_contenders.runs_per_second(lambda: settled(True), seconds=-1.0, depth=4)
    assert len(sandbox_contenders.latencies(lambda: settled(True), count=3, interval=0.001)) == 3


def test_leaks_of_every_kind_are_counted():
    with sandbox_soak.own_temporary_folder() as folder:
        look = lambda: sandbox_soak.holdings([folder], marker="no-such-marker")
        before = look()
        with (
            tempfile.NamedTemporaryFile() as file,
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
        ):
            during = look()
            assert child.pid in during.processes
            assert during.files - before.files == {file.name}
            assert during.descriptors >= before.descriptors + 2 + 3  # the file and the pipe; the child's own
            assert during.mounts == 2 * before.mounts  # in view of each
        after = look()
    closed = sandbox_soak.leaked(before, before, before, during, growth_mb=0.0)
    assert (closed["processes"], closed["temporary files"]) == (1, 1)
    assert closed["descriptors"] >= 5 and closed["mounts"] == before.mounts
    opened = sandbox_soak.leaked(before, before, during, before, growth_mb=1000.0)
    assert opened["processes"] == 1 and sum(opened.values()) == sum(closed.values()) + 1
    assert sum(sandbox_soak.leaked(before, before, after, after, growth_mb=0.0).values()) == 0


def test_the_tally_counts_what_went_wrong():
    right, hostile = sandbox_soak.RIGHT[0], sandbox_soak.Program("h", "", sandbox_soak.SQUARES, right=False)
    tally = sandbox_soak.Tally()
    passed, failed = Verdict(status="pass"), Verdict(status="wrong")
    for program, verdict in ((right, passed), (right, failed), (hostile, failed), (hostile, passed)):
        tally.add(program, verdict)
    tally.add(hostile, Verdict(status="infra_error", detail="the slot died"))
    assert tally.counts == {"right": 2, "hostile": 3, "false fail": 1, "false pass": 1, "infra error": 1}
    assert tally.failures == {("false fail", right.name): 1, ("false pass", "h"): 1, ("infra error", "h"): 1}
    assert tally.examples["infra error", "h"] == "infra_error: the slot died"


def test_the_mixture_starts_with_right_programs_and_has_both():
    hostile = [sandbox_soak.Program(name, "", sandbox_soak.SQUARES, right=False) for name in sandbox_soak.INLINE]
    programs = [*sandbox_soak.RIGHT, *hostile]
    drawn = list(sandbox_soak.mixture(programs, 1000, seed=0))
    first = 2 * sandbox_soak.SLOTS * len(sandbox_soak.RIGHT)
    assert len(drawn) == 1000 and all(program.right for program in drawn[:first])
    assert {program.name for program in drawn} == {program.name for program in programs}
    assert list(sandbox_soak.mixture(programs, 3, seed=0)) == drawn[:3]


def test_a_tiny_run_publishes_its_figures(capfd):
    before = sandbox_soak.descendants(os.getpid())
    names = ("fast_vs_bare", "slot_rss_mb", "soak_leaks")
    returned = sandbox.measure(names, seconds=0.5, rounds=1, soak_runs=60)
    result = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert (result["benchmark"], result["figures"]) == ("sandbox", returned)
    assert set(names) < set(returned)
    assert returned["fast_vs_bare"] > 0
    assert returned["slot_rss_mb"] > 5  # an interpreter is larger
    assert returned["soak_runs"] == 60
    assert [returned[f"soak_{kind}"] for kind in ("false_pass", "false_fail", "infra_errors", "leaks")] == [0, 0, 0, 0]
    assert sandbox_soak.descendants(os.getpid()) == before
