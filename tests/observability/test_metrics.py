"""Writers, averages over domains, and intervals."""

import json
import math
import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from rl_posttrain.observability import metrics
from rl_posttrain.observability.metrics import MetricsWriter


def written(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def tensorboard(workdir):
    """{tag: [(step, value)]} as a TensorBoard reader sees it: a session start purges what it starts again."""
    found = {}
    for path in sorted((workdir / "tensorboard").glob("events.*")):
        content, place = path.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            event = Event.FromString(content[place + 12 : place + 12 + length])
            place += 12 + length + 4  # length and its checksum, the event and its checksum
            if event.session_log.status == SessionLog.START:
                for tag in found:
                    found[tag] = [point for point in found[tag] if point[0] < event.step]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return {tag: points for tag, points in found.items() if points}


def test_each_step_is_a_line_and_a_point(tmp_path):
    writer = MetricsWriter(tmp_path / "run")
    writer.write(1, "sft", {"loss/total": np.float32(0.5), "tokens/per_s": 8, "done": True})
    assert written(tmp_path / "run") == [{"step": 1, "stage": "sft", "loss/total": 0.5, "tokens/per_s": 8, "done": 1}]
    writer.write(2, "grpo", {"loss/total": 0.25}, {"advantages": [1.0, -1.0], "none": []}, {"sample": "text"})
    writer.close()
    found = tensorboard(tmp_path / "run")
    assert found["loss/total"] == [(1, 0.5), (2, 0.25)]
    assert "advantages" in found and "none" not in found
    assert any(tag.startswith("sample") for tag in found)


def test_numbers_that_json_does_not_know_are_null_and_named(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, "grpo", {"a": math.nan, "b": -math.inf, "c": 1.0}, {"h": [1.0, math.nan]})
    writer.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert written(tmp_path) == [
        {"step": 1, "stage": "grpo", "a": None, "b": None, "c": 1.0, "nonfinite": {"a": "nan", "b": "-inf"}}
    ]
    assert list(tensorboard(tmp_path)) == ["c"]


def test_a_metric_that_is_no_number_is_refused(tmp_path):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(TypeError, match="loss/total"):
        writer.write(1, "sft", {"loss/total": np.ones(2)})
    with pytest.raises(TypeError, match="name='x'"):
        writer.write(1, "sft", {"name": "x"})
    writer.close()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_o31_a_resumed_run_shows_each_step_once_and_rising(tmp_path):
    crashed = MetricsWriter(tmp_path)
    for step in range(1, 151):
        crashed.write(step, "grpo", {"loss/total": float(step)})
    crashed.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 151, "stage": "gr')  # the crash tore the last line
    resumed = MetricsWriter(tmp_path, purge_after=100)
    for step in range(101, 201):
        resumed.write(step, "grpo", {"loss/total": -float(step)})
    resumed.close()
    expected = [(step, float(step)) for step in range(1, 101)] + [(step, -float(step)) for step in range(101, 201)]
    assert [(entry["step"], entry["loss/total"]) for entry in written(tmp_path)] == expected
    assert tensorboard(tmp_path)["loss/total"] == expected


def test_o31_with_the_reader_of_tensorboard_itself(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    test_o31_a_resumed_run_shows_each_step_once_and_rising(tmp_path)
    reader = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss/total")] == list(range(1, 201))


def test_a_new_run_drops_what_an_attempt_without_a_checkpoint_left(tmp_path):
    for value in (1.0, 2.0):
        writer = MetricsWriter(tmp_path)
        for step in (0, 1):
            writer.write(step, "sft", {"loss/total": value})
        writer.close()
    assert [entry["loss/total"] for entry in written(tmp_path)] == [2.0, 2.0]
    assert tensorboard(tmp_path)["loss/total"] == [(0, 2.0), (1, 2.0)]


def test_o32_domain_averages_with_uneven_fields():
    math_samples = [{"accuracy": 1}, {"accuracy": 1}, {"accuracy": 1}, {"accuracy": 0}]
    code_samples = [{"accuracy": 0, "compile_s": 0.25, "notes": None}]
    assert metrics.aggregate({"math": math_samples, "code": code_samples, "empty": []}) == {
        "domain/math/accuracy": 0.75,
        "domain/code/accuracy": 0.0,
        "domain/code/compile_s": 0.25,
        "micro/accuracy": 0.6,
        "macro/accuracy": 0.375,
        "micro/compile_s": 0.25,
        "macro/compile_s": 0.25,
    }


@pytest.mark.parametrize(
    ("successes", "n", "expected"),
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))],
)
def test_wilson_against_published_intervals(successes, n, expected):
    assert metrics.wilson(successes, n) == pytest.approx(expected, abs=6e-5)


def test_wilson_at_the_edges():
    assert metrics.wilson(0, 0) == (0.0, 1.0)
    low, high = metrics.wilson(20, 20)
    assert high == 1.0 and low == pytest.approx(1 - 0.1611, abs=6e-5)
    with pytest.raises(ValueError, match="3 successes of 2"):
        metrics.wilson(3, 2)


