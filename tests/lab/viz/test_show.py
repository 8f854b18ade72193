"""`hsd show`: the rounds it replays are those of `decode`; its pages are well-formed, escaped and complete."""

from __future__ import annotations

import dataclasses
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from support import command_line

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.lab.bench.replay import Round
from hsd_jax.lab.viz import page as page_lib
from hsd_jax.settings import records
from hsd_jax.types import NO_PARENT

folders, own_cache, hsd, both = command_line.folders, command_line.own_cache, command_line.hsd, command_line.both
PROMPT = "the cat"
XHTML = "{http://www.w3.org/1999/xhtml}"


def nodes_of(tree: page_lib.Node) -> list[page_lib.Node]:
    return [tree, *(node for child in tree.children for node in nodes_of(child))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8, "top_k": 20, "seed": 3},
        pytest.param({"temperature": 0.9, "accept": "recursive", "lossy": "linear:0.1"}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.8, "reuse": "skip:1"}, marks=pytest.mark.slow),
    ],
)
def test_a_page_has_text_and_counts_of_decode(folders, settings):
    """The path of the text is the first child everywhere, and all its nodes and no others are accepted."""
    params = hsd_jax.load(target=folders.target, drafter=folders.drafter)
    settings = {"max_new_tokens": 20, "tree": TreeConfig(5, 3, 2), **settings}
    page = page_lib.make_page(params, PROMPT, *records(settings), "hsd show")
    out = hsd_jax.decode(params, PROMPT, **settings)
    assert [p.token for pieces in page.pieces for p in pieces] == out.tokens[0].tolist()
    assert "".join(p.text for pieces in page.pieces for p in pieces) == out.text[0]
    assert [page.rounds_by_count.get(n + 1, 0) for n in range(4)] == out.stats.accepted_histogram.tolist()
    for pieces, tree in zip(page.pieces, page.trees, strict=True):
        path, kinds = [tree], [node.kind for node in nodes_of(tree)]
        while path[-1].children and path[-1].children[0].kind != "rejected":
            path.append(path[-1].children[0])
        assert len(path) == len(pieces) + 1 + kinds.count("cut")
        assert [p.is_draft for p in pieces] == [node.kind == "accepted" for node in path[1 : len(pieces) + 1]]
        assert len(kinds) - kinds.count("target") <= 5 and kinds.count("accepted") == sum(p.is_draft for p in pieces)
        assert all(node.note for node in nodes_of(tree) if node.kind in ("accepted", "rejected"))


def make_round(**changes) -> Round:
    """A root with children 1 and 2; 3 below 1. Accepted: 1, 3, then the target's 9."""
    drafted = Round(
        tokens=np.array([5, 6, 7, 8]),
        parents=np.array([NO_PARENT, 0, 0, 1]),
        valid=np.ones(4, bool),
        logp=np.log([1.0, 0.6, 0.004, 0.999]),
        path=[0, 1, 3],
        next_token=9,
        emitted=[6, 8, 9],
    )
    return dataclasses.replace(drafted, **changes)


def named(before: list[int], token: int) -> str:
    return {5: "a", 6: "b", 7: "c", 8: "d", 9: "next"}[token]


def test_kinds_of_nodes():
    def kinds(drafted: Round) -> dict[str, str]:
        return {node.text: node.kind for node in nodes_of(page_lib.tree_of(drafted, [5], named))}

    all_accepted = {"a": "root", "b": "accepted", "c": "rejected", "d": "accepted"}
    assert kinds(make_round()) == {**all_accepted, "next": "target"}
    assert kinds(make_round(emitted=[6, 8])) == all_accepted
    assert kinds(make_round(emitted=[6])) == {**all_accepted, "d": "cut"}
    assert "c" not in kinds(make_round(valid=np.array([True, True, False, True])))
    notes = [node.note for node in nodes_of(page_lib.tree_of(make_round(), [5], named))]
    assert notes == ["", "60%", "100%", "", "<1%"]


NASTY = ["<script>alert('x')</script>", '&amp;"$x_1$', "a\x00\x1b\r\ud800b", "\n", " "]


def test_html_escapes_everything_and_loads_nothing():
    tree = page_lib.tree_of(make_round(), [5], lambda before, token: NASTY[token - 5])
    pieces = [page_lib.Piece(text, 1, False, "</s>") for text in NASTY]
    page = page_lib.render(page_lib.Page({"a<b": "&"}, NASTY[0], [pieces], [tree], "hsd show '<i>'"))
    assert page.encode("utf-8") and "<script" not in page and "<i>show" not in page
    root = ET.fromstring(page.partition("\n")[2])
    given = ["".join(s.itertext()) for s in root.iter(f"{XHTML}span") if s.get("class") == "given" and s.get("title")]
    assert given == [text + "</s>" for text in (*NASTY[:2], "a\\x00\\x1b\\r\\ud800b", "\n", " ")]
    for element in root.iter():
        assert element.tag.rpartition("}")[2] not in ("script", "link", "img", "iframe", "object", "use", "image")
        assert "src" not in element.attrib and element.get("href", "#").startswith("#")
    style = next(root.iter(f"{XHTML}style")).text
    assert "url(" not in style and "@import" not in style
    assert [e.get("id") for e in root.iter() if e.get("id")] == ["round-1"]


def texts_of(page: str) -> list[str]:
    """The text of every pass, without the marks."""
    passes = [e for e in ET.fromstring(page.partition("\n")[2]).iter() if e.get("class") == "pass"]
    for marked in (span for one in passes for span in one.iter(f"{XHTML}span") if span.get("class") == "mark"):
        marked.text = ""
    return ["".join(one.itertext()) for one in passes]


def test_show_writes_its_file(folders, tmp_path, capsys):
    path = tmp_path / "a.html"
    arguments = [*both(folders), *command_line.SHORT, *command_line.TREE, "--max-rounds", "2"]
    assert hsd("show", *arguments, "--out", path, PROMPT) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == f"wrote {path}\n"
    text = path.read_text(encoding="utf-8")
    assert text.count("<section ") == 2 and f"the first 2 of {len(texts_of(text))}" in text
    assert f"<dt>tau</dt><dd>{12 / len(texts_of(text)):.2f}</dd>" in text


@pytest.mark.slow
def test_show_without_a_tokenizer_shows_ids(folders, tmp_path):
    target, out = tmp_path / "target", tmp_path / "a.html"
    target.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        if (Path(folders.target) / name).is_file():
            shutil.copy(Path(folders.target) / name, target)
    pair = ["--target", target, "--drafter", folders.drafter]
    assert hsd("show", *pair, *command_line.SHORT, *command_line.TREE, "--out", out, "--ids", "7 8 9") == 0
    params = hsd_jax.load(target=str(target), drafter=folders.drafter)
    wanted = hsd_jax.decode(params, [7, 8, 9], max_new_tokens=12).tokens[0].tolist()
    assert list(map(int, "".join(texts_of(out.read_text())).split())) == wanted
