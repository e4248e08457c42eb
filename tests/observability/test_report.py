"""The report: what it shows, what it leaves out, and that hostile text stays text."""

import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import report as command
from rl_posttrain.observability import alerts, charts, manifest, report
from rl_posttrain.observability.charts import Curve, Panel
from rl_posttrain.observability.metrics import MetricsWriter, wilson
from rl_posttrain.storage import trajectories
from rl_posttrain.types import Rollout, Task, Verdict

HOSTILE = '</pre></details><script>alert("x")</script><img src=x onerror=alert(1)>&amp;'


class Page(html.parser.HTMLParser):
    """What a browser would find: the elements with their attributes, and the text outside style."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def accuracy(stage, step, domain, right, metric="accuracy", n=20):
    low, high = wilson(right, n)
    return dict(stage=stage, step=step, domain=domain, metric=metric, value=right / n, low=low, high=high, n=n)


def make_run(workdir, domain="strings/reverse"):
    """A short run with every kind of file."""
    writer = MetricsWriter(workdir)
    for step in range(1, 31):
        scalars = {"loss/total": 1 / step, "time/step_s": 2.0, "time/update_s": 0.5}
        if step > 10:
            scalars |= {"reward/mean": step / 30, "time/rollout_s": 1.0, f"domain/{domain}/accuracy": 0.5,
                        "policy/clip_low_fraction": 0.01, "policy/clip_high_fraction": 0.02}  # fmt: skip
        if step == 20:
            scalars["loss/total"] = float("nan")
        writer.write(step, "sft" if step <= 10 else "grpo", scalars)
    writer.close()
    rows = [accuracy("baseline", 0, domain, 0), accuracy("sft", 10, domain, 5), accuracy("grpo", 30, domain, 15)]
    rows += [{**row, "domain": "macro"} for row in rows]
    rows.append({**rows[2], "metric": "accuracy_change", "value": 0.5, "low": 0.25, "high": 0.75})
    (workdir / "evaluation.json").write_text(json.dumps(rows))
    (workdir / "config.json").write_text(json.dumps({"seed": 3, "note": HOSTILE}))
    alerts.append(workdir, alerts.Alert(12, "entropy_collapse", HOSTILE, domain, {"entropy": 0.25}))
    manifest.write(workdir, 3, {})
    store = trajectories.TrajectoryWriter(workdir / "trajectories")
    for step in (11, 20, 30):
        task = Task(domain, "train", step, f"prompt of step {step} {HOSTILE}")
        rollout = Rollout(task, 0, (1,), (2,), (-0.5,), HOSTILE, "length", 1.0, step)
        verdict = Verdict("wrong", (True, False), detail=HOSTILE)
        store.append(step, [trajectories.record(rollout, verdict, 0.5, 0.0, step)])
    store.flush(30)


def test_the_report_shows_the_run(tmp_path):
    make_run(tmp_path)
    path = report.render(tmp_path)
    assert path == str(tmp_path / "report.html")
    page = Page(Path(path).read_text())
    for text in ("75.0%", "+50.0", "[+25.0, +75.0]", "25.0%", "entropy_collapse", "entropy 0.25",
                 "prompt of step 11", "prompt of step 30", "1 of 2 tests", "cut at the length limit",
                 "Loss, sft", "Loss, grpo", "rollout", "seed 3", "the end of SFT"):  # fmt: skip
        assert text in page.text, text
    assert "prompt of step 20" not in page.text  # only the first and the last
    # 60 s in all: 15 s of updates, 20 s of rollouts (of the 20 GRPO steps), the rest elsewhere
    assert re.search(r"update15s.*?25\.0%", page.text) and re.search(r"rollout20s.*?33\.3%", page.text)
    assert sum(tag == "svg" for tag, _ in page.elements) == 5


def test_the_report_needs_nothing_else_and_obeys_nothing(tmp_path):
    make_run(tmp_path)
    text = Path(report.render(tmp_path)).read_text()
    page = Page(text)
    assert not {tag for tag, _ in page.elements} & {"script", "img", "iframe", "link", "object", "embed"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    assert "url(http" not in text and "@import" not in text
    assert page.text.count('<script>alert("x")</script>') == 7  # 2 prompts, texts, details each, and an alert
    assert "default-src 'none'" in text


def test_a_hostile_domain_name_stays_a_name(tmp_path):
    make_run(tmp_path, domain="$x$<script>")
    page = Page(Path(report.render(tmp_path)).read_text())
    assert "script" not in {tag for tag, _ in page.elements}
    assert "$x$<script>" in page.text


@pytest.mark.parametrize("kept", ["metrics.jsonl", "evaluation.json"])
def test_what_is_missing_is_left_out(kept, tmp_path):
    make_run(tmp_path / "whole")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / kept).write_bytes((tmp_path / "whole" / kept).read_bytes())
    page = Page(Path(report.render(tmp_path / "part")).read_text())
    assert ("Held-out accuracy" in page.text) == (kept == "evaluation.json")
    assert ("Reward and loss" in page.text) == (kept == "metrics.jsonl")
    assert "Sample completions" not in page.text and "None fired." in page.text


def test_a_run_at_its_very_start_has_a_report(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(0, "baseline", {})
    writer.write(1, "sft", {"loss/total": 2.0, "time/step_s": 1.5})
    writer.close()
    assert "Loss, sft" in Page(Path(report.render(tmp_path)).read_text()).text


def test_the_command_writes_the_report_and_explains_itself(tmp_path, capsys):
    make_run(tmp_path / "run")
    assert command.main([str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    with pytest.raises(SystemExit, match="2"):
        command.main([str(tmp_path)])
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    help_text = [sys.executable, "-m", "experiments.report", "--help"]
    root = Path(report.__file__).parents[2]
    done = subprocess.run(help_text, capture_output=True, text=True, cwd=root, check=True)
    assert "workdir" in done.stdout


def test_long_curves_are_averaged_down_and_keep_their_mean():
    steps, values = np.arange(1, 4001), np.linspace(0.0, 1.0, 4000)
    thin_steps, thin = charts._thin(steps, values)
    assert len(thin) == len(thin_steps) == charts.POINTS
    assert thin.mean() == pytest.approx(0.5) and thin_steps[0] == pytest.approx(5.5)
    picture = charts.panels_svg([Panel("loss", [Curve("loss", steps, values)])], "loss")
    assert len(picture) < 60_000


def test_smoothing_is_centred():
    values = np.arange(80.0)
    assert charts._smooth(values)[2:-2] == pytest.approx(values[2:-2])  # a straight line is its own mean
    assert charts._smooth(np.ones(50)) == pytest.approx(1.0)


def test_pictures_are_described_fit_their_page_and_repeat():
    curve = Curve("a", np.arange(5), np.arange(5.0), np.arange(5.0) - 1, np.arange(5.0) + 1)
    draw = lambda: charts.panels_svg([Panel("p", [curve])], 'the "p" curve', [(0, "sft"), (2, "grpo")])
    page = Page(draw())
    tag, attributes = page.elements[0]
    assert tag == "svg" and attributes["aria-label"] == 'the "p" curve' and attributes["role"] == "img"
    assert "width" not in attributes and "height" not in attributes and "viewbox" in attributes
    assert "grpo" in page.text and draw() == draw()
