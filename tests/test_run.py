"""The commands, on one finished run of a tiny policy: what they print, write and refuse."""

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import cli, evaluate, report, sample
from experiments import run as run_command
from rl_posttrain import evaluation, lifecycle
from rl_posttrain.config import ConfigError
from rl_posttrain.evaluation import EvaluationConfig, Outcomes
from rl_posttrain.observability import alerts, lines
from rl_posttrain.observability.metrics import wilson
from rl_posttrain.storage.checkpoints import CheckpointError
from rl_posttrain.types import Verdict

CONFIG = """
def get_config():
    words = dict(min_length=2, max_length=3, letters=4)
    return dict(
        tokenizer=dict(kind="character", alphabet=" abcdefghijklmnopqrstuvwxyz0123456789:*+"),
        model=dict(embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64),
        mesh=dict(data=-1),
        tasks={"strings/reverse": dict(options=words), "code/linear": dict(weight=0.5)},
        rollout=dict(prompts_per_step=4, group_size=4, max_tokens=8, prompt_bucket=16),
        rewards=dict(malformed=-0.5),
        sft=dict(steps=2, batch_size=8, examples=16, row_length=48, update=dict(learning_rate=3e-3)),
        grpo=dict(steps=2, row_length=96, mismatch_alarm=1e-30),
        update=dict(learning_rate=1e-3),
        evaluation=dict(items=4, rows=8),
        checkpoint=dict(every=2),
    )
"""
DEVICES = "--xla_force_host_platform_device_count"
COMMANDS = {"run": run_command, "evaluate": evaluate, "sample": sample, "report": report}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture(scope="module")
def workdir(config_file, tmp_path_factory) -> Path:
    """A finished run of two steps of each stage."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert run_command.main(["--config", config_file, "--workdir", str(folder)]) == 0
    return folder


def refused(command, arguments: list[str], monkeypatch, capsys) -> tuple[int, str]:
    """Exit code and the error's text of a command that ends with one."""
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.guarded(command.main)
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


# ---- run ----


def test_a_run_leaves_what_the_documentation_lists(workdir):
    names = {path.name for path in workdir.iterdir()}
    files = {"config.json", "manifest.json", "metrics.jsonl", "evaluation.json", "alerts.jsonl", "report.html"}
    assert names == files | {"checkpoints", "trajectories", "tensorboard"}
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"2", "4"}
    assert list((workdir / "tensorboard").glob("events.*"))


def test_each_step_is_logged_once_with_the_documented_names(workdir):
    entries = lines.read(workdir / "metrics.jsonl")
    assert [(entry["step"], entry["stage"]) for entry in entries] == [
        (0, "baseline"),
        (1, "sft"),
        (2, "sft"),
        (3, "grpo"),
        (4, "grpo"),
    ]
    for entry in entries[1:]:
        assert {"loss/total", "update/learning_rate", "time/update_s", "time/step_s", "tokens/per_s"} <= entry.keys()
    for entry in entries[3:]:
        wanted = {"reward/mean", "policy/mismatch", "policy/entropy", "time/rollout_s", "time/verify_s"}
        assert wanted <= entry.keys()
        assert any(name.startswith("domain/") and name.endswith("/accuracy") for name in entry)
        phases = sum(v for k, v in entry.items() if k.startswith("time/") and k != "time/step_s")
        assert entry["time/step_s"] == pytest.approx(phases)
    assert all("nonfinite" not in entry for entry in entries)
    evaluated = {entry["step"] for entry in entries if "evaluation/macro_accuracy" in entry}
    assert evaluated == {0, 2, 4}


def test_evaluations_are_of_every_domain_before_between_and_after(workdir):
    rows = json.loads((workdir / "evaluation.json").read_text())
    accuracies = [(row["stage"], row["step"], row["domain"]) for row in rows if row["metric"] == "accuracy"]
    domains = ("strings/reverse", "code/linear", "macro")
    assert accuracies == [(*when, domain) for when in (("baseline", 0), ("sft", 2), ("grpo", 4)) for domain in domains]
    changes = [row for row in rows if row["metric"] == "accuracy_change"]
    assert [row["domain"] for row in changes] == list(domains)
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows)
    assert [row["n"] for row in rows if row["metric"] == "accuracy"] == [4, 4, 8] * 3


