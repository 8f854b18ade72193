"""`hsd show`: the rounds it replays are those of `decode`; its pages are well-formed, escaped and complete."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import shutil
import types
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import calls, command_line, setups

import hsd_jax
from hsd_jax.cli import options, show
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.hidden.reuse import FRESH, KEPT, MIXED
from hsd_jax.infer import tree as tree_lib
from hsd_jax.infer.accept import match_rule, recursive_rule
from hsd_jax.lab.bench.replay import Round, replay
from hsd_jax.lab.viz import html, layout, png
from hsd_jax.lab.viz import page as page_lib
from hsd_jax.types import NO_PARENT, DraftTree, DrawScheme, RoundInputs

folders, own_cache, hsd, both = command_line.folders, command_line.own_cache, command_line.hsd, command_line.both
PROMPT = "the cat"
XHTML, SVG = "{http://www.w3.org/1999/xhtml}", "{http://www.w3.org/2000/svg}"


def check_round(drafted: Round) -> None:
    """The accepted path is a path of the tree, and what was emitted is its tokens and the target's one."""
    assert drafted.parents[0] == NO_PARENT and drafted.path[0] == 0
    for parent, child in zip(drafted.path, drafted.path[1:], strict=False):
        assert drafted.parents[child] == parent and drafted.valid[child]
    whole = [*drafted.tokens[drafted.path[1:]].tolist(), drafted.next_token]
    assert drafted.emitted == whole[: len(drafted.emitted)] and drafted.emitted
    assert drafted.has_next == (drafted.emitted == whole)
    assert drafted.num_kept == len(drafted.emitted) - drafted.has_next


def one_row(new_tokens: int = 40, temperature: float = 0.0) -> calls.Call:
    return calls.mixed_call().rows([1]).replace(new_tokens=[new_tokens], temperature=[temperature], seeds=[5])


def replayed(call: calls.Call, setup: setups.Setup, rule, capacity: int = calls.CAPACITY) -> list[Round]:
    return replay(setups.session_of(call, setup, capacity), setup.config, rule, setup.pictures)


@functools.cache
def rounds_of(proposer: str) -> tuple[calls.Call, list[Round]]:
    """The oracle's table has six rows, of which the first is replayed; the beam moves to a larger cache."""
    setup = setups.setup("llama", proposer)
    call = calls.mixed_call() if proposer == setups.DECOYS_ORACLE else one_row()
    rule, capacity = match_rule(setup.drafter.max_depth), 32 if proposer == "beam" else calls.CAPACITY
    return call, replayed(call, setup, rule, capacity)


PROPOSERS = ["beam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hot", "block"))]


@pytest.mark.parametrize("proposer", [*PROPOSERS, setups.DECOYS_ORACLE])
def test_replay_is_the_decode(proposer):
    """Text and counts of the compiled loop."""
    setup = setups.setup("llama", proposer)
    call, rounds = rounds_of(proposer)
    state = call.run(setup.decoder, setup.models)
    assert [token for drafted in rounds for token in drafted.emitted] == calls.generated(call, state)[0]
    counts = np.bincount([len(drafted.emitted) - 1 for drafted in rounds], minlength=setup.drafter.max_depth + 1)
    assert counts.tolist() == np.asarray(state.stats.accepted_histogram)[0].tolist()
    assert counts[1:].any(), "no draft was ever accepted: this test would see nothing"
    for drafted in rounds:
        check_round(drafted)
    if setup.pictures.node_logp is None:
        assert all(drafted.logp is None for drafted in rounds)
    assert all(drafted.origins is None and not layout.reused_words(drafted) for drafted in rounds), "no reuse"


