"""Sweeps: what is refused before the first run, folders that cannot collide, and a sweep's life around its runs.

The runs of most tests are small programs in place of `experiments.run`, which leave what it leaves.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments import cli, sweep
from experiments.sweep_plan import directory_name, finished, plan
from rl_posttrain import config as config_lib
from rl_posttrain import services
from rl_posttrain.config import ConfigError
from rl_posttrain.observability import sweep_report

ROOT = Path(__file__).resolve().parents[2]
WORDS = dict(min_length=2, max_length=3, letters=4)
VALUES = dict(
    tokenizer=dict(kind="character", alphabet=" abcdefghijklmnopqrstuvwxyz0123456789:*+"),
    model=dict(embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=32),
    mesh=dict(data=-1),
    tasks={"strings/reverse": dict(options=WORDS), "strings/sort": dict(options=WORDS)},
    rollout=dict(prompts_per_step=4, group_size=4, max_tokens=4, prompt_bucket=16),
    rewards=dict(malformed=-0.5),
    sft=dict(steps=2, batch_size=8, examples=16, row_length=48, update=dict(learning_rate=3e-3)),
    grpo=dict(steps=2, row_length=96),
    evaluation=dict(items=4, rows=8),
)
RATES = {"grid": {"update.learning_rate": [3e-4, 1e-3]}, "seeds": [0, 1]}
# A run in place of the real one: `fake.py CONFIG WORKDIR`. sft.steps steps are logged; tasks pass more often at a
# higher learning rate. A file FAIL beside the config file makes it fail; with WAIT it goes on until SIGTERM, as a
# real run does, and is finished when it is started again.
FAKE = """
import json, runpy, signal, sys, time
from pathlib import Path

config, workdir = runpy.run_path(sys.argv[1])["get_config"](), Path(sys.argv[2])
controls = workdir.parents[1]
print(f"run with seed {config['seed']}, attempt {(workdir / 'log.txt').read_text().count('attempt') + 1}", flush=True)
total = config["sft"]["steps"] + config["grpo"]["steps"]
name = f"{config['update']['learning_rate']}-{config['seed']}"
if (controls / f"FAIL-{name}").exists():
    print("earlier line\\n" * 40 + "RuntimeError: <b>the disk is on fire</b>", file=sys.stderr)
    sys.exit(9)
(workdir / "config.json").write_text(json.dumps(config))
if (controls / f"WAIT-{name}").exists():
    (controls / f"WAIT-{name}").unlink()
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    (workdir / "metrics.jsonl").write_text(json.dumps({"step": 1, "stage": "sft"}) + "\\n")
    (controls / "READY").touch()
    while not stopped:
        time.sleep(0.02)
    sys.exit(75)
rows, metrics = [], []
for step in range(total + 1):
    metrics.append({"step": step, "stage": "sft", "reward/mean": step / total, "time/step_s": 2.0})
    for domain in config["tasks"]:
        right = min(4, int(step * config["update"]["learning_rate"] * 1000))
        rows.append(dict(stage="grpo", step=step, domain=domain, metric="accuracy", value=right / 4, low=0.0, high=1.0,
                         n=4, outcomes=[float(i < right) for i in range(4)]))
    rows.append({**rows[-1], "domain": "macro"})
rows += [{**rows[-1], "metric": "accuracy_change"}]
(workdir / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\\n" for entry in metrics))
(workdir / "evaluation.json").write_text(json.dumps(rows))
(workdir / "report.html").write_text("the run")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts the small program in the place of `experiments.run`; returns the command's arguments."""
    (tmp_path / "fake.py").write_text(FAKE)
    fake = [sys.executable, str(tmp_path / "fake.py")]
    monkeypatch.setattr(sweep, "command", lambda config_file, workdir: [*fake, str(config_file), str(workdir)])
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)
    for drawing in ("panels_svg", "change_svg"):  # a second for each picture; test_sweep_report.py draws them
        monkeypatch.setattr(sweep_report, drawing, lambda *_, **__: "<svg></svg>")
    (tmp_path / "config.py").write_text(f"def get_config():\n    return {VALUES!r}\n")
    (tmp_path / "rates.py").write_text(f"def get_sweep():\n    return {RATES!r}\n")
    (tmp_path / "out").mkdir()
    return arguments(tmp_path, "out")


