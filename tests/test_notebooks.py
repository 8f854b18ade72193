"""The notebooks: what can be read off the files, always; that every cell runs, in the slow tests.

As in test_architecture.py every check is run on the real notebooks and on one with that fault.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
FOLDER = REPO / "notebooks"
NAMES = ["1_one_step_by_hand", "2_trees_and_masks", "3_train_a_drafter", "4_compare_methods"]
MAX_BYTES = 400_000
LOCAL = re.compile(r"(?:^|[\s\"'(=])(/(?:home|root|tmp|work|usr|opt|Users|content|private|var)/\S*)|site-packages")
"""Places on the machine that ran a notebook."""


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict) -> Iterator[str]:
    """The texts of a cell's outputs."""
    for output in cell["outputs"]:
        yield "".join(output.get("text", ""))
        yield "".join(output.get("data", {}).get("text/plain", ""))


def not_run(notebook: dict) -> list[str]:
    """Cells that were not run once, in order, from a fresh kernel."""
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"executed as {counts}: restart and run all"]


def failed(notebook: dict) -> list[str]:
    """Outputs that are tracebacks."""
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return [f"{output['ename']}: {output['evalue']}" for output in outputs if output["output_type"] == "error"]


def local_paths(notebook: dict) -> list[str]:
    """Outputs that name folders of the machine."""
    texts = [text for cell in code_cells(notebook) for text in printed(cell)]
    return [match.group().strip() for text in texts for match in LOCAL.finditer(text)]


def large(notebook: dict) -> list[str]:
    """More than a reader of the repository wants to load."""
    size = len(json.dumps(notebook))
    return [f"{size} bytes; at most {MAX_BYTES}"] if size > MAX_BYTES else []


def silent(notebook: dict) -> list[str]:
    """A notebook that shows nothing."""
    return [] if any(cell["outputs"] for cell in code_cells(notebook)) else ["no cell has an output"]


CHECKS = [not_run, failed, local_paths, large, silent]


@pytest.mark.parametrize("name", NAMES)
def test_notebook(name):
    notebook = read(name)
    assert [found for check in CHECKS for found in check(notebook)] == []


def test_every_notebook_begins_with_the_same_single_cell_that_installs():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    installs = []
    for name in NAMES:
        sources = ["".join(cell["source"]) for cell in code_cells(read(name))]
        installs.append(sources[0])
        assert "%pip install" in sources[0]
        assert not any("pip install" in source for source in sources[1:])
    assert len(set(installs)) == 1


def stream(text: str) -> dict:
    return {"output_type": "stream", "name": "stdout", "text": [text]}


FAULTS = [
    (not_run, {"execution_count": 3}, "executed as [1, 3]: restart and run all"),
    (not_run, {"execution_count": None}, "executed as [1, None]: restart and run all"),
    (failed, {"outputs": [{"output_type": "error", "ename": "E", "evalue": "bad", "traceback": []}]}, "E: bad"),
    (local_paths, {"outputs": [stream("wrote runs/x\nsaved to /tmp/x/y.json")]}, "/tmp/x/y.json"),
    (local_paths, {"outputs": [stream("lib/site-packages/jax.py: warning")]}, "site-packages"),
    (
        local_paths,
        {"outputs": [{"output_type": "execute_result", "data": {"text/plain": ["'/home/me'"]}}]},
        "'/home/me'",
    ),
    (large, {"outputs": [stream("x" * MAX_BYTES)]}, "at most"),
    (silent, {"outputs": []}, "no cell has an output"),
]


@pytest.mark.parametrize("check, change, expected", FAULTS)
def test_check_finds_fault(check, change, expected):
    quiet = {"cell_type": "code", "execution_count": 1, "outputs": [], "source": []}
    good = {"cells": [quiet, quiet | {"execution_count": 2, "outputs": [stream("tau 2.0 in runs/tmp/x, 1/2")]}]}
    assert [found for each in CHECKS for found in each(good)] == []
    bad = copy.deepcopy(good)
    bad["cells"][1] |= change
    [found] = [found for each in CHECKS for found in each(bad)]
    assert check(bad)
    assert expected in found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs(name, tmp_path, monkeypatch):
    """In a folder of its own and with this code, on one device as users have; a cell that raises ends the test."""
    pytest.importorskip("ipykernel", reason="pip install 'hsd_jax[notebooks]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install 'hsd_jax[notebooks]'")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # for `!hsd`
    shutil.copy(FOLDER / f"{name}.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources)
    client.execute()
    found = [found for check in (not_run, failed, silent) for found in check(notebook)]
    assert found == []