def test_pass_at_k_against_all_choices():
    # 5 samples of which 2 pass: of the C(5, 3) = 10 choices of three, C(3, 3) = 1 has no pass.
    assert metrics.pass_at_k(5, 2, 3) == pytest.approx(0.9)
    assert metrics.pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert metrics.pass_at_k(5, 0, 5) == 0.0 and metrics.pass_at_k(5, 3, 3) == 1.0
    assert metrics.pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="k=4 of n=3"):
        metrics.pass_at_k(3, 1, 4)
    with pytest.raises(ValueError, match="c=4"):
        metrics.pass_at_k(3, 4, 1)


def test_paired_interval_by_hand():
    # 10 pairs: 4 won, 1 lost, 5 alike. With half a pair in each outcome: n = 12, mean 3/12, squares (5 + 1)/12.
    before = [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    after = [1, 1, 1, 1, 0, 1, 1, 0, 0, 0]
    difference, low, high = metrics.paired_interval(before, after)
    half = 1.96 * math.sqrt((0.5 - 0.25**2) / 12)
    assert difference == pytest.approx(0.3)
    assert (low, high) == pytest.approx((0.25 - half, 0.25 + half))
    # Agresti and Min's formula in counts: b* = 1.5, c* = 4.5, n* = 12.
    spread = math.sqrt(4.5 + 1.5 - (4.5 - 1.5) ** 2 / 12) / 12
    assert half == pytest.approx(1.96 * spread)


def test_paired_interval_keeps_a_width_and_its_bounds():
    difference, low, high = metrics.paired_interval([1.0] * 50, [1.0] * 50)
    assert difference == 0.0 and low == -high and 0.0 < high < 0.06
    difference, low, high = metrics.paired_interval([0.0] * 50, [1.0] * 50)
    assert difference == high == 1.0
    assert low == pytest.approx(50 / 52 - 1.96 * math.sqrt((51 / 52 - (50 / 52) ** 2) / 52))
    with pytest.raises(ValueError, match="same tasks"):
        metrics.paired_interval([1.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="same tasks"):
        metrics.paired_interval([], [])
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        metrics.paired_interval([0.0], [2.0])


def test_paired_interval_covers_the_truth():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        before = generator.random(40) < 0.3
        after = before ^ (generator.random(40) < np.where(before, 0.1, 0.4))
        _, low, high = metrics.paired_interval(before, after)
        hits += low <= 0.7 * 0.4 - 0.3 * 0.1 <= high
    assert 0.92 <= hits / 400 <= 0.99  # 95% aimed at; the standard error of this count is 1.1%


def test_macro_interval_by_hand():
    value, low, high = metrics.macro_interval([(0.5, 0.4, 0.6), (0.9, 0.6, 1.0)])
    assert value == pytest.approx(0.7)
    assert low == pytest.approx(0.7 - math.sqrt(0.1**2 + 0.3**2) / 2)
    assert high == pytest.approx(0.7 + math.sqrt(0.1**2 + 0.1**2) / 2)
    assert metrics.macro_interval([(0.5, 0.4, 0.7)]) == pytest.approx((0.5, 0.4, 0.7))
    with pytest.raises(ValueError, match="no domains"):
        metrics.macro_interval([])


def test_calibration_hand_computed():
    curve = metrics.calibration_curve([0.1, 0.15, 0.5, 0.9, 1.0], [0, 1, 1, 1, 0], bins=2)
    assert [(row.low, row.high, row.count) for row in curve] == [(0.0, 0.5, 2), (0.5, 1.0, 3)]
    assert [row.predicted for row in curve] == pytest.approx([0.125, 0.8])
    assert [row.observed for row in curve] == pytest.approx([0.5, 2 / 3])
    assert (curve[0].observed_low, curve[0].observed_high) == metrics.wilson(1, 2)
    assert metrics.calibration_error(curve) == pytest.approx((2 * 0.375 + 3 * (0.8 - 2 / 3)) / 5)
    assert [row.low for row in metrics.calibration_curve([0.95, 0.05], [1, 0])] == [0.0, 0.9]  # empty bins are left out


def test_calibration_of_pairs_is_of_the_one_that_is_scored_higher():
    odds = math.log(3)  # a probability of 0.75
    curve = metrics.pair_calibration([odds, -odds, odds, odds, 0.0], bins=5)
    assert [row.count for row in curve] == [1, 4]
    assert (curve[0].predicted, curve[0].observed) == (0.5, 0.5)
    assert (curve[1].predicted, curve[1].observed) == pytest.approx((0.75, 0.75))
    assert metrics.calibration_error(curve) == pytest.approx(0.0)
    far = metrics.pair_calibration([1e4, -1e4])
    assert [(row.predicted, row.observed) for row in far] == [(1.0, 0.5)]


@pytest.mark.parametrize(
    "probabilities, outcomes, bins",
    [([0.5], [1, 0], 10), ([], [], 10), ([0.5], [1], 0), ([1.1], [1], 10), ([math.nan], [1], 10), ([0.5], [2], 10)],
)
def test_calibration_refuses_what_is_no_probability(probabilities, outcomes, bins):
    with pytest.raises(ValueError, match="need as many|must be in"):
        metrics.calibration_curve(probabilities, outcomes, bins)
