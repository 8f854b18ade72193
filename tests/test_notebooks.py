"""The notebooks: what can be read off the files, always; that every cell runs, in the slow tests.

As in test_architecture.py every check is run on the real notebooks and on one that has all faults.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hsd_jax

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


def unknown_names(notebook: dict) -> list[str]:
    """What cells import from the package and it does not have, and keyword arguments that no function there takes."""
    known: dict[str, object] = {"hsd_jax": hsd_jax}
    found = []
    for cell in code_cells(notebook):
        lines = "".join(cell["source"]).splitlines()
        if lines and lines[0].startswith("%%"):
            continue
        for node in ast.walk(ast.parse("\n".join(line for line in lines if not line.lstrip().startswith("%")) or "0")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hsd_jax":
                found += [f"no {node.module}.{name.name}" for name in node.names if not imported(node, name, known)]
            elif isinstance(node, ast.Call) and callable(called := resolved(node.func, known)):
                takes = inspect.signature(called).parameters
                if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
                    given = [keyword.arg for keyword in node.keywords if keyword.arg]
                    found += [f"{ast.unparse(node.func)} takes no {name}" for name in given if name not in takes]
    return found


def imported(node: ast.ImportFrom, name: ast.alias, known: dict[str, object]) -> bool:
    """Whether a module of the package has this name, which then is known."""
    module = importlib.import_module(str(node.module))
    try:
        known[name.asname or name.name] = getattr(module, name.name)
    except AttributeError:
        try:
            known[name.asname or name.name] = importlib.import_module(f"{node.module}.{name.name}")
        except ModuleNotFoundError:
            return False
    return True


def resolved(node: ast.expr, known: dict[str, object]) -> object:
    """What a name, or an attribute of one, stands for; None where it is nothing of the package."""
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, known)
        return None if owner is None else getattr(owner, node.attr, None)
    return known.get(node.id) if isinstance(node, ast.Name) else None


CHECKS = [not_run, failed, local_paths, unknown_names]


@pytest.mark.parametrize("name", NAMES)
def test_notebook(name):
    notebook = read(name)
    assert [found for check in CHECKS for found in check(notebook)] == []


def test_each_check_finds_its_fault():
    outputs = [
        {"output_type": "error", "ename": "E", "evalue": "bad"},
        {"output_type": "stream", "text": ["wrote runs/x, 1/2\nsaved to /tmp/x/y.json"]},
    ]
    source = ["import hsd_jax\n", "hsd_jax.decode(p, x, taps=3)"]
    bad = {"cells": [{"cell_type": "code", "execution_count": 2, "outputs": outputs, "source": source}]}
    assert [check(bad) for check in CHECKS] == [
        ["executed as [2]: restart and run all"],
        ["E: bad"],
        ["/tmp/x/y.json"],
        ["hsd_jax.decode takes no taps"],
    ]


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
