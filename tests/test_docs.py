"""The documents against the code they speak of, without mkdocs; where it is installed, the slow test builds the site.

As in test_architecture.py every check takes a folder and returns what is wrong; each is run on this repository, where
it must find nothing, and on a small one with that one fault, where it must find it.
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
from hsd_jax.drafters.table import DRAFTING_METHODS
from hsd_jax.infer.rules import RULES
from hsd_jax.train.distill import DISTILLED
from hsd_jax.train.drafter import TRAINED
from hsd_jax.types import DrawScheme

REPO = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
PATH = re.compile(r"`([\w.-]+/[\w./-]+\.(?:py|yaml|md|cc|h|json))`")
REFERENCE = re.compile(r"^::: (\S+)", re.M)
PICTURE = re.compile(r"!\[[^\]\n]*\]\(([^)\s]+)\)")
SCHEMES = tuple(scheme.value for scheme in DrawScheme)
LISTED = {
    "README.md": (*DRAFTING_METHODS, *RULES),
    "docs/drafters.md": (*DRAFTING_METHODS, *RULES),
    "docs/design.md": (*RULES, *SCHEMES),
    "docs/cli.md": (*RULES, *SCHEMES),
    "docs/glossary.md": (*RULES, *SCHEMES),
    "docs/training.md": (*TRAINED, *DISTILLED),
}
"""What a page names in `code`, because it lists all there are."""
HISTORY = "docs/history.md"
"""Speaks of files as they were."""
METHODS = "docs/methods.md"
LABEL = r"(?:A\d+|\d+\.\d+[a-z]?|\d+)"
CITATION = re.compile(rf"\bmethods\.md,?\s+({LABEL}(?:,\s*{LABEL})*)")


def pages(repo: Path) -> Iterator[tuple[str, str]]:
    """Name and Markdown of everything that is read: documents, and the text cells of notebooks."""
    for path in [*sorted(repo.glob("*.md")), *sorted(repo.glob("docs/*.md"))]:
        yield path.relative_to(repo).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted(repo.glob("notebooks/*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        yield path.relative_to(repo).as_posix(), "\n\n".join(text)


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


def broken_links(repo: Path) -> list[str]:
    """Relative links to files or headings that are not there."""
    known, found = dict(pages(repo)), []
    for name, text in known.items():
        for link in LINK.findall(prose(text)):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            path = (repo / name).parent / file if file else repo / name
            if not path.exists():
                found.append(f"{name}: {link}: no such file")
            elif anchor:
                other = os.path.relpath(path.resolve(), repo.resolve()).replace(os.sep, "/")
                if anchor not in anchors(known.get(other, "")):
                    found.append(f"{name}: {link}: no such heading")
    return found


def links_out_of_the_site(repo: Path) -> list[str]:
    """Links of pages in docs/ to files outside, which the site does not have."""
    return [
        f"{name}: {link}: outside docs/"
        for name, text in pages(repo)
        if name.startswith("docs/")
        for link in LINK.findall(prose(text))
        if link.startswith("../")
    ]


def wrong_navigation(repo: Path) -> list[str]:
    """Pages that the site's table of contents lacks, or names in vain."""
    config = yaml.safe_load((repo / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [page for entry in config["nav"] for page in entry.values()]
    present = {path.name for path in repo.glob("docs/*.md")}
    found = [f"mkdocs.yml: {page}: no such page" for page in listed if page not in present]
    return found + [f"mkdocs.yml: {page} is not in nav" for page in sorted(present - set(listed))]


def missing_files(repo: Path) -> list[str]:
    """Paths in `code` that are neither of the repository nor of the package."""
    return [
        f"{name}: {path}: no such file"
        for name, text in pages(repo)
        if name != HISTORY
        for path in PATH.findall(prose(text))
        if not (repo / path).exists() and not (repo / "hsd_jax" / path).exists()
    ]


def missing_pictures(repo: Path) -> list[str]:
    """Pictures that pages show and that are not there."""
    return [
        f"{name}: {file}: no such picture"
        for name, text in pages(repo)
        for file in PICTURE.findall(prose(text))
        if not (repo / name).parent.joinpath(file).is_file()
    ]


def labels(text: str) -> set[str]:
    """What may be cited of the page of methods: numbered sections, their numbered steps ("1.5, 3"), choices ("A1")."""
    found, section = set(), ""
    for line in prose(text).splitlines():
        if heading := re.match(r"#+ (\d+(?:\.\d+[a-z]?)?) ", line):
            section = heading[1]
            found.add(section)
        elif step := re.match(r"(\d+)\. ", line):
            found.add(f"{section}, {step[1]}")
        elif choice := re.match(r"\| (A\d+) \|", line):
            found.add(choice[1])
    return found


def citations(text: str) -> Iterator[str]:
    """Labels that a file cites, one at a time; a whole number after a section is a step of it."""
    for cited in CITATION.findall(re.sub(r"\n\s*(?:# )?", " ", text)):
        section = ""
        for label in re.split(r",\s*", cited):
            if section and label.isdigit():
                yield f"{section}, {label}"
            else:
                section = label if "." in label else ""
                yield label


def unresolved_citations(repo: Path) -> list[str]:
    """Citations of the page of methods, in code, tests and documents, of what it does not have."""
    path = repo / METHODS
    known = labels(path.read_text(encoding="utf-8")) if path.exists() else set()
    files = dict(pages(repo))
    for folder in ("hsd_jax", "tests"):
        for file in sorted(repo.glob(f"{folder}/**/*.py")):
            if file != Path(__file__).resolve():  # its faults are on purpose
                files[file.relative_to(repo).as_posix()] = file.read_text(encoding="utf-8")
    return [
        f"{name}: methods.md {label}: no such section, step or choice"
        for name, text in files.items()
        for label in citations(text)
        if label not in known
    ]


def unlisted_names(repo: Path) -> list[str]:
    """Drafters, rules and schemes that a page leaves out of its list."""
    known = dict(pages(repo))
    return [
        f"{page}: `{name}` is missing: the page lists all of them"
        for page, names in LISTED.items()
        for name in names
        if page in known and not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", known[page])
    ]


def unlisted_programs(repo: Path) -> list[str]:
    """Programs of the folder of benchmarks that its page leaves out."""
    page = dict(pages(repo)).get("docs/benchmarks.md", "")
    return [
        f"docs/benchmarks.md: {path.name} is missing"
        for path in sorted(repo.glob("benchmarks/*.py"))
        if "__main__" in path.read_text(encoding="utf-8") and f"`benchmarks/{path.name}`" not in page
    ]


def undocumented_names(repo: Path) -> list[str]:
    """Public names that the API page does not show."""
    shown = set(REFERENCE.findall((repo / "docs/api.md").read_text(encoding="utf-8")))
    return [f"docs/api.md: hsd_jax.{name} is missing" for name in hsd_jax.__all__ if f"hsd_jax.{name}" not in shown]


def unknown_names(repo: Path) -> list[str]:
    """Names that the reference shows and the code does not have."""
    found = []
    for name, text in pages(repo):
        for dotted in REFERENCE.findall(text):
            module, _, attribute = dotted.rpartition(".")
            try:
                if not hasattr(importlib.import_module(module), attribute):
                    importlib.import_module(dotted)
            except ImportError:
                found.append(f"{name}: {dotted}: no such name")
    return found


def refused_commands(repo: Path) -> list[str]:
    """Lines `hsd ...` of code blocks that the program does not take."""
    parser, found = main_lib.build_parser(), []
    for name, text in pages(repo):
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


def refused_calls(repo: Path) -> list[str]:
    """Calls `hsd_jax.f(...)` in Python blocks with arguments that f does not have."""
    found = []
    for name, text in pages(repo):
        for language, code in FENCE.findall(text):
            for call in ast.walk(ast.parse(code)) if language == "python" else ():
                if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("hsd_jax."):
                    continue
                shown = ast.unparse(call.func)
                if shown.removeprefix("hsd_jax.") not in hsd_jax.__all__:
                    found.append(f"{name}: {shown} is not public")
                    continue
                function = getattr(hsd_jax, shown.removeprefix("hsd_jax."))
                try:
                    inspect.signature(function).bind(*call.args, **{k.arg: k.value for k in call.keywords if k.arg})
                except TypeError as error:
                    found.append(f"{name}: {shown}: {error}")
    return found


CHECKS = [
    broken_links,
    links_out_of_the_site,
    wrong_navigation,
    missing_files,
    missing_pictures,
    unresolved_citations,
    unlisted_names,
    unlisted_programs,
    undocumented_names,
    unknown_names,
    refused_commands,
    refused_calls,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_documents(check):
    found = check(REPO)
    assert not found, "\n" + "\n".join(found)


FAULTS = [
    (broken_links, "README.md", "[x](docs/one.md#second-part)", "README.md: docs/one.md#second-part: no such heading"),
    (links_out_of_the_site, "docs/one.md", "[x](../README.md)", "docs/one.md: ../README.md: outside docs/"),
    (wrong_navigation, "docs/two.md", "# Two", "mkdocs.yml: two.md is not in nav"),
    (missing_files, "docs/one.md", "see `infer/gone.py`", "docs/one.md: infer/gone.py: no such file"),
    (missing_pictures, "docs/one.md", "![x](images/gone.svg)", "docs/one.md: images/gone.svg: no such picture"),
    (unresolved_citations, "hsd_jax/infer/step.py", "# (methods.md 1.5, 2, 7)", "hsd_jax/infer/step.py: methods.md"),
    (unlisted_names, "README.md", "`eagle`", "README.md: `eagle` is missing"),
    (unlisted_programs, "benchmarks/one.py", 'if __name__ == "__main__":', "docs/benchmarks.md: one.py is missing"),
    (undocumented_names, "docs/api.md", "::: hsd_jax.decode", "docs/api.md: hsd_jax.decode is missing"),
    (unknown_names, "docs/one.md", "::: hsd_jax.gone", "docs/one.md: hsd_jax.gone: no such name"),
    (refused_commands, "README.md", "```\nhsd demo --gone\n```", "README.md: hsd demo --gone: hsd: error: "),
    (refused_calls, "README.md", "```python\nhsd_jax.decode(p, t, gone=1)\n```", "README.md: hsd_jax.decode: got an"),
]
GOOD = """\
# First part

[itself](#first-part), [a page](docs/one.md#first-part), [elsewhere](https://example.org/gone.md), `infer/step.py`

```
hsd generate --demo "say 'hello'"   # [not a link](gone.md), `gone/gone.py`
```

```python
import hsd_jax
out = hsd_jax.decode(hsd_jax.load("demo"), "text", max_new_tokens=8)
```
"""


@pytest.fixture
def clean_repo(tmp_path) -> Path:
    """A repository in whose documents no check finds anything."""
    for folder in ("docs", "notebooks", "hsd_jax/infer", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    cited = '"""Round (methods.md 0.5, 1.5, 2; methods.md, A1; methods.md\n1.5)."""\n'
    (tmp_path / "hsd_jax/infer/step.py").write_text(cited)
    methods = "# Methods\n\n### 0.5 Rules\n\n### 1.5 A round\n\n1. draft\n2. verify\n\n| A1 | yes |\n"
    (tmp_path / METHODS).write_text(methods)
    (tmp_path / "README.md").write_text(GOOD + "".join(f"`{name}`\n" for name in LISTED["README.md"]))
    (tmp_path / "docs/one.md").write_text("# First part\n\n::: hsd_jax.infer.step\n\n::: hsd_jax.infer.step.cut\n")
    (tmp_path / "docs/LOG.md").write_text("# Log\n\n`infer/step.py` is there\n")
    (tmp_path / HISTORY).write_text("# History\n\n`gone/gone.py` is gone\n")
    (tmp_path / "docs/api.md").write_text("".join(f"::: hsd_jax.{name}\n\n" for name in hsd_jax.__all__))
    nav = "".join(f"  - {name}: {name}.md\n" for name in ("one", "api", "LOG", "history", "methods"))
    (tmp_path / "mkdocs.yml").write_text(f"nav:\n{nav}")
    cell = {"cell_type": "markdown", "source": ["[home](../README.md#first-part)"]}
    (tmp_path / "notebooks/1.ipynb").write_text(json.dumps({"cells": [cell]}))
    return tmp_path


@pytest.mark.parametrize("check, file, text, expected", FAULTS)
def test_check_finds_fault(clean_repo, check, file, text, expected):
    assert [found for each in CHECKS for found in each(clean_repo)] == []
    path = clean_repo / file
    if check in (undocumented_names, unlisted_names):
        path.write_text(path.read_text().replace(f"{text}\n", ""))
    elif file.endswith(".ipynb"):
        path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": [text]}]}))
    else:
        path.write_text(f"{path.read_text() if path.exists() else ''}\n{text}\n".lstrip())
    found = [found for each in CHECKS for found in each(clean_repo)]
    assert len(found) == 1, found
    assert found[0].startswith(expected)


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
