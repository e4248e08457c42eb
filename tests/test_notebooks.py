"""Every notebook runs from its first cell to its last, shows what it promises, and is stored as readers see it."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS_PER_CELL = 600  # only ends a cell that hangs


def _text(notebook):
    """What the notebook printed, stderr included."""
    return "".join(output.text for output in _outputs(notebook) if output.output_type == "stream")


def _outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def _pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in _outputs(notebook))


def _check_quickstart(notebook):
    text = _text(notebook)
    before, after = map(float, re.findall(r"held-out accuracy: (\d\.\d\d) -> (\d\.\d\d)", text)[0])
    assert after > before + 0.1
    assert _pictures(notebook) == 3  # warm-up, packed tree, learning curve
    statuses = dict(re.findall(r"^(honest|leaves with success|leaves inside the function) +(\w+)", text, re.MULTILINE))
    assert statuses == {"honest": "pass", "leaves with success": "error", "leaves inside the function": "error"}


CHECKS = {"quickstart.ipynb": _check_quickstart}


def test_there_are_notebooks():
    assert set(CHECKS) <= {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    """On one CPU device, as a newcomer's machine has it, from the notebooks' folder."""
    notebook = nbformat.read(path, as_version=4)
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")).strip()
    cache = str(FOLDER.parent / ".cache" / "jax")
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    client = NotebookClient(
        notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute(env=environment)  # raises with the cell's traceback when one fails
    CHECKS.get(path.name, lambda _: None)(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebook_is_executed_and_names_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))  # run once, in order, from a fresh kernel
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in _outputs(notebook))
    assert not re.findall(r"(?:/home|/root|/work|/tmp|/Users|/usr)/\S*", _text(notebook))
    assert path.stat().st_size < 500_000
    CHECKS.get(path.name, lambda _: None)(notebook)