@pytest.mark.parametrize(
    "scheme", [pytest.param(DrawScheme.INDEPENDENT, marks=pytest.mark.slow), DrawScheme.WITHOUT_REPLACEMENT]
)
def test_replay_of_sampled_trees(scheme):
    setup = setups.sampled(scheme)
    call, rule = one_row(30, temperature=1.0), recursive_rule(3, 3)
    rounds = replayed(call, setup, rule)
    wanted = calls.generated(call, call.run(setup.decoder, setup.models))[0]
    assert [token for drafted in rounds for token in drafted.emitted] == wanted
    for drafted in rounds:
        check_round(drafted)
        assert (drafted.logp[1:] < 0.0).all() and np.isfinite(drafted.logp).all()


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_probabilities_are_those_of_the_beam(proposer, monkeypatch):
    """Along a path they add up to the score by which the beam kept the node; in rows of their own.

    Of arbitrary trees: pictures do not show the noise that ranks coupled ones.
    """
    setup, call = setups.setup("llama", proposer, DrawScheme.ARBITRARY), calls.mixed_call()
    state = call.start(setup.decoder, setup.models)
    scores = []

    def top_k(values, num):
        best, index = jax.lax.top_k(values, num)
        scores.append(best)
        return best, index

    monkeypatch.setattr(tree_lib, "lax", types.SimpleNamespace(top_k=top_k))
    root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)[:, 0]

    @setup.decoder.compile
    def drafted(models, state, sampling):
        tree, _ = setup.drafter.draft(models, state.drafter, RoundInputs(root, state.length - 1, state.keys, sampling))
        logp = setup.pictures.node_logp(models, state.drafter, tree, sampling)
        return logp, tree.parents, scores[-1]  # the last choice is among all levels

    logp, parents, wanted = map(np.asarray, drafted(setup.models, state, call.arrays()[-1]))
    whole = np.zeros(logp.shape)
    for row, node in np.ndindex(logp[:, 1:].shape):
        whole[row, node + 1] = whole[row, parents[row, node + 1]] + logp[row, node + 1]
    assert (logp[:, 0] == 0.0).all()
    np.testing.assert_allclose(whole[:, 1:], wanted, atol=1e-4)
    assert call.prompts[1].tolist() == rounds_of(proposer)[0].prompts[0].tolist()
    np.testing.assert_allclose(rounds_of(proposer)[1][0].logp, logp[1], atol=1e-4)


@functools.cache
def watched_reuse(proposer: str) -> tuple[list[Round], list[tuple[bool, int]], list[np.ndarray]]:
    """Replayed rounds; of the compiled loop, round by round: whether the trunk's cache grew, the tokens since it did;
    and the probabilities that the replayed nodes have with the spares of that round taken away."""
    setup, call = setups.setup("llama", proposer), one_row(24, temperature=1.0)
    rounds = replayed(call, setup, match_rule(setup.drafter.max_depth))

    @setup.decoder.compile
    def logp_without_spares(drafter_state, tree, sampling):
        spares = drafter_state.spares.replace(num=jnp.zeros_like(drafter_state.spares.num))
        return setup.pictures.node_logp(setup.models, drafter_state.replace(spares=spares), tree, sampling)

    state, runs, logps, age = call.start(setup.decoder, setup.models), [], [], 0
    for drafted in rounds:
        arrays = (drafted.tokens, drafted.parents, drafted.depth, drafted.valid)
        tree = DraftTree(*(jnp.asarray(x)[None] for x in arrays), scheme=DrawScheme.ARBITRARY)
        logps.append(np.asarray(logp_without_spares(state.drafter, tree, call.arrays()[-1]))[0])
        cached, length = int(state.drafter.cache.length[0]), int(state.length[0])
        state = call.resume(setup.decoder, setup.models, state, 1)
        has_run = int(state.drafter.cache.length[0]) > cached
        runs.append((has_run, age))
        age = int(state.length[0]) - length + (0 if has_run else age)
    return rounds, runs, logps


@pytest.mark.parametrize("proposer", ["block_skip"])
def test_marked_rounds_are_those_in_which_the_loop_ran_no_trunk(proposer):
    rounds, runs, _ = watched_reuse(proposer)
    assert [drafted.has_own_run for drafted in rounds] == [has_run for has_run, _ in runs]
    assert 0 < sum(has_run for has_run, _ in runs) < len(runs)
    for drafted, (has_run, age) in zip(rounds, runs, strict=True):
        is_draft = drafted.valid & (drafted.depth > 0)
        assert drafted.origins.tolist() == np.where(is_draft, FRESH if has_run else KEPT, FRESH).tolist()
        assert has_run or drafted.spare_age == age


@pytest.mark.parametrize("proposer", ["hot_sum", pytest.param("block_sum", marks=pytest.mark.slow)])
def test_marked_nodes_are_those_whose_logits_spares_changed(proposer):
    """SUM: every node no deeper than the round before reached, whose probability is another."""
    rounds, runs, logps = watched_reuse(proposer)
    seen = []
    for drafted, (has_run, age), without in zip(rounds, runs, logps, strict=True):
        assert has_run and drafted.has_own_run
        is_reached = (drafted.depth > 0) & (drafted.depth + age <= setups.TREES[proposer].depth) & (age > 0)
        differs = np.abs(drafted.logp - without) > 1e-5
        assert (drafted.origins == np.where(is_reached, MIXED, FRESH)).all() and (differs == is_reached).all()
        assert not is_reached.any() or drafted.spare_age == age
        seen += drafted.origins[1:].tolist()
    assert 0 < np.count_nonzero(seen) < len(seen)