def test_the_mismatch_alarm_fires_with_its_figures(workdir):
    """The limit is far below rounding."""
    entries = {entry["step"]: entry for entry in lines.read(workdir / "metrics.jsonl")}
    fired = alerts.read(workdir)
    assert [(alert["step"], alert["name"]) for alert in fired] == [(3, "logprob_mismatch"), (4, "logprob_mismatch")]
    for alert in fired:
        measured = entries[alert["step"]]["policy/mismatch"]
        assert 0 < measured < 1e-4  # trainer and sampler do agree, to rounding
        assert alert["figures"] == {"mismatch": measured, "limit": 1e-30}
        assert "trainer and sampler disagree" in alert["message"]


@pytest.mark.parametrize("mismatch, fires", [(0.0, False), (1e-3, False), (2e-3, True), (float("nan"), True)])
def test_the_mismatch_alarm_fires_above_its_limit_and_on_nan(tmp_path, mismatch, fires):
    built = SimpleNamespace(workdir=str(tmp_path), config=SimpleNamespace(grpo=SimpleNamespace(mismatch_alarm=1e-3)))
    recorder = lifecycle.Recorder(built, None, None, lambda: False)  # type: ignore[arg-type]
    recorder._check_mismatch(7, {"policy/mismatch": mismatch})
    assert len(alerts.read(tmp_path)) == fires