def arguments(folder, workdir):
    places = {"--config": "config.py", "--sweep": "rates.py", "--workdir": workdir}
    return [part for option, name in places.items() for part in (option, str(folder / name))]


def planned(given, workdir=Path("/nowhere"), **common):
    return plan(VALUES, given, common, workdir)


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


def statuses(workdir):
    return [run["status"] for point in results(workdir) for run in point["runs"]]


# ---- the plan ----


def test_points_are_listed_ones_times_the_grid_each_with_every_seed():
    runs = planned(
        {
            "points": {"plain": {}, "mean": {"algorithm.advantage": "mean", "rewards.partial": 0.5}},
            "grid": {"update.learning_rate": ["1e-4", 1e-3], "algorithm.clip_high": [0.3]},
            "seeds": {3: {"init_from": "runs/warm3"}, 5: {"init_from": "runs/warm5"}},
        }
    )
    assert [(run.name, run.seed) for run in runs] == [
        (f"{point}, learning_rate={rate}, clip_high=0.3", seed)
        for point in ("plain", "mean")
        for rate in ("0.0001", "0.001")
        for seed in (3, 5)
    ]
    last = runs[-1]
    assert last.config.algorithm.advantage == "mean" and last.config.rewards.partial == 0.5
    assert (last.config.update.learning_rate, last.config.algorithm.clip_high) == (1e-3, 0.3)
    assert (last.config.seed, last.config.init_from) == (5, "runs/warm5")
    assert runs[0].config.algorithm.advantage == "mean_std" and runs[0].config.init_from == "runs/warm3"
    assert runs[0].overrides == {"update.learning_rate": 1e-4, "algorithm.clip_high": 0.3}  # as the config has them
    assert len({run.folder for run in runs}) == 8 and len({run.folder.parent for run in runs}) == 4


def test_the_command_line_holds_at_every_point_and_seeds_default_to_the_configs():
    runs = planned(
        {"grid": {"sft.update.learning_rate": [1e-3, 2e-3]}}, **{"update.learning_rate": "5e-5", "seed": "7"}
    )
    assert [(run.name, run.seed) for run in runs] == [("learning_rate=0.001", 7), ("learning_rate=0.002", 7)]
    assert {run.config.update.learning_rate for run in runs} == {5e-5}


def test_labels_are_short_where_that_is_unambiguous():
    two = {"grid": {"update.learning_rate": [1e-3], "sft.update.learning_rate": [1e-4], "update.b1": [0.8]}}
    assert planned(two)[0].name == "update.learning_rate=0.001, sft.update.learning_rate=0.0001, b1=0.8"
    assert planned({"seeds": [0]})[0].name == "base"


