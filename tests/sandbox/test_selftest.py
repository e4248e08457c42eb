"""The self-test passes here, and refuses by name when a protection is taken away."""

import json
import os
import shutil
import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_posttrain.sandbox import answers, calls, cgroups, launch, programs, selftest
from rl_posttrain.sandbox import pool as pool_module
from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable, slot_command
from rl_posttrain.sandbox.job import Job
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sandbox.session import Session

ALLOW_EVERYTHING = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # one instruction: return "allow"
ROOT = os.geteuid() == 0


@pytest.mark.parametrize("runs_per_slot", [1000, 1])
def test_every_protection_is_there(runs_per_slot):
    with Pool(PoolConfig(runs_per_slot=runs_per_slot)) as pool:
        selftest.require(pool)


def test_the_names_of_protections_are_distinct():
    names = [probe.protection for probe in selftest.PROBES]
    assert len(names) == len(set(names))


# ---- ways to take a protection away: (monkeypatch, folder) -> None ----


def no_filter(patch, folder):
    patch.setattr(pool_module, "build_filter", lambda name: ALLOW_EVERYTHING)


def command(change):
    """Containers whose command line `change` has seen."""

    def take(patch, folder):
        patch.setattr(pool_module, "slot_command", lambda *arguments, **options: change(*arguments, **options))

    return take


def writable(*arguments, **options):
    argv = slot_command(*arguments, **options)
    while "--remount-ro" in argv:
        index = argv.index("--remount-ro")
        del argv[index : index + 2]
    return argv


def writable_devices(*arguments, **options):
    argv = slot_command(*arguments, **options)
    index = argv.index("/dev", argv.index("--remount-ro"))
    return argv[: index - 1] + argv[index + 1 :]


def with_proc(*arguments, **options):
    return slot_command(*arguments, **{**options, "proc": True})


def with_arguments(*added):
    def change(bubblewrap, interpreter, binds, *others, **options):
        return slot_command(bubblewrap, interpreter, [*binds, *added], *others, **options)

    return change


def limits(**changed):
    """Runs that are told other limits than were asked for, and no control groups that would hold them all the same."""

    def take(patch, folder):
        original = Job.message

        def message(self, run, channels):
            fields = json.loads(original(self, run, channels))
            fields["limits"] |= changed
            return json.dumps(fields).encode()

        patch.setattr(Job, "message", message)
        patch.setattr(cgroups, "find", lambda: (None, "taken away"))

    return take


def as_root(patch, folder):
    """The kernel does not limit root's processes."""
    patch.setattr(pool_module, "unprivileged_user", lambda wanted: None)
    patch.setattr(cgroups, "find", lambda: (None, "taken away"))


def inside(*changes):
    """Fork servers and harnesses with pieces of their text replaced."""

    def take(patch, folder):
        source = Path(launch.__file__).parent
        for name in ("launcher.py", *launch.HARNESS):
            shutil.copy(source / name, folder)
        for name, old, new in changes:
            text = (folder / name).read_text()
            assert text.count(old) == 1, f"{name} no longer has {old!r}"
            (folder / name).write_text(text.replace(old, new))
        patch.setattr(launch, "__file__", str(folder / "launch.py"))

    return take


def function(module, name, replacement):
    def take(patch, folder):
        patch.setattr(module, name, replacement)

    return take


def believing(patch, folder):
    """Replies are taken for answers whoever wrote them and whenever."""
    original = Session.ask

    def ask_session(self, question):
        replies = self._incoming["replies"]
        if not replies:
            return original(self, question)
        (length,) = struct.unpack_from(">I", replies)
        answer = bytes(replies[4 : 4 + length])
        del replies[: 4 + length]
        return answer

    def ask(session, question, wanted):
        reply = session.ask(json.dumps({"id": "1", **question}).encode())
        assert wanted in reply, reply
        return reply.partition(wanted)[2][:-1]

    patch.setattr(Session, "ask", ask_session)
    patch.setattr(calls, "ask", ask)
    patch.setattr(answers, "TAMPERING", set())


MOUNT = 'mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())'


def one_tmp(patch, folder):
    inside(("forkserver.py", MOUNT, ""))(patch, folder)
    command(with_arguments("--tmpfs", "/tmp"))(patch, folder)


