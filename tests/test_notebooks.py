"""The notebooks: what can be read off their outputs, always; that every cell runs, in the slow tests.

As in test_architecture.py every check is run on the real notebooks and on one that has all faults. `test_docs.py` reads
the code of their cells.
"""

from __future__ import annotations

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
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
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


CHECKS = [not_run, failed, local_paths]


@pytest.mark.parametrize("name", NAMES)
def test_notebook(name):
    notebook = read(name)
    assert [found for check in CHECKS for found in check(notebook)] == []


def test_each_check_finds_its_fault():
    outputs = [
        {"output_type": "error", "ename": "E", "evalue": "bad"},
        {"output_type": "stream", "text": ["wrote runs/x, 1/2\nsaved to /tmp/x/y.json"]},
    ]
    bad = {"cells": [{"cell_type": "code", "execution_count": 2, "outputs": outputs}]}
    assert [check(bad) for check in CHECKS] == [["executed as [2]: restart and run all"], ["E: bad"], ["/tmp/x/y.json"]]


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
    found = [found for check in (not_run, failed) for found in check(notebook)]
    assert found == []
