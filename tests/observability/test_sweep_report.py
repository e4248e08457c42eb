"""A sweep's numbers and page: pairs of seed and prompt, intervals, and every point shown."""

import json
from pathlib import Path

import numpy as np
import pytest

from rl_posttrain.observability import sweep_report
from rl_posttrain.observability.metrics import macro_interval, paired_interval, wilson
from rl_posttrain.observability.sweep_report import Point, SeedRun


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


def write_run(folder, outcomes, seed, options=None):
    """A finished run with the outcomes of each domain's held-out prompts; None where the verifier failed."""
    folder.mkdir(parents=True)
    rows = []
    for domain, passed in outcomes.items():
        judged = [value for value in passed if value is not None]
        low, high = wilson(sum(judged), len(judged))
        value = sum(judged) / len(judged)
        rows.append(dict(stage="grpo", step=4, domain=domain, metric="accuracy", value=value, low=low, high=high,
                         n=len(judged), outcomes=passed))  # fmt: skip
    triple = macro_interval([(row["value"], row["low"], row["high"]) for row in rows])
    rows.append({**rows[0], "domain": "macro", **dict(zip(("value", "low", "high"), triple))})
    (folder / "evaluation.json").write_text(json.dumps(rows))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 4, "stage": "grpo", "time/step_s": 1.5}) + "\n")
    tasks = {name: {"options": options or {}} for name in outcomes}
    (folder / "config.json").write_text(json.dumps({"seed": seed, "evaluation": {"items": 4}, "tasks": tasks}))


def points_of(*names, seeds=2):
    return [Point(n, {"x": n}, [SeedRun(s, f"{n}/{s}", "finished") for s in range(seeds)]) for n in names]


def test_differences_are_paired_by_seed_and_prompt(tmp_path):
    first = {0: {"a": [0, 0, 1, 1], "b": [0, 1, 1, 1]}, 1: {"a": [1, 0, 0, 0], "b": [1, 1, 1, None]}}
    second = {0: {"a": [1, 0, 1, 1], "b": [0, 0, 1, 1]}, 1: {"a": [1, 1, 1, 0], "b": [1, 0, 1, 1]}}
    for seed in (0, 1):
        write_run(tmp_path / "one" / str(seed), first[seed], seed)
        write_run(tmp_path / "two" / str(seed), second[seed], seed)
    sweep_report.write(tmp_path, "t", points_of("one", "two"))
    one, two = results(tmp_path)
    assert one["accuracy"]["a"]["by_seed"] == {"0": 0.5, "1": 0.25} and one["accuracy"]["a"]["value"] == 0.375
    a, b, macro = (two["difference"][name] for name in ("a", "b", "macro"))
    expected = {
        "a": paired_interval([0, 0, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1, 1, 0]),
        "b": paired_interval([0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 1]),  # without the prompt that was not judged
    }
    for entry, name in ((a, "a"), (b, "b")):
        assert (entry["value"], entry["low"], entry["high"]) == pytest.approx(expected[name])
    assert (a["n"], b["n"], macro["n"]) == (8, 7, 15)
    assert (macro["value"], macro["low"], macro["high"]) == pytest.approx(macro_interval(list(expected.values())))
    assert a["by_seed"] == {"0": 0.25, "1": 0.5} and b["by_seed"] == pytest.approx({"0": -0.25, "1": -1 / 3})
    assert macro["by_seed"] == pytest.approx({"0": 0.0, "1": 1 / 12})
    # Student's t with one degree of freedom: 12.706 * sd / sqrt(2), where sd = difference / sqrt(2)
    half = 12.7062 * (1 / 12) / 2
    assert macro["over_seeds"] == pytest.approx([1 / 24 - half, 1 / 24 + half], rel=1e-4)
    assert macro["over_seeds"][0] < macro["low"] and macro["high"] < macro["over_seeds"][1]


def test_seeds_that_happen_to_agree_are_no_more_certain_than_their_prompts(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "one" / str(seed), {"a": [0, 1, 1, 0]}, seed)
        write_run(tmp_path / "two" / str(seed), {"a": [1, 1, 1, 0]}, seed)
    sweep_report.write(tmp_path, "t", points_of("one", "two"))
    moved = results(tmp_path)[1]["difference"]["a"]
    assert moved["by_seed"] == {"0": 0.25, "1": 0.25}
    assert moved["over_seeds"] == [moved["low"], moved["high"]] and moved["low"] < 0.25 < moved["high"]


def test_one_seed_has_no_interval_over_seeds(tmp_path):
    write_run(tmp_path / "one" / "0", {"a": [0, 1, 1, 1]}, 0)
    write_run(tmp_path / "two" / "0", {"a": [1, 1, 1, 1]}, 0)
    sweep_report.write(tmp_path, "t", points_of("one", "two", seeds=1))
    assert results(tmp_path)[1]["difference"]["macro"]["over_seeds"] is None


def test_points_with_other_held_out_prompts_are_not_compared(tmp_path):
    """A sweep over a task's options asks other questions: there is nothing to pair."""
    write_run(tmp_path / "one" / "0", {"a": [0, 1, 1, 1]}, 0)
    write_run(tmp_path / "two" / "0", {"a": [1, 1, 1, 1]}, 0, options={"letters": 9})
    write_run(tmp_path / "three" / "0", {"a": [1, 1, 1, 1], "b": [1, 1, 1, 1]}, 0)
    sweep_report.write(tmp_path, "t", points_of("one", "two", "three", seeds=1))
    _, two, three = results(tmp_path)
    assert two["difference"] == {} and two["accuracy"]["macro"]["value"] == 1.0
    assert list(three["difference"]) == ["a"]  # no macro: it would be of other domains than the accuracy's


def test_the_report_shows_every_point_however_many(tmp_path):
    names = [f"p{i}<i>" for i in range(13)]
    rng = np.random.default_rng(0)
    for name in names:
        write_run(tmp_path / name / "0", {"a": rng.integers(0, 2, 4).tolist()}, 0)
    path = sweep_report.write(tmp_path, "a <b>title", points_of(*names, seeds=1))
    page = Path(path).read_text()
    assert "<b>title" not in page and "<i>" not in page
    for number in range(13):
        assert f"{number + 1}. p{number}&lt;i&gt;" in page
    for heading in ("1, 2, 3, 4, 5, 6", "1, 7, 8, 9, 10, 11", "1, 12, 13"):  # colours are never used twice
        assert f"Curves, points {heading}<" in page


def test_nothing_finished_still_makes_a_report(tmp_path):
    points = [Point("one", {}, [SeedRun(0, "one/0", "failed", "why")])]
    assert "why" in Path(sweep_report.write(tmp_path, "t", points)).read_text()
    assert results(tmp_path)[0]["accuracy"] == {}