TAKEN = {
    "no filter": (no_filter, ["no other system calls", "no new processes"]),
    "no filter installed": (
        inside(("forkserver.py", "PR_SET_SECCOMP, 2,", "PR_SET_DUMPABLE, 0,")),
        ["no other system calls", "no new processes"],
    ),
    "everything writable": (command(writable), ["the file system is read-only"]),
    "devices writable": (command(writable_devices), ["the file system is read-only"]),
    "a /proc": (command(with_proc), ["the machine's files are hidden"]),
    "the machine's /etc": (command(with_arguments("--ro-bind", "/etc", "/etc")), ["the machine's files are hidden"]),
    "no memory limit": (limits(address_space=-1, data_bytes=-1), ["the memory limit"]),
    "no file limit": (limits(file_bytes=1 << 30), ["the file limit"]),
    "no thread limit": (limits(processes=1000), ["the thread limit"]),
    "no processor limit": (limits(cpu_seconds=60.0), ["the processor time limit"]),
    "no wall limit": (function(Session, "_starved", lambda self, deadline: True), ["the wall time limit"]),
    "no output limit": (function(Session, "_room", lambda self, name: 1 << 30), ["the output limit"]),
    "capabilities": (
        inside(
            (
                "forkserver.py",
                'check(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")',
                "",
            )
        ),
        ["no capabilities"],
    ),
    "new privileges": (
        # Without, the kernel refuses filters, so these go as well.
        inside(
            ("forkserver.py", 'check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")', ""),
            ("forkserver.py", "PR_SET_SECCOMP, 2,", "PR_SET_DUMPABLE, 0,"),
        ),
        ["no other system calls"],
    ),
    "the slot's descriptors": (
        inside(("forkserver.py", "os.closerange(CONTROL + 1, 1 << 20)", "")),
        ["no descriptors but the run's own"],
    ),
    "the control socket": (
        inside(("forkserver.py", "os.close(CONTROL)\n", "pass\n")),
        ["no descriptors but the run's own"],
    ),
    "no /tmp": (inside(("forkserver.py", MOUNT, "")), ["files of a run"]),
    "a /tmp that stays": (one_tmp, ["a fresh /tmp for each run"]),
    "no pid namespace": (
        inside(("forkserver.py", "0x8000000 | 0x20000000  #", "0x8000000  #")),
        ["killing every process in sight"],
    ),
    "any answer": (function(calls, "same", lambda *_: True), ["wrong answers fail"]),
    "any output": (function(programs, "_agree", lambda *_: True), ["wrong programs fail"]),
    "no answer": (
        function(calls, "why_ended", lambda execution: answers.Answer("pass")),
        ["an early exit is not a pass"],
    ),
    "forged answers": (believing, ["forged answers are seen"]),
    "forged answers unseen": (function(answers, "TAMPERING", set()), ["forged answers are seen"]),
}
if ROOT:
    TAKEN["no user of its own"] = (as_root, ["the thread limit"])


@pytest.fixture
def folder():
    """A folder that the sandbox's user can enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


SLOW = ("no wall limit", "no processor limit")  # they wait for what does not end


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TAKEN])
def test_a_protection_that_is_missing_is_named(monkeypatch, folder, name):
    take, missing = TAKEN[name]
    take(monkeypatch, folder)
    kept = [
        probe for probe in selftest.PROBES if probe.protection in ("right functions pass", "files of a run", *missing)
    ]
    monkeypatch.setattr(selftest, "PROBES", tuple(kept))
    with Pool(PoolConfig(slots=1)) as pool, pytest.raises(SandboxUnavailable) as refused:
        selftest.require(pool)
    said = str(refused.value)
    assert "experiments.sandbox --check" in said
    assert all(f"{protection} (" in said for protection in missing), said
    if "killing every process in sight" not in missing:  # a killed slot takes the probes after it along, at times
        assert said.count("a probe ended as") == len(missing)  # nothing else is named


def test_a_run_does_not_start_without_a_protection(monkeypatch):
    from rl_posttrain import services

    config = SimpleNamespace(sandbox=PoolConfig(slots=1))
    with services.tools(config) as opened:  # type: ignore[arg-type]  # it looks at this section alone
        assert opened.pool is not None
    monkeypatch.setattr(pool_module, "build_filter", lambda name: ALLOW_EVERYTHING)
    with pytest.raises(SandboxUnavailable, match="no other system calls"), services.tools(config):  # type: ignore[arg-type]
        raise AssertionError("it started")