@pytest.mark.slow
def test_ahead_has_fresh_states_in_its_first_round_only():
    rounds, runs, _ = watched_reuse("ahead")
    assert [drafted.has_own_run for drafted in rounds] == [True] + [False] * (len(rounds) - 1)
    assert [drafted.spare_age for drafted in rounds] == [age for _, age in runs]
    for drafted in rounds:
        assert drafted.origins.tolist() == [FRESH] + [FRESH if drafted.has_own_run else KEPT] * (
            len(drafted.tokens) - 1
        )


def test_pictures_show_what_was_reused(tmp_path):
    """The mark of every node, the words of the round, and the legend; none of them without reuse."""
    origins = np.array([FRESH, KEPT, FRESH, MIXED])
    drafted = make_round(origins=origins, spare_age=2, has_own_run=False)
    drawing = layout.draw(drafted, list("abcd"), "next")
    assert {box.text: box.mark for box in drawing.boxes} == {**dict(zip("abcd", origins, strict=True)), "next": FRESH}
    assert "2 of 3 drafts" in drawing.reused
    titles = {box.text: box.title for box in drawing.boxes}
    assert [" 2 tokens old" in titles[name] for name in "abcd"] == [False, True, False, True]
    page = dataclasses.replace(nasty_page(), drawings=[drawing])
    text = html.render(page)
    assert ET.fromstring(text.partition("\n")[2]) is not None
    assert text.count('<rect class="kept-state"') == text.count('<rect class="mixed-state"') == 1
    assert drawing.reused in text and all(words in text for words in layout.MARKS.values())
    plain = html.render(nasty_page())
    assert "<rect class" not in plain and "trunk run" not in plain
    pytest.importorskip("plutoprint")
    for name, drawn in (("a.png", page), ("b.png", nasty_page())):
        png.write(drawn, tmp_path / name)
        assert has_color(tmp_path / name, "#d3f0e0"), "a draft that was accepted"
    old = "#7a3fc8"
    assert has_color(tmp_path / "a.png", old) and not has_color(tmp_path / "b.png", old)


def has_color(path: Path, color: str) -> bool:
    """Whether some pixel is exactly of this colour."""
    from matplotlib import colors, image

    return bool((np.abs(image.imread(path)[..., :3] - colors.to_rgb(color)) < 1e-3).all(-1).any())


def make_round(**changes) -> Round:
    """A root with children 1 and 2; 3 below 1. Accepted: 1, 3, then the target's 9."""
    drafted = Round(
        tokens=np.array([5, 6, 7, 8]),
        parents=np.array([NO_PARENT, 0, 0, 1]),
        depth=np.array([0, 1, 1, 2]),
        valid=np.ones(4, bool),
        logp=np.log([1.0, 0.6, 0.004, 0.999]),
        path=[0, 1, 3],
        next_token=9,
        emitted=[6, 8, 9],
    )
    return dataclasses.replace(drafted, **changes)


def kinds(drafted: Round) -> dict[str, str]:
    return {box.text: box.kind for box in layout.draw(drafted, list("abcd"), "next").boxes}


def test_kinds_of_nodes():
    all_accepted = {"a": "root", "b": "accepted", "c": "rejected", "d": "accepted"}
    assert kinds(make_round()) == {**all_accepted, "next": "target"}
    assert kinds(make_round(emitted=[6, 8])) == all_accepted
    assert kinds(make_round(emitted=[6])) == {**all_accepted, "d": "cut"}
    assert "c" not in kinds(make_round(valid=np.array([True, True, False, True])))


def test_layout_keeps_boxes_apart():
    for drafted in rounds_of("beam")[1][:5]:
        drawing = layout.draw(drafted, ["x" * (3 * n) for n in range(10)], "next")
        boxes = drawing.boxes
        assert len(boxes) == 10 + drafted.has_next
        for i, one in enumerate(boxes):
            assert one.x >= 0 and one.x + one.width <= drawing.width
            assert one.y >= 0 and one.y + layout.HEIGHT <= drawing.height
            assert len(one.text) <= layout.MAX_LABEL
            for other in boxes[:i]:
                beside = one.x + one.width < other.x or other.x + other.width < one.x
                assert beside or abs(one.y - other.y) > layout.HEIGHT
        way = [box.y for box in boxes if box.kind in ("root", "accepted", "target")]
        assert len(set(way)) == 1, "what the text took runs along one line"


