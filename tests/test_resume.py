"""A run that is killed, interrupted or extended equals the run that nothing happened to, bit for bit."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import cli
from experiments import run as run_command
from rl_posttrain import lifecycle, loop, services
from rl_posttrain.config import ConfigError, apply_overrides
from rl_posttrain.observability import lines
from rl_posttrain.sandbox import bubblewrap
from rl_posttrain.storage import trajectories
from rl_posttrain.storage.checkpoints import CheckpointError

ROOT = Path(__file__).resolve().parents[1]
# Rewards differ within a group already for an untrained policy: what is cut off or no program earns less. A KL term,
# so that a reference policy is part of the state, and an entropy target, whose coefficient is. Saves after steps 2, 4,
# 6 and the last; evaluations after 3, 6.
CONFIG = """
def get_config():
    words = dict(min_length=2, max_length=3, letters=4)
    return dict(
        seed=3,
        tokenizer=dict(kind="character", alphabet=" abcdefghijklmnopqrstuvwxyz0123456789:*+x"[:-1]),
        model=dict(embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64),
        mesh=dict(data=-1),
        tasks={
            "strings/reverse": dict(options=words),
            "strings/sort": dict(options=words),
            "code/linear": dict(weight=0.5),
        },
        rollout=dict(prompts_per_step=4, group_size=4, max_tokens=8, prompt_bucket=16),
        rewards=dict(malformed=-0.5),
        sft=dict(steps=3, batch_size=4, examples=10, row_length=48, update=dict(learning_rate=3e-3)),
        grpo=dict(steps=4, mini_batches=2, row_length=96),
        update=dict(learning_rate=1e-3),
        algorithm=dict(kl_coefficient=0.01, entropy_coefficient=0.01, entropy_target=9.0),
        evaluation=dict(every=3, items=4, rows=12),
        checkpoint=dict(every=2),
    )
"""

# Runs the command with a fault: `driver.py SIGNAL TARGET WHEN NTH <arguments of experiments.run>` sends the signal to
# the whole process group before or after the nth call of the target, or as soon as that call has written something
# to the checkpoint folder.
DRIVER = """
import functools, importlib, os, signal, sys, threading
from pathlib import Path

name, target, when, nth, *arguments = sys.argv[1:]
module, _, attribute = target.rpartition(".")
if module.endswith("Checkpoints"):
    from rl_posttrain.storage.checkpoints import Checkpoints as owner
else:
    owner = importlib.import_module(module)
folder = Path(arguments[arguments.index("--workdir") + 1]) / "checkpoints"
calls = 0

def strike():
    os.killpg(0, getattr(signal, name))

def strike_at_first_sight(before):
    while set(os.listdir(folder)) == before:
        pass
    strike()

def armed(function):
    @functools.wraps(function)
    def wrapped(*positional, **named):
        global calls
        calls += 1
        if calls == int(nth) and when == "before":
            strike()
        if calls == int(nth) and when == "amid":
            seen = set(os.listdir(folder))
            threading.Thread(target=strike_at_first_sight, args=(seen,), daemon=True).start()
        result = function(*positional, **named)
        if calls == int(nth) and when == "amid":
            owner.wait(positional[0])
        if calls == int(nth) and when == "after":
            strike()
        return result
    return wrapped

if module == "rl_posttrain.services":  # a jitted function of the services
    original = owner.compiled
    def compiled(*positional):
        made = original(*positional)
        return {**made, attribute: armed(made[attribute])}
    owner.compiled = compiled
else:
    setattr(owner, attribute, armed(getattr(owner, attribute)))