def test_a_dry_run_shows_batches_and_memory_and_writes_nothing(config_file, tmp_path, capsys):
    folder = tmp_path / "run"
    assert run_command.main(["--config", config_file, "--workdir", str(folder), "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "sft: 8 worked examples" in shown and "grpo: the first of 1 mini-batches of 4 groups" in shown
    assert "behaviour_logprobs" in shown and shown.count("compiled update, per device:") == 2
    # 43 tokens * 32 + 2 layers of (4 + 2) * 512 + 3 * 32 * 64 + 2 * 32, and the last norm
    assert "19,968 parameters on 8 x cpu" in shown
    assert not folder.exists()


@pytest.mark.parametrize(
    "profile, begins_at, ends_at, traced",
    [
        ((1, 2), 0, 9, ["start after 0", "stop after 2"]),
        ((3, 3), 0, 9, ["start after 2", "stop after 3"]),
        ((3, 6), 4, 9, ["start after 4", "stop after 6"]),  # resumed within
        ((3, 6), 0, 4, ["start after 2", "stop after 4"]),  # the run ends within
        ((3, 6), 6, 9, []),  # resumed behind it
        ((8, 9), 0, 5, []),
    ],
)
def test_a_profile_covers_its_steps_whatever_happens(monkeypatch, tmp_path, profile, begins_at, ends_at, traced):
    recorder = lifecycle.Recorder(SimpleNamespace(workdir=str(tmp_path)), None, None, lambda: False, profile)  # type: ignore[arg-type]
    log, running = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: running.append(folder) or log.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: running.remove(folder) or log.append("stop"))
    folder = str(tmp_path / "tensorboard")
    for step in range(begins_at, ends_at + 1):
        known = len(log)
        recorder._trace(step, ending=step == ends_at)
        log[known:] = [f"{what} after {step}" for what in log[known:]]
    assert log == traced and not running


@pytest.mark.slow
def test_a_profile_is_written_for_tensorboard(config_file, tmp_path):
    assert run_command.main(["--config", config_file, "--workdir", str(tmp_path), "--profile", "3:3"]) == 0
    assert list((tmp_path / "tensorboard").rglob("*.xplane.pb"))


@pytest.mark.parametrize("given", ["3", "0:2", "4:3", "a:b"])
def test_a_profile_of_no_steps_is_refused(config_file, tmp_path, capsys, given):
    with pytest.raises(SystemExit) as ended:
        run_command.main(["--config", config_file, "--workdir", str(tmp_path / "run"), "--profile", given])
    assert ended.value.code == 2 and "is not FIRST:LAST" in capsys.readouterr().err


def test_a_config_that_does_not_work_leaves_the_workdir_free(config_file, tmp_path, monkeypatch, capsys):
    """Else the corrected config would be refused, as that of another run."""
    folder = tmp_path / "run"
    for wrong in ("--config.mesh.data=3", "--config.tasks.strings/reverse.options.letter=4"):
        arguments = ["--config", config_file, "--workdir", str(folder), wrong]
        assert refused(run_command, arguments, monkeypatch, capsys)[0] == 2
        assert not (folder / "config.json").exists()


def test_a_domain_with_too_few_prompts_is_refused(config_file, tmp_path, monkeypatch, capsys):
    arguments = ["--config", config_file, "--workdir", str(tmp_path / "run"), "--config.evaluation.items=500"]
    code, message = refused(run_command, arguments, monkeypatch, capsys)
    assert code == 2 and "strings/reverse: 500 different held-out prompts were asked for" in message


# ---- evaluate ----


def test_evaluating_again_gives_the_runs_own_result(workdir, tmp_path, capsys):
    output = tmp_path / "rows.json"
    assert evaluate.main([str(workdir), "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("strings/reverse", "code/linear", "macro", "95% interval"))
    assert "step 4" in shown
    ours = [{**row, "stage": "grpo"} for row in json.loads(output.read_text())]
    rows = json.loads((workdir / "evaluation.json").read_text())
    assert ours == [row for row in rows if row["step"] == 4 and row["metric"] == "accuracy"]


def test_evaluating_with_several_samples_reports_pass_at_k(workdir, tmp_path):
    output = tmp_path / "rows.json"
    options = ["--samples", "4", "--temperature", "1", "--items", "3", "--top_k", "5", "--step", "2"]
    assert evaluate.main([str(workdir), "--output", str(output), *options]) == 0
    rows = json.loads(output.read_text())
    assert {row["metric"] for row in rows} == {"accuracy", "pass@2", "pass@4"}
    assert {row["step"] for row in rows} == {2}
    assert all(row["n"] == (6 if row["domain"] == "macro" else 3) for row in rows)


@pytest.mark.parametrize(
    "options, code, message",
    [
        (["--step", "99"], 3, "no checkpoint of step 99"),
        (["--step", "last"], 2, 'must be "latest", "best" or a number'),
        (["--samples", "2"], 2, "samples=2 at temperature=0 would all be equal"),
        (["--top_k", "2"], 2, "has no effect at temperature=0"),
        (["--items", "0"], 2, "items=0 must be at least 1"),
    ],
)
def test_evaluations_that_cannot_be_are_refused(workdir, monkeypatch, capsys, options, code, message):
    assert (found := refused(evaluate, [str(workdir), *options], monkeypatch, capsys))[0] == code
    assert message in found[1]


@pytest.mark.parametrize("command", [evaluate, sample, report])
def test_a_folder_without_a_run_is_refused(command, tmp_path, monkeypatch, capsys):
    code, message = refused(command, [str(tmp_path)], monkeypatch, capsys)
    assert code == 2 and str(tmp_path) in message


def test_the_best_checkpoint_is_the_one_with_the_highest_macro_accuracy(workdir):
    rows = json.loads((workdir / "evaluation.json").read_text())
    scores = {r["step"]: r["value"] for r in rows if r["domain"] == "macro" and r["metric"] == "accuracy"}
    with cli.opened_run(str(workdir), "best") as (_, domains, _, step):
        assert step == max((2, 4), key=lambda saved: (scores[saved], saved))
        assert list(domains) == ["strings/reverse", "code/linear"]


# ---- sample ----


@pytest.mark.parametrize("domain", ["strings/reverse", "code/linear"])
def test_samples_of_a_domain_have_verdicts(workdir, capsys, domain):
    assert sample.main([str(workdir), "--domain", domain, "--samples", "3"]) == 0
    prompt, *samples = capsys.readouterr().out.splitlines()
    assert prompt.startswith(("rev ", "fit ")) and len(samples) == 3
    assert all(line.startswith("  -> '") and "logprob -" in line for line in samples)
    assert all(any(status in line for status in ("pass", "wrong", "error", "malformed")) for line in samples)


def test_samples_of_a_prompt_have_none_and_are_reproducible(workdir, capsys):
    arguments = [str(workdir), "--prompt", "rev abc", "--samples", "3"]
    shown = []
    for seed in ("1", "1", "2"):
        assert sample.main([*arguments, "--seed", seed]) == 0
        shown.append(capsys.readouterr().out.splitlines())
    assert shown[0][0] == "rev abc" and len(shown[0]) == 4
    assert shown[0] == shown[1] != shown[2]
    assert len(set(shown[0])) > 1 and "malformed" not in "".join(shown[0])


def test_prompts_from_the_terminal_go_on_after_one_that_cannot_be_read(workdir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("rev ABC\nrev abc\n"))
    assert sample.main([str(workdir), "--samples", "3"]) == 0
    shown = capsys.readouterr()
    assert "characters ['A', 'B', 'C']" in shown.err and shown.out.count("  -> ") == 3


@pytest.mark.parametrize(
    "options, message",
    [
        (["--domain", "strings/revers"], 'not in this run; did you mean "strings/reverse"?'),
        (["--prompt", "rev ABC"], "are not in the alphabet"),
    ],
)
def test_samples_that_cannot_be_are_refused(workdir, monkeypatch, capsys, options, message):
    code, text = refused(sample, [str(workdir), *options], monkeypatch, capsys)
    assert code == 2 and message in text


# ---- report, help ----


def test_the_report_is_drawn_again(workdir, capsys):
    page = workdir / "report.html"
    page.unlink()
    assert report.main([str(workdir)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert "strings/reverse" in page.read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command_and_its_arguments(name, capsys):
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"python -m experiments.{name}" in shown and "workdir" in shown
    assert (name != "run") or ("exit codes: 0 done" in shown and "--config.KEY" in shown)


# ---- rows of evaluation.json (O32) ----


def outcomes(*statuses: list[str]) -> Outcomes:
    return Outcomes([], [[Verdict(status) for status in group] for group in statuses])  # type: ignore[arg-type]


def test_o32_domains_of_unequal_size_weigh_the_same():
    math, code = outcomes(*[["pass"]] * 3, ["wrong"]), outcomes(["error"])
    rows = evaluation.rows({"math": math, "code": code}, "grpo", 5)
    assert [(row["domain"], row["value"], row["n"]) for row in rows] == [
        ("math", 0.75, 4),
        ("code", 0.0, 1),
        ("macro", 0.375, 5),
    ]
    assert (rows[0]["low"], rows[0]["high"]) == wilson(3, 4)
    assert rows[0]["outcomes"] == [1.0, 1.0, 1.0, 0.0]
    assert evaluation.macro(rows) == 0.375


def test_what_the_verifier_could_not_judge_counts_for_nothing():
    rows = evaluation.rows({"a": outcomes(["pass"], ["infra_error"], ["wrong"])}, "grpo", 1)
    assert (rows[0]["value"], rows[0]["n"], rows[0]["outcomes"]) == (0.5, 2, [1.0, None, 0.0])
    with pytest.raises(RuntimeError, match="the verifier failed on every held-out item"):
        evaluation.rows({"a": outcomes(["infra_error"])}, "grpo", 1)


def test_pass_at_k_by_hand():
    """2 of 4 pass, and 1 of the 3 that could be judged: 1 - C(2,2)/C(4,2) = 5/6, and 1 - C(2,2)/C(3,2) = 2/3."""
    groups = outcomes(["pass", "pass", "wrong", "error"], ["pass", "wrong", "infra_error", "wrong"])
    rows = {row["metric"]: row for row in evaluation.rows({"a": groups}, "grpo", 1) if row["domain"] == "a"}
    assert rows["accuracy"]["value"] == pytest.approx((1 / 2 + 1 / 3) / 2, abs=1e-6)
    assert rows["pass@2"]["value"] == pytest.approx((5 / 6 + 2 / 3) / 2)
    assert (rows["pass@4"]["value"], rows["pass@4"]["n"]) == (1.0, 1)


def test_changes_are_paired_and_leave_out_what_one_side_could_not_judge():
    before = evaluation.rows({"a": outcomes(["wrong"], ["wrong"], ["pass"], ["infra_error"])}, "sft", 2)
    after = evaluation.rows({"a": outcomes(["pass"], ["wrong"], ["pass"], ["pass"])}, "grpo", 4)
    change, macro = evaluation.changes(before, after)
    assert (change["domain"], change["metric"], change["n"]) == ("a", "accuracy_change", 3)
    assert change["value"] == pytest.approx(1 / 3) and macro["value"] == pytest.approx(1 / 3)
    assert np.isclose([change["low"], change["high"]], [macro["low"], macro["high"]]).all()


def test_greedy_evaluation_draws_no_second_sample():
    with pytest.raises(ValueError, match="use samples=1 or a temperature"):
        EvaluationConfig(samples=2)


def test_a_checkpoint_error_prints_its_message_alone():
    assert str(CheckpointError(28, "no space left for a checkpoint")) == "no space left for a checkpoint"
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--a=1", "--a=1"),  # one device keeps XLA's own choice
        (f"{DEVICES}=8", f"{DEVICES}=8 --{cli.SCHEDULER}=false"),
        (f"{DEVICES}=8 --{cli.SCHEDULER}=true", f"{DEVICES}=8 --{cli.SCHEDULER}=true"),
    ],
)
def test_several_cpu_devices_run_their_collectives_in_one_order(monkeypatch, flags, expected):
    """A program from the compilation cache would hang otherwise, and XLA ends the process after 40 s."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    cli.use_compilation_cache()
    assert os.environ["XLA_FLAGS"] == expected