def test_labels_and_probabilities():
    assert layout.visible(" a\n\t\x00\u200b\ud800") == "\u00b7a\u21b5\u21e5\\x00\\u200b\\ud800"
    assert layout.shortened("x" * 14) == "x" * 14
    assert layout.shortened("x" * 15) == "x" * 13 + "\u2026"
    assert layout.columns(layout.shortened("\u6c34" * 15)) <= layout.MAX_LABEL
    for share, text in {0.5: "50%", 0.999: "100%", 0.0096: "1%", 0.001: "<1%"}.items():
        assert layout.percent(math.log(share)) == text
    assert layout.percent(-math.inf) == "0%"
    assert layout.percent(math.nan) == "?"


NASTY = ["<script>alert('x')</script>", '&amp;"$x_1$', "a\x00\x1b\r\ufffe\ud800b", "\n", " "]


def nasty_page() -> page_lib.Page:
    drawing = layout.draw(make_round(), [layout.visible(t) for t in NASTY[:4]], NASTY[4])
    pieces = [page_lib.PageToken(text, 1, "from the target", "</s>") for text in NASTY]
    return page_lib.Page({"a<b": "&"}, NASTY[0], [pieces], [drawing], "hsd show '<i>'")


def test_html_escapes_everything():
    page = html.render(nasty_page())
    assert page.encode("utf-8")  # no lone surrogate
    assert "<script" not in page and "<i>" not in page
    root = ET.fromstring(page.partition("\n")[2])
    given = ["".join(s.itertext()) for s in root.iter(f"{XHTML}span") if s.get("class") == "given" and s.get("title")]
    shown = [NASTY[0], NASTY[1], "a\\x00\\x1b\\r\\ufffe\\ud800b", "\u21b5\n", " "]
    assert given == [text + "</s>" for text in shown]
    labels = ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]
    assert "<script>alert\u2026" in labels


def test_html_loads_nothing():
    root = ET.fromstring(html.render(nasty_page()).partition("\n")[2])
    for element in root.iter():
        assert element.tag.rpartition("}")[2] not in ("script", "link", "img", "iframe", "object", "use", "image")
        assert "src" not in element.attrib
        assert element.get("href", "#").startswith("#")
    style = next(root.iter(f"{XHTML}style")).text
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids)) == 1
    assert {e.get("href") for e in root.iter(f"{XHTML}a")} == {"#round-1"}


def test_png_has_a_limit(tmp_path, monkeypatch):
    pytest.importorskip("plutoprint")
    monkeypatch.setattr(png, "MAX_HEIGHT", 100)
    with pytest.raises(ValueError, match=r"--max-rounds.*100"):
        png.write(nasty_page(), tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def texts_of(page: str) -> list[str]:
    """The text of every pass, without the marks."""
    root = ET.fromstring(page.partition("\n")[2])
    found = []
    for element in root.iter():
        if element.get("class") == "pass":
            for marked in element.iter(f"{XHTML}span"):
                if marked.get("class") == "mark":
                    marked.text = ""
            found.append("".join(element.itertext()))
    return found


def test_show_writes_both_files(folders, tmp_path, capsys):
    page, image = tmp_path / "a.html", tmp_path / "a.PNG"
    files = [page, image] if importlib.util.find_spec("plutoprint") else [page]
    arguments = [*both(folders), *command_line.SHORT, *command_line.TREE, "--max-rounds", "2"]
    assert hsd("show", *arguments, *(part for path in files for part in ("--out", path)), PROMPT) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == "".join(f"wrote {path}\n" for path in files)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files[1:])
    params = hsd_jax.load(target=folders.target, drafter=folders.drafter)
    out = hsd_jax.decode(params, PROMPT, max_new_tokens=12, tree=TreeConfig(5, 3, 2))
    text = page.read_text(encoding="utf-8")
    assert "".join(texts_of(text)) == out.text[0]
    assert len(texts_of(text)) == out.stats.num_target_passes
    assert text.count("<section ") == 2 and f"the first 2 of {out.stats.num_target_passes}" in text
    assert f"<dt>tau</dt><dd>{out.stats.tau:.2f}</dd>" in text


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8, "top_k": 20, "seed": 3},
        {"temperature": 0.9, "accept": "recursive", "lossy": "linear:0.1"},
        pytest.param(
            {"temperature": 0.9, "accept": "recursive", "draw": "independent", "top_p": 0.9}, marks=pytest.mark.slow
        ),
        pytest.param({"temperature": 0.8, "reuse": "sum"}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.8, "reuse": "skip:1"}, marks=pytest.mark.slow),
    ],
)
def test_page_has_text_and_counts_of_decode(folders, settings, capsys):
    params = hsd_jax.load(target=folders.target, drafter=folders.drafter)
    plain = {"top_k": None, "top_p": None, "seed": 0, "accept": "match", "draw": None, "reuse": "none"}
    settings = {**plain, "max_new_tokens": 20, "tree": TreeConfig(5, 3, 2), **settings}
    page = page_lib.make_page(params, PROMPT, settings, "hsd show")
    assert capsys.readouterr().err == ""
    out = hsd_jax.decode(params, PROMPT, **settings)
    assert [p.token for pieces in page.pieces for p in pieces] == out.tokens[0].tolist()
    assert "".join(p.text for pieces in page.pieces for p in pieces) == out.text[0]
    assert [page.rounds_by_count.get(n + 1, 0) for n in range(4)] == out.stats.accepted_histogram.tolist()
    for pieces, drawing in zip(page.pieces, page.drawings, strict=True):
        marked = [box.kind for box in drawing.boxes]
        assert marked.count("accepted") + marked.count("target") == len(pieces)
        assert [p.origin == "from the target" for p in pieces].count(True) == marked.count("target")