from experiments import cli, run
sys.argv = ["run", *arguments]
cli.guarded(run.main)
"""


@dataclass(frozen=True)
class Fault:
    """A signal before or after the nth call of a function in a process."""

    signal: str
    target: str
    when: str
    nth: int

    @property
    def exit_code(self) -> int:
        return -signal.SIGKILL if self.signal == "SIGKILL" else cli.PREEMPTED


GENERATE = "rl_posttrain.loop.generate"
VERIFY = "rl_posttrain.loop.verify"
UPDATE = "rl_posttrain.services.grpo_update"
SAVE = "rl_posttrain.storage.checkpoints.Checkpoints.save"


def environment() -> dict[str, str]:
    """One CPU device; compiled programs kept between processes."""
    return {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """A folder with the config file and the driver."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "config.py").write_text(CONFIG)
    (folder / "driver.py").write_text(DRIVER)
    return folder


def run(files: Path, workdir: Path, *overrides: str, fault: Fault | None = None, expected: int = 0):
    """The command in a process of its own, with a fault or without. Checks the exit code."""
    start = ["-m", "experiments.run"]
    if fault is not None:
        start = [str(files / "driver.py"), fault.signal, fault.target, fault.when, str(fault.nth)]
    command = [sys.executable, *start, "--config", str(files / "config.py"), "--workdir", str(workdir)]
    finished = subprocess.run(
        [*command, *overrides],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
        start_new_session=True,  # the signal is for the group
    )
    expected = expected if fault is None else fault.exit_code
    assert finished.returncode == expected, finished.stdout + finished.stderr
    return finished


@pytest.fixture(scope="session")
def unbroken(files, tmp_path_factory) -> Path:
    """The run that nothing happens to."""
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    run(files, workdir)
    return workdir


def steps_logged(workdir: Path) -> list[int]:
    return [entry["step"] for entry in lines.read(workdir / "metrics.jsonl")]


def timeless(workdir: Path) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    clock = lambda name: name.startswith(("time/", "sandbox/")) or name == "tokens/per_s"
    entries = lines.read(workdir / "metrics.jsonl")
    return [{name: value for name, value in entry.items() if not clock(name)} for entry in entries]


def parsed(workdir: Path, changes: dict[str, Any] | None = None) -> services.Config:
    """The run's config, with dotted keys changed."""
    values = json.loads((workdir / "config.json").read_text())
    return services.parse(apply_overrides(values, changes or {}))


def final_state(workdir: Path) -> loop.RunState:
    """The whole state in the run's last checkpoint."""
    config = parsed(workdir)
    with services.build(config, str(workdir)) as built:
        state = lifecycle.resume(built)
    assert state is not None and state.step == config.total_steps
    return state