def test_directories_tell_apart_what_their_readable_part_does_not():
    points = [
        ("tag=a/b", {"tag": "a/b"}), ("tag=a_b", {"tag": "a_b"}), ("tag=A_b", {"tag": "A_b"}), ("", {}),
        ("x" * 300 + "1", {"x": 1}), ("x" * 300 + "2", {"x": 2}), ("../..", {"p": 1}), ("é", {"p": "é"}),
        ("t=1", {"t": "1"}), ("t=1", {"t": 1}), ("t=1", {"t": True}),
    ]  # fmt: skip
    names = [directory_name(label, overrides) for label, overrides in points]
    assert len({name.lower() for name in names}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{1,80}", name) for name in names), names
    assert directory_name("a", {"x": 1, "y": 2}) == directory_name("a", {"y": 2, "x": 1})


@pytest.mark.parametrize(
    "given, message",
    [
        ({"grids": {}}, 'grids: unknown key; did you mean "grid"?'),
        ([], "must return a mapping with grid, points, seeds"),
        ({"grid": {"update.b1": 0.5}}, "grid['update.b1']=0.5: must be a list with at least one value"),
        ({"grid": {"update.b1": []}}, "must be a list with at least one value"),
        ({"grid": {"tokenizer.alphabet": "abc"}}, "must be a list with at least one value"),
        ({"grid": ["update.b1"]}, "must map each dotted config key to a list"),
        ({"points": [3]}, "must be mappings of config keys to values"),
        ({"points": []}, "must be mappings of config keys to values"),
        ({"seeds": [1, 1]}, "must be different integers"),
        ({"seeds": []}, "must be different integers"),
        ({"seeds": ["1"]}, "seeds: '1': must be an integer"),
        ({"grid": {"seed": [0, 1]}}, 'grid sets seed: name seeds in "seeds"'),
        ({"points": [{"update.b1": 0.5}], "grid": {"update.b1": [0.6]}}, "b1 of points[0] and update.b1 of grid"),
        ({"grid": {"sft": [{}], "sft.steps": [6]}}, "sft of grid and sft.steps of grid set the same"),
        ({"grid": {"sft.steps": [8]}, "seeds": {0: {"sft": {}}}}, "sft.steps of grid and sft of seeds[0]"),
        ({"grid": {"update.epsilon": [1e-8, 1e-7]}}, "of the command line and update.epsilon of grid set the same"),
        ({"grid": {"update.b1": [0.8, "8e-1"]}}, "b1=0.8, seed 0 is there twice"),
        ({"grid": {"update.b1": [0.8, 1.5]}}, "b1=1.5, seed 0: config.update: b1=1.5 and b2=0.95 must be in [0, 1)"),
        ({"grid": {"checkpoint.directory": ["there"]}, "seeds": [0, 1]}, "cannot hold the checkpoints of several runs"),
    ],
)  # fmt: skip
def test_sweeps_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned(given, **{"update.epsilon": "1e-8"})


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("update.learnign_rate", "learning_rate"),
        ("updaet.learning_rate", "update"),
        ("tasks.strings/srot.weight", "strings/sort"),
        ("tasks.strings/sort.wieght", "weight"),
    ],
)
@pytest.mark.parametrize("where", ["grid", "points", "seeds"])
def test_o30_a_misspelt_axis_is_refused_naming_the_nearest_key(key, nearest, where):
    given = {
        "grid": {"grid": {key: [1.0]}},
        "points": {"points": [{}, {key: 1.0}]},
        "seeds": {"seeds": {0: {key: 1.0}}},
    }
    with pytest.raises(ConfigError, match=f'did you mean "{nearest}"'):
        planned(given[where])


