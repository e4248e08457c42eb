"""What produced a run."""

import json
import subprocess
import sys

import jax

from rl_posttrain.observability import manifest


def test_the_manifest_says_what_ran_where(tmp_path):
    entry = manifest.write(tmp_path, 7, {"b": 1, "a": [0.1]}, data={"tasks": "ab12"})
    assert json.loads((tmp_path / "manifest.json").read_text()) == entry
    assert entry["seed"] == 7 and entry["device_count"] == jax.device_count() == 8
    assert entry["device_kinds"] == ["cpu"] and entry["backend"] == "cpu"
    assert entry["versions"]["jax"] == jax.__version__
    assert entry["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(manifest.PACKAGES) < set(entry["versions"])
    assert entry["data_sha256"] == {"tasks": "ab12"} and entry["processor"]


def test_a_resumed_run_keeps_the_first_manifest(tmp_path):
    first = manifest.write(tmp_path, 7, {})
    manifest.write(tmp_path, 7, {})
    third = manifest.write(tmp_path, 8, {})
    assert {key: third[key] for key in first} == first
    assert [entry["seed"] for entry in third["resumes"]] == [7, 8]


def test_the_hash_is_of_the_values_not_their_order():
    assert manifest.config_hash({"a": 1, "b": {"c": 2, "d": 3}}) == manifest.config_hash(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert manifest.config_hash({"a": 1}) != manifest.config_hash({"a": 2})
    # SHA-256 of the text {"a":1}
    assert manifest.config_hash({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


def test_the_commit_and_whether_files_differ_from_it(tmp_path):
    assert manifest.source(tmp_path) == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "code.py").write_text("1")
    for command in (["init", "-q"], ["add", "code.py"], ["commit", "-qm", "first"]):
        subprocess.run(git + command, check=True)
    commit, dirty = manifest.source(tmp_path)
    assert commit is not None and len(commit) == 40 and dirty is False
    (tmp_path / "untracked.txt").write_text("")
    assert manifest.source(tmp_path) == (commit, False)
    (tmp_path / "code.py").write_text("2")
    assert manifest.source(tmp_path) == (commit, True)
