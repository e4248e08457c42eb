"""A few attacks and right programs, before the first verdict of a run: a protection that is missing shows now.

    selftest.require(pool)   # raises, naming what is missing

Each protection is probed by a program that returns what it could do against it. The whole suite of attacks is
`python -m experiments.sandbox --attack`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable
from rl_posttrain.sandbox.judge import judge
from rl_posttrain.sandbox.kinds import Call, FunctionTests, StdioTests, Tests
from rl_posttrain.sandbox.languages import LANGUAGES, Language
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool
from rl_posttrain.sandbox.seccomp import Profile
from rl_posttrain.types import Verdict, VerdictStatus

LIMITS = Limits(cpu_seconds=1.0, wall_seconds=20.0, memory_bytes=256 << 20, processes=8, file_bytes=1 << 20)


@dataclass(frozen=True)
class Probe:
    """A program, and the verdict that it gets where the protection holds."""

    protection: str
    code: str
    tests: Tests
    right: tuple[VerdictStatus, ...] = ("pass",)
    profile: Profile = "single"
    limits: Limits = LIMITS


def _returns(expected: object) -> FunctionTests:
    return FunctionTests("probe", (Call((), expected),))


def _attempts(*statements: str) -> str:
    """A program whose `probe()` returns those of the statements that raised nothing."""
    return (
        "import ctypes, os, socket, threading\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(name, *arguments):\n"
        "    if getattr(libc, name)(*arguments) < 0: raise OSError(ctypes.get_errno())\n"
        "def probe():\n    done = []\n"
        f"    for statement in {statements!r}:\n"
        "        try:\n            exec(statement)\n"
        "        except (OSError, RuntimeError, MemoryError):\n            continue\n"
        "        done.append(statement)\n    return done\n"
    )


PROBES = (
    Probe("right functions pass", "def probe():\n    return [1, 'a', {2: 3.5}]\n", _returns([1, "a", {2: 3.5}])),
    Probe("right programs pass", "print(int(input()) + 1)\n", StdioTests((("41\n", "42\n"),))),
    Probe("wrong answers fail", "def probe():\n    return True\n", _returns(1), ("wrong",)),
    Probe("wrong programs fail", "print(int(input()) + 2)\n", StdioTests((("41\n", "42\n"),)), ("wrong",)),
    Probe("an early exit is not a pass", "import os\nos._exit(0)\n", _returns(1), ("error",)),
    Probe(
        "forged answers are seen",
        'import os, struct\nfor frame in (b\'{"id":"0","ok":true}\', b\'{"id":"0","value":1}\'):\n'
        "    os.write(4, struct.pack('>I', len(frame)) + frame)\ndef probe():\n    return 2\n",
        _returns(1),
        ("malformed",),
    ),
    Probe(
        "no other system calls",
        _attempts(
            "call('unshare', 0x10000000)",
            "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
            "call('ptrace', 0, 0, 0, 0)",
            "call('setuid', 0)",
            "socket.socket(socket.AF_INET)",
            "socket.socket(socket.AF_UNIX)",
            "call('memfd_create', b'x', 0)",
        ),
        _returns([]),
    ),
    Probe(
        "no capabilities",
        "import ctypes\nlibc = ctypes.CDLL(None)\ndef probe():\n"
        "    header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "    return libc.capget(header, held), list(held), libc.prctl(39, 0, 0, 0, 0)\n",
        _returns((0, [0] * 6, 1)),  # none at all, and no new privileges either
    ),
    Probe(
        "no descriptors but the run's own",
        "import os\ndef probe():\n    found = []\n    for number in range(1024):\n"
        "        try:\n            os.fstat(number)\n        except OSError:\n            continue\n"
        "        found.append(number)\n    return found\n",
        _returns([0, 1, 2, 3, 4]),
    ),
    Probe("no new processes", _attempts("os.fork() or os._exit(0)", "os.execv('/bin/true', ['true'])"), _returns([])),
    Probe(
        "the file system is read-only",
        _attempts(*(f"open({path!r}, 'w')" for path in ("/x", "/usr/x", "/dev/x", "/harness/codec.py", "/shared/x"))),
        _returns([]),
    ),
    Probe(
        "the machine's files are hidden",
        _attempts(
            "os.listdir('/proc/self')",
            "os.stat('/etc/passwd')",
            "os.stat('/home')",
            "os.stat('/root')",
            "os.stat('/sys')",
        ),
        _returns([]),
    ),
    Probe("files of a run", "def probe():\n    open('/tmp/left', 'w').write('x')\n", _returns(None)),
    Probe("a fresh /tmp for each run", "import os\ndef probe():\n    return os.listdir('/tmp')\n", _returns([])),
    Probe("the memory limit", _attempts("bytearray(400 << 20)"), _returns([])),
    Probe(
        "the file limit", _attempts("[open(f'/tmp/{i}', 'wb').write(bytes(1 << 18)) for i in range(6)]"), _returns([])
    ),
    Probe(
        "the thread limit",
        _attempts("[threading.Thread(target=threading.Event().wait, daemon=True).start() for _ in range(20)]"),
        _returns([]),
    ),
    Probe(
        "the processor time limit",
        "import time\ndef probe():\n    while time.process_time() < 1: pass\n",
        _returns(None),
        ("timeout",),
        limits=dataclasses.replace(LIMITS, cpu_seconds=0.1),
    ),
    Probe(
        "the wall time limit",
        "import time\ndef probe():\n    time.sleep(2)\n",
        _returns(None),
        ("timeout",),
        limits=dataclasses.replace(LIMITS, wall_seconds=0.1),
    ),
    Probe("the output limit", "def probe():\n    print('x' * (1 << 18))\n", _returns(None), ("error",)),
    Probe(
        "killing every process in sight",
        "import os\ndef probe():\n    os.kill(-1, 9)\n    os.kill(1, 9)\n    return 1\n",
        _returns(0),
        ("error", "wrong"),
        profile="multi",
    ),
    Probe("right functions pass after all that", "def probe():\n    return 7\n", _returns(7)),
)


def run(pool: Pool) -> Iterator[tuple[Probe, Verdict]]:
    """Every probe with the verdict that it got; it holds when the status is one of `probe.right`.

    Raises:
      SandboxUnavailable: nothing runs here at all.
    """
    for probe in PROBES:
        yield probe, judge(pool, probe.code, probe.tests, profile=probe.profile, limits=probe.limits)


def require(pool: Pool) -> None:
    """Runs the probes.

    Raises:
      SandboxUnavailable: a protection is missing; the message names it.
    """
    missing = [
        f"{probe.protection} (a probe ended as {verdict.status!r}, {verdict.detail[:200]})"
        for probe, verdict in run(pool)
        if verdict.status not in probe.right
    ]
    if missing:
        raise SandboxUnavailable(
            f"the sandbox does not protect on this machine; missing: {'; '.join(missing)}. No verdict from it could be "
            "trusted. `python -m experiments.sandbox --check` shows what the machine offers"
        )


def detect(pool: Pool) -> dict[str, str | None]:
    """Every language with None where a program of it runs, or why it does not and what to do."""
    return {name: _try(pool, language) for name, language in LANGUAGES.items()}


def _try(pool: Pool, language: Language) -> str | None:
    missing = language.missing()
    if missing is not None:
        return missing
    verdict = judge(pool, language.hello, StdioTests((("word\n", "word word\n"),)), language=language.name)
    if verdict.passed:
        return None
    said = verdict.executions[0].stderr.strip()[-300:] if verdict.executions else ""
    return f"its first program does not pass: {verdict.detail} {said}".strip()