def test_o30_the_command_refuses_before_any_run_and_takes_no_device(fake, tmp_path):
    (tmp_path / "rates.py").write_text("def get_sweep():\n    return dict(grid={'update.learnign_rate': [1e-3]})\n")
    code = (
        "import sys; from experiments import sweep\n"
        "from jax._src import xla_bridge\n"
        "try: sweep.main(sys.argv[1:])\n"
        "finally: print('devices taken:', xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code, *fake], cwd=ROOT, capture_output=True, text=True, timeout=120)
    message = "rates.py, learnign_rate=0.001, seed 0: config.update.learnign_rate: unknown key; did you mean"
    assert done.returncode == 1 and message in done.stderr
    assert done.stdout == "devices taken: False\n"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_with_another_config_is_refused_before_any_run(fake, tmp_path, monkeypatch):
    assert sweep.main(fake) == 0
    monkeypatch.setattr(sweep, "start", lambda run: pytest.fail("a run was started"))
    with pytest.raises(ConfigError, match=r"learning_rate=0.0003, seed 0: .* holds a run with another config"):
        sweep.main([*fake, "--config.update.b1=0.5"])


# ---- its life ----


def test_a_sweep_runs_every_point_and_a_second_time_runs_none(fake, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert sweep.main(fake) == 0
    assert statuses(out) == ["finished"] * 4
    assert "4 of 4 runs ended, step 16/16" in capsys.readouterr().out
    log = next(out.glob("learning_rate_0.001-*/seed1/log.txt")).read_text()
    assert log == "run with seed 1, attempt 1\n"
    slow, fast = results(out)
    assert slow["overrides"] == {"update.learning_rate": 3e-4} and slow["difference"] == {}
    assert (slow["accuracy"]["macro"]["value"], fast["accuracy"]["macro"]["value"]) == (0.25, 1.0)
    assert fast["difference"]["strings/sort"]["by_seed"] == {"0": 0.75, "1": 0.75}
    assert slow["training_s"] == 10.0
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*/*")}
    monkeypatch.setattr(sweep, "start", lambda run: pytest.fail("a finished run was started"))
    assert sweep.main(fake) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*/*")} == before


def test_more_seeds_or_steps_run_only_what_is_new(fake, tmp_path):
    out = tmp_path / "out"
    assert sweep.main(fake) == 0
    attempts = lambda: [path.read_text().count("attempt") for path in sorted(out.glob("*/*/log.txt"))]
    (tmp_path / "rates.py").write_text(f"def get_sweep():\n    return {RATES | {'seeds': [0, 1, 2]}!r}\n")
    assert sweep.main(fake) == 0
    assert attempts() == [1] * 6
    assert sweep.main([*fake, "--config.grpo.steps=3"]) == 0
    assert attempts() == [2] * 6


def test_the_written_config_is_the_points_own_in_every_field(fake, tmp_path):
    (tmp_path / "rates.py").write_text(
        "def get_sweep():\n    return dict(points=[{'update.gradient_clip': float('inf'), 'tokenizer.system': None}])\n"
    )
    assert sweep.main(fake) == 0
    written = next((tmp_path / "out").glob("*/seed0/config.py"))
    config = services.parse(cli.load_config_file(str(written)))
    expected = services.parse(config_lib.apply_overrides(VALUES, {"update.gradient_clip": float("inf")}))
    assert config == expected


def test_a_failed_run_is_reported_and_does_not_stop_the_rest(fake, tmp_path, capsys):
    out = tmp_path / "out"
    (out / "FAIL-0.0003-0").touch()
    assert sweep.main(fake) == 1
    assert statuses(out) == ["failed", "finished", "finished", "finished"]
    detail = results(out)[0]["runs"][0]["detail"]
    assert detail.startswith("exit code 9") and detail.endswith("RuntimeError: <b>the disk is on fire</b>")
    assert len(detail.splitlines()) == 1 + sweep.LOG_LINES
    assert "RuntimeError: <b>the disk is on fire</b>" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert "RuntimeError: &lt;b&gt;the disk is on fire&lt;/b&gt;" in page and "3 of 4" in page
    assert results(out)[1]["difference"]["macro"]["by_seed"] == {"1": 0.75}  # the seed that both have
    (out / "FAIL-0.0003-0").unlink()
    assert sweep.main(fake) == 0
    assert statuses(out) == ["finished"] * 4 and "Failed runs" not in (out / "report.html").read_text()


@pytest.mark.parametrize("jobs", [1, 2])
def test_sigterm_is_passed_on_and_the_sweep_resumes(fake, tmp_path, jobs, capsys):
    out = tmp_path / "out"
    waiting = [out / "WAIT-0.0003-0", out / "WAIT-0.0003-1"][:jobs]
    for path in waiting:
        path.touch()

    def interrupt():
        while not (out / "READY").exists() or any(path.exists() for path in waiting):
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    assert sweep.main([*fake, "--jobs", str(jobs)]) == cli.PREEMPTED == 75
    assert statuses(out) == ["interrupted"] * jobs + ["waiting"] * (4 - jobs)
    assert "interrupted: the same command resumes" in capsys.readouterr().out
    assert sweep.main(fake) == 0
    assert statuses(out) == ["finished"] * 4
    logs = [path.read_text().count("attempt") for path in sorted(out.glob("*_0.0003-*/*/log.txt"))]
    assert logs == [2] * jobs + [1] * (2 - jobs)


@pytest.mark.parametrize("code, told, complete, status", [
    (0, False, True, "finished"),
    (0, False, False, "failed"),
    (75, False, False, "interrupted"),
    (-15, True, False, "interrupted"),  # before it could save
    (-15, True, True, "finished"),  # on its way out
    (-15, False, False, "failed"),  # somebody else's signal
    (1, True, True, "failed"),
])  # fmt: skip
def test_how_a_run_ended(tmp_path, monkeypatch, code, told, complete, status):
    run = plan(VALUES, RATES, {}, tmp_path)[0]
    run.folder.mkdir(parents=True)
    (run.folder / "log.txt").write_text("before\nafter\n")
    monkeypatch.setattr(sweep, "finished", lambda run: complete)
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    process.returncode = code
    assert sweep.settle(sweep.Child(run, process, len("before\n")), told)
    assert run.status == status and run.detail.endswith(":\nafter" if status == "failed" else "")


def test_jobs_run_at_the_same_time(fake, tmp_path, monkeypatch):
    together = []
    original = sweep.start

    def recorded(run):
        child = original(run)
        started.append(child)
        together.append(sum(child.process.poll() is None for child in started))
        return child

    started = []
    monkeypatch.setattr(sweep, "start", recorded)
    assert sweep.main([*fake, "--jobs", "3"]) == 0
    assert together[:3] == [1, 2, 3] and max(together) == 3


def test_a_run_that_outlived_its_sweep_is_not_started_twice(fake, tmp_path):
    out = tmp_path / "out"
    (out / "WAIT-0.0003-0").touch()
    runs = plan(VALUES, RATES, {}, out)
    orphan = sweep.start(runs[0])
    try:
        while not (out / "READY").exists():
            time.sleep(0.02)
        assert sweep.main(fake) == 1
        assert statuses(out) == ["failed", "finished", "finished", "finished"]
        assert "another process is running it" in results(out)[0]["runs"][0]["detail"]
    finally:
        sweep.tell([orphan], signal.SIGTERM)
        sweep.wait([orphan])
    assert sweep.main(fake) == 0


@pytest.mark.parametrize("missing", ["report.html", "evaluation.json", "config.json"])
def test_a_run_without_its_last_files_is_not_finished(fake, tmp_path, missing):
    assert sweep.main(fake) == 0
    runs = plan(VALUES, RATES, {}, tmp_path / "out")
    assert all(finished(run) for run in runs)
    (runs[0].folder / missing).unlink()
    assert [finished(run) for run in runs] == [False, True, True, True]


# ---- with real runs ----


@pytest.mark.slow
def test_a_sweep_of_real_runs(tmp_path):
    (tmp_path / "config.py").write_text(f"def get_config():\n    return {VALUES!r}\n")
    (tmp_path / "rates.py").write_text(f"def get_sweep():\n    return {RATES | {'seeds': [0]}!r}\n")
    command = [sys.executable, "-m", "experiments.sweep", *arguments(tmp_path, "out"), "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert statuses(tmp_path / "out") == ["finished"] * 2
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0 and "2 runs, 2 of them finished already" in again.stdout


def test_the_quickstarts_sweep_is_valid():
    values = cli.load_config_file(str(ROOT / "configs" / "quickstart.py"))
    given = cli.call_file("--sweep", str(ROOT / "configs" / "sweeps" / "learning_rate.py"), "get_sweep")
    runs = plan(values, given, {"grpo.steps": "20", "evaluation.items": "64"}, Path("/nowhere"))
    assert len(runs) == 9 and runs[0].config.update.learning_rate == values["update"]["learning_rate"]
