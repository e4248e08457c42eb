"""Imports point one way (docs/architecture.md, section 1), and what runs without JAX does not load it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rl_posttrain.sandbox import launch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rl_posttrain"

# What each part may import of ours, itself included: "model" is the whole folder, "storage.filesystem" one module.
ALLOWED = {
    "types": set(),
    "config": set(),
    "batch": set(),
    "sharding": set(),
    "sandbox": {"types"},
    "tasks": {"types", "config"},
    "rewards": {"types", "sandbox", "tasks"},
    "data": {"types", "batch"},
    "model": {"batch", "sharding"},
    "algorithms": {"batch"},
    "algorithms.update": {"batch", "model", "sharding"},
    "rollout": {"types", "batch", "data", "model", "sharding"},
    "storage": {"batch"},
    "storage.filesystem": set(),
    "storage.trajectories": {"types"},
    "observability": {"types", "storage.filesystem", "storage.trajectories"},
}
CORE = {name for name in ALLOWED if "." not in name}
ALLOWED["evaluation"] = CORE - {"sandbox", "algorithms", "storage"}
ALLOWED["stages"] = {"algorithms"}
ALLOWED["services"] = CORE | {"evaluation", "stages"}
ALLOWED["loop"] = CORE | {"evaluation", "services"}
ALLOWED["lifecycle"] = CORE | {"evaluation", "services", "loop"}

WITHOUT_JAX = ("types", "config", "sandbox", "tasks", "rewards", "storage.filesystem", "storage.trajectories")
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "jaxtyping"}
HEAVY = {"ray", "transformers", "torch"}  # optional: only inside the functions that need them


def modules() -> dict[str, ast.Module]:
    """ "storage.trajectories" -> its syntax tree; a folder's __init__ by the folder's name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or PACKAGE] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.AST) -> set[str]:
    """Dotted names of all that is imported anywhere in the tree. `from a import b` gives a.b."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(names: set[str]) -> set[str]:
    return {name.removeprefix(f"{PACKAGE}.") for name in names if name.split(".")[0] == PACKAGE}


def covers(part: str, name: str) -> bool:
    """Whether `name` is `part` or lies in it."""
    return name == part or name.startswith(f"{part}.")


def the_rule_for(module: str) -> str | None:
    """The longest name in ALLOWED that covers the module."""
    return max((part for part in ALLOWED if covers(part, module)), key=len, default=None)


MODULES = modules()


def test_every_module_has_a_rule():
    assert [name for name in MODULES if name != PACKAGE and the_rule_for(name) is None] == []
    assert imported(MODULES[PACKAGE]) == set()  # importing the package itself costs nothing


@pytest.mark.parametrize("module", sorted(set(MODULES) - {PACKAGE}))
def test_imports_point_one_way(module):
    rule = the_rule_for(module)
    assert rule is not None
    own_folder = rule.split(".")[0] if "." in module or module in CORE else rule
    wrong = {
        name
        for name in ours(imported(MODULES[module]))
        if not covers(own_folder, name) and not any(covers(part, name) for part in ALLOWED[rule])
    }
    assert not wrong, f"{module} must not import {sorted(wrong)}: see docs/architecture.md, section 1"


@pytest.mark.parametrize("module", sorted(set(MODULES) - {PACKAGE}))
def test_nothing_imports_the_commands_or_the_configs(module):
    assert not {name for name in imported(MODULES[module]) if name.split(".")[0] in ("experiments", "configs")}


@pytest.mark.parametrize("module", [m for m in MODULES if any(covers(part, m) for part in WITHOUT_JAX)])
def test_modules_for_workers_import_no_jax(module):
    assert not {name for name in imported(MODULES[module]) if name.split(".")[0] in JAX}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_heavy_optional_packages_stay_inside_functions(module):
    outside = imported(ast.Module([node for node in MODULES[module].body if not _defines(node)], []))
    assert not {name for name in outside if name.split(".")[0] in HEAVY}


def _defines(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def test_the_rules_catch_a_wrong_import():
    tree = ast.parse("from rl_posttrain.model import transformer\ndef f():\n    import rl_posttrain.loop")
    assert ours(imported(tree)) == {"model.transformer", "loop"}
    assert not any(covers(part, "model.transformer") for part in ALLOWED["sandbox"])
    assert the_rule_for("algorithms.update") == "algorithms.update"
    assert the_rule_for("algorithms.grpo") == "algorithms"


@pytest.mark.parametrize("part", WITHOUT_JAX)
def test_a_cold_import_loads_no_jax(part):
    names = [name for name in MODULES if covers(part, name)]
    # The files that run inside containers and workers are programs of their own, imported by nothing of ours.
    inside = {f"sandbox.{name.removesuffix('.py')}" for name in launch.HARNESS} - {"sandbox.codec"}
    programs = {*inside, "sandbox.launcher", "tasks.reasoning_worker"}
    wanted = [f"{PACKAGE}.{name}" for name in names if name not in programs]
    code = (
        f"import importlib, sys\nfor name in {wanted!r}: importlib.import_module(name)\n"
        f"print(*sorted({JAX!r} & {{name.split('.')[0] for name in sys.modules}}))"
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == []
