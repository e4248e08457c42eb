"""The trajectory store."""

import numpy as np
import pandas
import pyarrow as pa
import pytest

from rl_posttrain.storage import trajectories
from rl_posttrain.types import Flag, Rollout, Task, Verdict


def make(step, sample=0, text="an answer", reward=1.0):
    task = Task("strings/reverse", "train", 7, "Reverse abc.")
    rollout = Rollout(task, sample, (1, 2), (5, 6, 0), (-0.1, -0.25, -2.0), text, "stop", 0.7, step - 1)
    verdict = Verdict("pass", (True, False), "one of two", flags=(Flag("unsolicited_frame"),))
    return trajectories.record(rollout, verdict, reward, -0.5, step)


def names(directory):
    return [segment.url.rsplit("/", 1)[1] for segment in trajectories.segments(directory)]


def test_a_record_comes_back_with_its_values_and_types(tmp_path):
    writer = trajectories.TrajectoryWriter(tmp_path)
    writer.append(3, [make(3), make(3, sample=1, reward=None)])
    writer.flush(3)
    table = trajectories.read(tmp_path)
    assert table.schema == trajectories.SCHEMA
    row, failed = table.to_pylist()
    logprobs = row.pop("logprobs")
    assert np.array_equal(np.float32(logprobs), np.float32([-0.1, -0.25, -2.0]))
    assert row == {
        "step": 3, "task": "strings/reverse/train/7", "domain": "strings/reverse", "index": 7, "sample": 0,
        "prompt": "Reverse abc.", "text": "an answer", "prompt_tokens": [1, 2], "tokens": [5, 6, 0],
        "finish_reason": "stop", "temperature": 0.7, "policy_version": 2, "status": "pass",
        "tests": [True, False], "flags": ["unsolicited_frame"], "reward": 1.0, "advantage": -0.5,
        "detail": "one of two",
    }  # fmt: skip
    assert failed["reward"] is None


def test_pandas_reads_the_folder_as_one_table(tmp_path):
    writer = trajectories.TrajectoryWriter(tmp_path / "a")
    for step in (1, 2):
        writer.append(step, [make(step), make(step, sample=1)])
        writer.flush(step)
    (tmp_path / "a" / ".00000003-00000003-0.parquet.0f.tmp").write_bytes(b"left by a crash")
    frame = pandas.read_parquet(tmp_path / "a")
    assert list(frame["step"]) == [1, 1, 2, 2]
    assert frame["tokens"][0].dtype == np.int32 and frame["logprobs"][0].dtype == np.float32


def test_segments_hold_whole_steps_and_are_never_replaced(tmp_path):
    writer = trajectories.TrajectoryWriter(tmp_path, rows_per_segment=3)
    for step in (1, 2, 3):
        writer.append(step, [make(step, sample=0)])
        writer.append(step, [make(step, sample=1)])  # a step may come in parts
    assert names(tmp_path) == ["00000001-00000002-0.parquet"]
    writer.flush(2)  # nothing that old is waiting
    assert names(tmp_path) == ["00000001-00000002-0.parquet"]
    writer.flush(3)
    writer.append(3, [make(3, sample=2)])
    writer.flush(3)
    assert names(tmp_path)[1:] == ["00000003-00000003-0.parquet", "00000003-00000003-1.parquet"]
    assert trajectories.read(tmp_path)["sample"].to_pylist() == [0, 1, 0, 1, 0, 1, 2]
    assert trajectories.read(tmp_path, ["step"]).column_names == ["step"]


def test_flush_keeps_later_steps_in_memory(tmp_path):
    writer = trajectories.TrajectoryWriter(tmp_path)
    writer.append(1, [make(1)])
    writer.append(2, [make(2)])
    writer.flush(1)
    assert trajectories.read(tmp_path)["step"].to_pylist() == [1]
    writer.flush(2)
    assert trajectories.read(tmp_path)["step"].to_pylist() == [1, 2]


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_truncate_drops_what_is_past_the_checkpoint(scheme, tmp_path):
    directory = scheme + str(tmp_path)
    writer = trajectories.TrajectoryWriter(directory)
    for last, steps in ((2, (1, 2)), (5, (3, 4, 5)), (7, (6, 7))):
        for step in steps:
            writer.append(step, [make(step)])
        writer.flush(last)
    assert trajectories.truncate_after(directory, 7) == 0
    assert trajectories.truncate_after(directory, 4) == 2  # one segment rewritten, one removed
    assert trajectories.read(directory)["step"].to_pylist() == [1, 2, 3, 4]
    assert names(directory) == ["00000001-00000002-0.parquet", "00000003-00000004-0.parquet"]
    assert trajectories.truncate_after(directory, 4) == 0
    resumed = trajectories.TrajectoryWriter(directory)
    resumed.append(5, [make(5, text="again")])
    resumed.flush(5)
    assert trajectories.read(directory)["text"].to_pylist() == ["an answer"] * 4 + ["again"]
    assert trajectories.truncate_after(directory, 0) == 3
    assert trajectories.read(directory).num_rows == 0


def test_truncate_killed_before_it_removed_the_old_segment_can_run_again(tmp_path, monkeypatch):
    writer = trajectories.TrajectoryWriter(tmp_path)
    for step in (1, 2, 3):
        writer.append(step, [make(step)])
    writer.flush(3)

    def killed(url):
        raise KeyboardInterrupt(url)

    with monkeypatch.context() as patch:
        patch.setattr(trajectories.filesystem, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            trajectories.truncate_after(tmp_path, 2)
    trajectories.truncate_after(tmp_path, 2)
    assert trajectories.read(tmp_path)["step"].to_pylist() == [1, 2]


def test_text_that_is_not_unicode_is_kept_as_escapes(tmp_path):
    writer = trajectories.TrajectoryWriter(tmp_path)
    writer.append(1, [make(1, text="a\ud800b\x00é")])
    writer.flush(1)
    assert trajectories.read(tmp_path)["text"].to_pylist() == ["a\\ud800b\x00é"]


def test_wrong_rows_are_refused(tmp_path):
    writer = trajectories.TrajectoryWriter(tmp_path)
    with pytest.raises(ValueError, match="rewards"):
        writer.append(1, [make(1) | {"rewards": 1}])
    with pytest.raises(ValueError, match="step 1 was appended as step 2"):
        writer.append(2, [make(1)])
    writer.append(5, [make(5)])
    with pytest.raises(ValueError, match="step 4 comes after step 5"):
        writer.append(4, [make(4)])
    with pytest.raises(ValueError, match="rows_per_segment=0"):
        trajectories.TrajectoryWriter(tmp_path, rows_per_segment=0)


def test_an_absent_store_reads_as_empty(tmp_path):
    table = trajectories.read(tmp_path / "absent", ["step", "text"])
    assert table.num_rows == 0 and table.schema == pa.schema([("step", pa.int64()), ("text", pa.string())])
    assert trajectories.truncate_after(tmp_path / "absent", 3) == 0
