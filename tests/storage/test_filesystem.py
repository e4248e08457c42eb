"""Files behind any URL."""

import errno
import os
import subprocess
import sys

import pytest

from rl_posttrain.storage import filesystem


def test_o26_join_keeps_the_scheme_and_makes_local_paths_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert filesystem.join("gs://b/c") == "gs://b/c"
    assert filesystem.join("gs://b/c/", "/d/", "e.txt") == "gs://b/c/d/e.txt"
    assert filesystem.join("gs://b", "c") == "gs://b/c"
    assert filesystem.join("runs/a", "..", "b") == str(tmp_path / "runs/b")
    assert filesystem.join(tmp_path / "x") == str(tmp_path / "x")
    assert filesystem.join("file:///a/b", "c") == "/a/b/c"
    assert filesystem.join("~/runs") == os.path.join(os.path.expanduser("~"), "runs")
    assert filesystem.is_local("runs") and not filesystem.is_local("gs://b/c")


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_files_come_back_as_written(scheme, tmp_path):
    root = scheme + str(tmp_path)
    name = filesystem.join(root, "a", "b.bin")
    assert not filesystem.exists(name)
    assert list(filesystem.list(root)) == list(filesystem.list(filesystem.join(root, "nowhere"))) == []
    filesystem.write_atomic(name, b"\x00first")
    filesystem.write_atomic(name, b"\xffsecond")
    filesystem.write_atomic(filesystem.join(root, "c.bin"), b"")
    assert filesystem.read(name) == b"\xffsecond"
    assert filesystem.list(root, recursive=True) == [name, filesystem.join(root, "c.bin")]
    assert filesystem.list(root) == [filesystem.join(root, "a"), filesystem.join(root, "c.bin")]
    filesystem.remove(filesystem.join(root, "a"))
    assert filesystem.list(root, recursive=True) == [filesystem.join(root, "c.bin")]
    with pytest.raises(FileNotFoundError):
        filesystem.read(name)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    name = tmp_path / "file"
    filesystem.write_atomic(name, b"old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        filesystem.write_atomic(name, b"new and longer")
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert name.read_bytes() == b"old"


def test_makedirs_may_be_repeated(tmp_path):
    filesystem.makedirs(tmp_path / "a" / "b")
    filesystem.makedirs(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_files_and_trajectories_import_no_jax():
    program = (
        "import sys; import rl_posttrain.storage.trajectories, rl_posttrain.observability.alerts; "
        "import rl_posttrain.observability.metrics, rl_posttrain.observability.progress; "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
