"""The documents against the code they speak of, without mkdocs; where it is installed, the slow test builds the site.

Every check returns what is wrong.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import hsd_jax
from hsd_jax.cli import main as main_lib
from hsd_jax.infer.rules.table import RULES
from hsd_jax.types import DrawScheme

REPO = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
PATH = re.compile(r"`([\w.-]+/[\w./-]+\.(?:py|yaml|md|cc|h|json))`")
REFERENCE = re.compile(r"^::: (\S+)", re.M)
SCHEMES = tuple(scheme.value for scheme in DrawScheme)
HISTORY = "docs/history.md"
"""Speaks of files as they were."""
METHODS = "docs/methods.md"
CITATION = re.compile(r"\bmethods\.md,?\s+(A\d+|\d+\.\d+[a-z]?)")


def pages() -> Iterator[tuple[str, str]]:
    """Name and Markdown of everything that is read: documents, and the text cells of notebooks."""
    for path in [*sorted(REPO.glob("*.md")), *sorted(REPO.glob("docs/*.md"))]:
        yield path.relative_to(REPO).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted(REPO.glob("notebooks/*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        yield path.relative_to(REPO).as_posix(), "\n\n".join(text)


def prose(text: str) -> str:
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """What a link may name behind `#`: headings to which GitHub and mkdocs give the same name."""

    def github(heading: str) -> str:
        return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

    def mkdocs(heading: str) -> str:
        plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())

    headings = [h.strip() for h in re.findall(r"^#+ (.+)$", prose(text), re.M)]
    return {github(h) for h in headings if github(h) == mkdocs(h)}


def broken_links() -> list[str]:
    """Relative links to files or headings that are not there, and links out of docs/, which the site does not have."""
    known, found = dict(pages()), []
    for name, text in known.items():
        for link in LINK.findall(prose(text)):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            path = (REPO / name).parent / file if file else REPO / name
            if not path.exists() or (name.startswith("docs/") and link.startswith("../")):
                found.append(f"{name}: {link}: no such file")
            elif anchor:
                other = os.path.relpath(path.resolve(), REPO.resolve()).replace(os.sep, "/")
                if anchor not in anchors(known.get(other, "")):
                    found.append(f"{name}: {link}: no such heading")
    return found


def wrong_navigation() -> list[str]:
    """Pages that the site's table of contents lacks, or names in vain."""
    config = yaml.safe_load((REPO / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [page for entry in config["nav"] for page in entry.values()]
    present = {path.name for path in REPO.glob("docs/*.md")}
    found = [f"mkdocs.yml: {page}: no such page" for page in listed if page not in present]
    return found + [f"mkdocs.yml: {page} is not in nav" for page in sorted(present - set(listed))]


def missing_files() -> list[str]:
    """Paths in `code` that are neither of the repository nor of the package."""
    return [
        f"{name}: {path}: no such file"
        for name, text in pages()
        if name != HISTORY
        for path in PATH.findall(prose(text))
        if not (REPO / path).exists() and not (REPO / "hsd_jax" / path).exists()
    ]


def unresolved_citations() -> list[str]:
    """Sections and choices of the page of methods that code or documents cite, and that it does not have."""
    known = re.findall(r"^(?:#+|\|) (A\d+|\d+\.\d+[a-z]?) ", (REPO / METHODS).read_text(encoding="utf-8"), re.M)
    texts = dict(pages())
    for file in sorted(REPO.glob("hsd_jax/**/*.py")):
        texts[file.relative_to(REPO).as_posix()] = file.read_text(encoding="utf-8")
    return [
        f"{name}: methods.md {label}: no such section or choice"
        for name, text in texts.items()
        for label in CITATION.findall(text)
        if label not in known
    ]


def undocumented_names() -> list[str]:
    """Public names that the API page does not show."""
    shown = set(REFERENCE.findall((REPO / "docs/api.md").read_text(encoding="utf-8")))
    return [f"docs/api.md: hsd_jax.{name} is missing" for name in hsd_jax.__all__ if f"hsd_jax.{name}" not in shown]


def is_there(dotted: str) -> bool:
    """Whether a module of the package has this name, or is it."""
    module, _, attribute = dotted.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute) or bool(importlib.import_module(dotted))
    except ImportError:
        return False


def unknown_names() -> list[str]:
    """Names that the reference shows and the code does not have."""
    return [f"{name}: {d}: no such name" for name, text in pages() for d in REFERENCE.findall(text) if not is_there(d)]


def refused_commands() -> list[str]:
    """Lines `hsd ...` of code blocks that the program does not take."""
    parser, found = main_lib.build_parser(), []
    for name, text in pages():
        for _, code in FENCE.findall(text):
            for line in code.splitlines():
                if line.startswith("hsd "):
                    said = io.StringIO()
                    try:
                        with contextlib.redirect_stderr(said):
                            parser.parse_args(shlex.split(line, comments=True)[1:])
                    except SystemExit:
                        found.append(f"{name}: {line}: {said.getvalue().strip().splitlines()[-1]}")
    return found


def python_code() -> Iterator[tuple[str, ast.Module]]:
    """Page and syntax tree of every Python block, and of every cell of a notebook without its magic lines."""
    for name, text in pages():
        yield from ((name, ast.parse(code)) for language, code in FENCE.findall(text) if language == "python")
    for path in sorted(REPO.glob("notebooks/*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            lines = [] if cell["cell_type"] != "code" else "".join(cell["source"]).splitlines()
            if not lines or not lines[0].startswith("%%"):
                yield path.name, ast.parse("\n".join(line for line in lines if not line.lstrip().startswith("%")))


def refused_calls() -> list[str]:
    """What Python code imports from the package in vain, and calls `hsd_jax.f(...)` that f does not take."""
    found = []
    for name, code in python_code():
        for node in ast.walk(code):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hsd_jax"):
                dotted = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [f"{name}: {one}: no such name" for one in dotted if not is_there(one)]
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("hsd_jax."):
                continue
            shown = ast.unparse(node.func)
            if shown.removeprefix("hsd_jax.") not in hsd_jax.__all__:
                found.append(f"{name}: {shown} is not public")
                continue
            try:
                keywords = {k.arg: k.value for k in node.keywords if k.arg}
                inspect.signature(getattr(hsd_jax, shown.removeprefix("hsd_jax."))).bind(*node.args, **keywords)
            except TypeError as error:
                found.append(f"{name}: {shown}: {error}")
    return found


CHECKS = [
    broken_links,
    wrong_navigation,
    missing_files,
    unresolved_citations,
    undocumented_names,
    unknown_names,
    refused_commands,
    refused_calls,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_documents(check):
    found = check()
    assert not found, "\n" + "\n".join(found)


def test_the_picture_of_the_idea_is_what_its_script_draws():
    spec = importlib.util.spec_from_file_location("idea", REPO / "docs/idea.py")
    assert spec and spec.loader
    idea = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(idea)
    assert idea.OUT.read_text(encoding="utf-8") == idea.draw(), "python docs/idea.py"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="pip install 'hsd_jax[docs]'")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    page = (tmp_path / "site/api/index.html").read_text(encoding="utf-8")
    for name in hsd_jax.__all__:
        assert f'id="hsd_jax.{name}"' in page
    raising = [name for name in hsd_jax.__all__ if "Raises:" in (getattr(hsd_jax, name).__doc__ or "")]
    assert page.count('class="doc-section-title">Raises:<') >= len(raising) > 3  # docs/sections.py parts them
    assert not list((tmp_path / "site").rglob("*.py"))


def test_the_help_of_decode_names_every_rule_and_scheme():
    text = hsd_jax.decode.__doc__ or ""
    missing = [name for name in (*RULES, *SCHEMES) if f'"{name}"' not in text]
    assert not missing, f"add {missing} to accept and draw in the docstring of decode"