def assert_equal_runs(one: Path, other: Path, same_config: bool = True) -> None:
    """Everything but times: state, metrics, evaluations, trajectories, config."""
    for name in ("evaluation.json", "config.json")[: 2 if same_config else 1]:
        assert (one / name).read_text() == (other / name).read_text(), name
    assert timeless(one) == timeless(other)
    first, second = (trajectories.read(workdir / "trajectories") for workdir in (one, other))
    assert first.num_rows > 0 and first.equals(second)
    states = [final_state(workdir) for workdir in (one, other)]
    for state in states:
        state.examples = state.examples.get_state()
    assert states[0].counters == states[1].counters
    assert states[0].examples == states[1].examples
    assert states[0].evaluations == states[1].evaluations
    assert states[0].entropy_coefficient == states[1].entropy_coefficient
    leaves = [jax.tree_util.tree_leaves_with_path((state.train, state.reference)) for state in states]
    for (path, a), (_, b) in zip(*leaves, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def test_the_unbroken_run_learns_from_differing_rewards(unbroken):
    """Else equality below would say little."""
    entries = [entry for entry in lines.read(unbroken / "metrics.jsonl") if entry["stage"] == "grpo"]
    assert [entry["step"] for entry in entries] == [4, 5, 6, 7]
    assert all(entry["update/gradient_norm"] > 0 for entry in entries)
    assert any(entry["policy/kl"] > 0 for entry in entries)
    assert steps_logged(unbroken) == list(range(8))
    state = final_state(unbroken)
    assert int(state.train.step) == 4 * 2
    assert sum(state.counters.values()) == 3 * 10 + 4 * 4
    assert [round(entry["policy/entropy_coefficient"], 6) for entry in entries] == [0.01, 0.015, 0.02, 0.025]
    assert state.entropy_coefficient == pytest.approx(0.03)


def test_killed_amid_an_update_then_interrupted_then_extended(files, unbroken, tmp_path):
    workdir = tmp_path / "run"
    shorter = "--config.grpo.steps=3"
    # Half of step 6's optimizer steps are done and step 5 is logged. The last checkpoint is of step 4, or of step 2
    # when step 4's was still being written.
    run(files, workdir, shorter, fault=Fault("SIGKILL", UPDATE, "after", 5))
    assert steps_logged(workdir) == [0, 1, 2, 3, 4, 5]
    resumed = run(files, workdir, shorter, fault=Fault("SIGTERM", GENERATE, "after", 1))
    assert re.search("from step [24] of 6", resumed.stdout)
    assert re.search("interrupted at step [45] of 6: saved; the same command resumes", resumed.stdout)
    assert re.search("from step [45] of 7", run(files, workdir).stdout)
    assert_equal_runs(workdir, unbroken)


@pytest.mark.slow
def test_killed_amid_a_save_and_extended_once_finished(files, unbroken, tmp_path):
    workdir = tmp_path / "run"
    shorter = "--config.grpo.steps=3"
    run(files, workdir, shorter, fault=Fault("SIGKILL", SAVE, "amid", 2))
    run(files, workdir, shorter)
    assert "from step 6 of 7" in run(files, workdir).stdout
    assert_equal_runs(workdir, unbroken)


@pytest.mark.slow
def test_killed_at_every_point(files, unbroken, tmp_path):
    workdir = tmp_path / "run"
    chain = [
        Fault("SIGKILL", "rl_posttrain.evaluation.generate", "after", 1),  # the baseline, before any step
        Fault("SIGKILL", "rl_posttrain.services.sft_update", "after", 2),  # before any checkpoint
        Fault("SIGKILL", SAVE, "amid", 1),  # the first checkpoint of all
        Fault("SIGKILL", "rl_posttrain.lifecycle.write_evaluations", "after", 2),  # evaluated, not logged
        Fault("SIGKILL", "rl_posttrain.loop.begin_stage", "after", 1),
        Fault("SIGKILL", GENERATE, "before", 1),
        Fault("SIGKILL", GENERATE, "after", 1),
        Fault("SIGKILL", VERIFY, "after", 1),
        Fault("SIGKILL", UPDATE, "after", 1),
        Fault("SIGKILL", SAVE, "before", 1),  # trajectories are flushed, no checkpoint holds them
        Fault("SIGKILL", SAVE, "after", 1),  # the write is under way, or just done
        Fault("SIGKILL", "rl_posttrain.lifecycle.truncate_after", "after", 1),  # killed while it resumes
        Fault("SIGINT", VERIFY, "before", 1),
        Fault("SIGKILL", SAVE, "amid", 1),
        Fault("SIGKILL", "rl_posttrain.lifecycle.finish", "before", 1),
        Fault("SIGKILL", "rl_posttrain.observability.report.render", "before", 1),
    ]
    for fault in chain:
        run(files, workdir, fault=fault)
    run(files, workdir)
    assert_equal_runs(workdir, unbroken)
    run(files, workdir)  # once more, now that it is finished: nothing changes
    assert_equal_runs(workdir, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("target", [GENERATE, UPDATE, "rl_posttrain.services.sft_update", SAVE])
def test_interrupted_anywhere_saves_and_resumes(files, unbroken, tmp_path, name, target):
    workdir = tmp_path / "run"
    stopped = run(files, workdir, fault=Fault(name, target, "before", 1))
    assert "finishing this step, then saving" in stopped.stderr
    run(files, workdir)
    assert_equal_runs(workdir, unbroken)


# ---- another config, another run's parameters ----


def test_a_workdir_with_another_config_is_refused(files, unbroken, monkeypatch, capsys):
    def build(*_):
        raise AssertionError("services were built for a workdir that should have been refused")

    monkeypatch.setattr(services, "build", build)
    before = (unbroken / "config.json").read_bytes()
    arguments = ["run", "--config", str(files / "config.py"), "--workdir", str(unbroken)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--config.seed=4", "--config.update.learning_rate=2e-3"])
    with pytest.raises(SystemExit) as ended:
        cli.guarded(run_command.main)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "seed: 3 there, 4 here; update.learning_rate: 0.001 there, 0.002 here" in message
    assert "grpo.steps" not in message and (unbroken / "config.json").read_bytes() == before


@pytest.mark.parametrize("elsewhere", [False, True])
def test_init_from_starts_from_another_runs_parameters(unbroken, tmp_path, elsewhere):
    source = unbroken
    if elsewhere:  # a run whose checkpoints are not in its workdir
        source = tmp_path / "source"
        source.mkdir()
        theirs = json.loads((unbroken / "config.json").read_text())
        theirs["checkpoint"]["directory"] = str(unbroken / "checkpoints")
        (source / "config.json").write_text(json.dumps(theirs))
    config = parsed(unbroken, {"init_from": str(source)})
    with services.build(config, str(tmp_path / "run")) as built:
        state = lifecycle.start(built)
    trained = final_state(unbroken).train.params
    for mine in (state.train.params, state.reference):
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), mine, trained))
    assert state.step == 0 and int(state.train.step) == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(state.train.opt_state))  # the optimizer is fresh


