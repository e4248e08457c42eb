"""Adversarial programs: each must fail, change nothing outside, and leave a slot that passes right ones."""

import json
from pathlib import Path

import pytest

from rl_posttrain.sandbox.judge import Call, FunctionTests, judge
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.pool import Pool, PoolConfig

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "attacks"
GOOD = "def solve(n):\n    return sum(int(c) ** 2 for c in str(n))\n"
TESTS = FunctionTests("solve", tuple(Call(a, b) for a, b in (((7,), 49), ((12,), 5), ((999,), 243), ((1024,), 21))))
KINDS = {"func": "single", "func_exec": "multi", "func_pair": "single"}
SLOW = {"a27", "a29", "a31", "a33", "a34"}  # use up their wall or CPU limit, or walk the whole disk


def attacks():
    manifest = FOLDER / "manifest.json"
    if not manifest.is_file():
        return [pytest.param(None, marks=pytest.mark.skip(reason="no ../shared/attacks beside this checkout"))]
    rows = [row for row in json.loads(manifest.read_text()) if row["kind"] in KINDS]
    return [
        pytest.param(row, id=row["name"], marks=[pytest.mark.slow] if row["name"][:3] in SLOW else []) for row in rows
    ]


@pytest.fixture(scope="module")
def pool():
    with Pool(PoolConfig(slots=1, limits=Limits(wall_seconds=3.0))) as pool:
        yield pool


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    path = tmp_path_factory.mktemp("canary") / "CANARY"
    path.write_text("canary")
    path.chmod(0o666)
    return path


@pytest.mark.parametrize("attack", attacks())
def test_attack_fails_and_leaves_nothing(pool, canary, attack):
    code = (FOLDER / attack["file"]).read_text().replace("/srv/CANARY", str(canary))
    profile = KINDS[attack["kind"]]
    for _ in range(2 if attack["kind"] == "func_pair" else 1):
        verdict = judge(pool, code, TESTS, profile=profile)
    assert not verdict.passed
    assert verdict.status != "infra_error", verdict.detail
    assert canary.read_text() == "canary"
    assert judge(pool, GOOD, TESTS).passed


PROBES = {
    # what it is: (a program whose answers would be right only if the probe succeeded)
    "kernel calls": "a38_kernel_calls",
    "hidden tests": "a23_read_hidden_tests",
    "proc": "a37_proc_snoop",
}


@pytest.mark.parametrize("name", sorted(PROBES.values()))
def test_probes_find_nothing(pool, name):
    path = FOLDER / f"{name}.py"
    if not path.is_file():
        pytest.skip("no ../shared/attacks beside this checkout")
    verdict = judge(pool, path.read_text(), FunctionTests("solve", (Call((7,), []),)))
    found = verdict.detail
    assert verdict.passed or "FileNotFoundError" in found, found


HARNESS_PATCHES = {
    "send": "import sys\nh = sys.modules['harness']\nh.send.__code__ = (lambda p: None).__code__",
    "encode": "import sys\nc = sys.modules['codec']\nc.encode = lambda v: b'true'",
    "resolve": "import sys\nh = sys.modules['harness']\nh.resolve = lambda m, e: (lambda *a: True)",
    "replay": (
        "import sys\nh = sys.modules['harness']\nold = h.receive\n"
        'def receive():\n    q = old()\n    h.send(b\'{"id":"%s","value":true}\' % q[\'id\'].encode())\n    return q\n'
        "h.receive = receive"
    ),
    "main": "import sys\nsys.modules['__main__'].report(5, {'status': 0})",
}


@pytest.mark.parametrize("name", sorted(HARNESS_PATCHES))
def test_patching_the_harness_gains_nothing(pool, name):
    verdict = judge(pool, HARNESS_PATCHES[name] + "\ndef solve(n): return 0", TESTS)
    assert not verdict.passed and not any(verdict.tests) and verdict.status != "infra_error"
    assert judge(pool, GOOD, TESTS).passed


@pytest.mark.slow
def test_hostile_and_right_programs_mixed_on_several_slots():
    if not FOLDER.is_dir():
        pytest.skip("no ../shared/attacks beside this checkout")
    from rl_posttrain.sandbox.judge import judge_many

    manifest = json.loads((FOLDER / "manifest.json").read_text())
    hostile = [
        (FOLDER / row["file"]).read_text()
        for row in manifest
        if row["kind"] == "func" and row["name"][:3] not in SLOW | {"a11", "a38"}
    ]
    items = [(code, TESTS) for attack in hostile for code in (attack, GOOD)] * 3
    with Pool(PoolConfig(slots=4, runs_per_slot=20, limits=Limits(cpu_seconds=4.0, wall_seconds=30.0))) as pool:
        verdicts = judge_many(pool, items)
    assert [verdict.passed for verdict in verdicts] == [code is GOOD for code, _ in items]
    assert not [verdict for verdict in verdicts if verdict.status == "infra_error"]
