"""Alerts, and the files of lines that they and the metrics stand in."""

import pytest

from rl_posttrain.observability import alerts, lines


def test_alerts_come_back_as_written(tmp_path):
    assert alerts.read(tmp_path) == []
    alerts.append(tmp_path, alerts.Alert(3, "entropy_collapse", "entropy is 0", figures={"entropy": float("nan")}))
    alerts.append(tmp_path, alerts.Alert(7, "regression", "worse", "math", {"before": 0.5, "after": 0.25}))
    first = {
        "step": 3,
        "name": "entropy_collapse",
        "domain": None,
        "message": "entropy is 0",
        "figures": {"entropy": "nan"},
    }
    second = {
        "step": 7,
        "name": "regression",
        "domain": "math",
        "message": "worse",
        "figures": {"before": 0.5, "after": 0.25},
    }
    assert alerts.read(tmp_path) == [first, second]
    alerts.truncate_after(tmp_path, 6)
    assert alerts.read(tmp_path) == [first]


def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert lines.read(path) == [{"step": 1}, {"step": 2}]
    lines.truncate_after(path, 1)
    lines.append(path, {"step": 2, "again": True})
    assert lines.read(path) == [{"step": 1}, {"step": 2, "again": True}]


def test_a_last_line_torn_inside_a_number_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n12')  # valid JSON, but not a whole line
    assert lines.read(path) == [{"step": 1}]


def test_damage_elsewhere_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2"):
        lines.read(path)


def test_append_refuses_what_is_not_json(tmp_path):
    with pytest.raises(ValueError):
        lines.append(tmp_path / "x.jsonl", {"loss": float("inf")})
    assert lines.read(tmp_path / "x.jsonl") == []


def test_truncating_an_absent_file_makes_none(tmp_path):
    lines.truncate_after(tmp_path / "x.jsonl", 3)
    assert not (tmp_path / "x.jsonl").exists()