def test_init_from_without_a_checkpoint_says_so(unbroken, tmp_path):
    config = parsed(unbroken, {"init_from": str(tmp_path / "absent")})
    with services.build(config, str(tmp_path / "run")) as built:
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            lifecycle.start(built)


# ---- the environment ----


def test_without_bubblewrap_the_command_ends_with_the_remedy(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(bubblewrap, "_from_wheel", lambda: None)
    arguments = ["--config", str(files / "config.py"), "--workdir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.guarded(run_command.main)
    assert ended.value.code == 3
    assert "bwrap was not found" in (message := capsys.readouterr().err) and "apt-get install" in message


@pytest.mark.slow
def test_o27_a_full_disk_ends_the_run_and_more_space_lets_it_go_on(files, unbroken, tmp_path):
    """Room for two and a half checkpoints of the three that exist while the third is written."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    last = max((unbroken / "checkpoints").iterdir(), key=lambda path: int(path.name))
    size = sum(-(-path.stat().st_size // 4096) * 4 for path in last.rglob("*") if path.is_file())
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size * 5 // 2}k", "tmpfs", str(disk)]).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    workdir, there = tmp_path / "run", f"--config.checkpoint.directory={disk}/checkpoints"
    try:
        full = run(files, workdir, there, expected=3)
        message = full.stderr.splitlines()[-1]  # the storage library may have complained above it
        assert "no space left for a checkpoint" in message and "the checkpoint of step 4 is intact" in message
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert "from step 4 of 7" in run(files, workdir, there).stdout
        assert_equal_runs(workdir, unbroken, same_config=False)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_run_of_a_version_with_fewer_fields_goes_on(unbroken, tmp_path):
    saved = json.loads((unbroken / "config.json").read_text())
    del saved["lora"], saved["algorithm"]["clip_low"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert lifecycle.check_workdir(parsed(unbroken, {}), str(tmp_path)) == ""
    with pytest.raises(ConfigError, match="seed: 3 there, 5 here"):
        lifecycle.check_workdir(parsed(unbroken, {"seed": 5}), str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**saved, "gone": 1}))
    with pytest.raises(ConfigError, match="cannot go on with: config.gone"):
        lifecycle.check_workdir(parsed(unbroken, {}), str(tmp_path))