def test_show_says_when_decode_differs(folders, monkeypatch, tmp_path, capsys):
    real = hsd_jax.decode

    def other(*args, **settings):
        out = real(*args, **settings)
        return dataclasses.replace(out, tokens=out.tokens + 1)

    monkeypatch.setattr("hsd_jax.api.decode", other)
    out = tmp_path / "a.html"
    assert hsd("show", *both(folders), *command_line.SHORT, *command_line.TREE, "--out", out, PROMPT) == 0
    assert "another text" in capsys.readouterr().err


def test_show_without_a_tokenizer_shows_ids(folders, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        if (Path(folders.target) / name).is_file():
            shutil.copy(Path(folders.target) / name, target)
    out = tmp_path / "a.html"
    arguments = [
        "--target",
        target,
        "--drafter",
        folders.drafter,
        *command_line.SHORT,
        *command_line.TREE,
        "--out",
        out,
    ]
    assert hsd("show", *arguments, "--ids", "7 8 9") == 0
    params = hsd_jax.load(target=str(target), drafter=folders.drafter)
    wanted = hsd_jax.decode(params, [7, 8, 9], max_new_tokens=12).tokens[0].tolist()
    page = out.read_text()
    assert list(map(int, "".join(texts_of(page)).split())) == wanted
    assert '<span class="prompt">7 8 9 </span>' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "a.pdf", "the"], ".html or .png"),
        (["--out", "a.html", "--out", "b", "the"], "--out b"),
        (["--out", "no/such/a.html", "the"], "no/such"),
        (["--out", "a.html"], "PROMPT"),
        (["--out", "a.html", ""], "prompt 0"),
        (["--out", "a.html", "--max-new-tokens", "0", "the"], "hsd"),
    ],
)
def test_bad_values_end_with_2_and_one_line(folders, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert hsd("show", *both(folders), *arguments) == 2
    error = capsys.readouterr().err
    last = error.splitlines()[-1]  # behind the usage, if it is a single argument that is wrong
    assert last.startswith(("hsd: error: ", "hsd show: error: ")) and message in last
    assert not list(tmp_path.iterdir())


def test_show_wants_a_file_and_rounds(tmp_path, capsys):
    assert hsd("show", "--demo", "the") == 2
    assert "--out" in capsys.readouterr().err
    assert hsd("show", "--demo", "--out", tmp_path / "a.html", "--max-rounds", "0", "the") == 2
    assert "--max-rounds" in capsys.readouterr().err


def test_png_without_what_draws_it(folders, monkeypatch, capsys):
    monkeypatch.setattr(show.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(options, "load_params", lambda args: pytest.fail("found out too late"))
    assert hsd("show", *both(folders), "--out", "a.png", "the") == 2
    assert "hsd_jax[picture]" in capsys.readouterr().err


def test_special_tokens_are_spelled(folders):
    params = hsd_jax.load(target=folders.target, drafter=folders.drafter)
    [end] = params.eos
    assert page_lib.label_of(params.tokenizer, [], end) == "</s>"
    assert page_lib.label_of(None, [], end) == str(end)
    space = params.tokenizer.encode("the cat")[-1]
    assert page_lib.label_of(params.tokenizer, params.tokenizer.encode("the"), space).startswith("\u00b7")
    drafted = make_round(tokens=np.array([end, end, end, end]), emitted=[end], path=[0], next_token=end)
    [[piece]] = page_lib._pieces(params.tokenizer, params.tokenizer.encode("the"), [drafted])
    assert (piece.text, piece.mark) == ("", "</s>")
