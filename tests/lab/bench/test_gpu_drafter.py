"""`benchmarks/gpu`: loops and duplicates, turns of a template, shares of the time, pieces, packing, what is refused.

The slow test runs the whole pipeline with the bundled pair.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types

import answers
import numpy as np
import pack
import pieces
import pytest
import train_drafter

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.models.checkpoint import DEMO
from hsd_jax.train.response_prompts import Prompt

REPO = pack.REPO

DEMO_RECIPE = [
    *("model.feature_layers=[]", "model.intermediate_size=1024", "model.draft_vocab=0.5", "model.window=256"),
    *("train.batch=2", "train.length=256", "train.log_every=5", "train.steps=200", "loss.anchors_per_row=16"),
    *("eval.prompts=2", "eval.prompt_tokens=16", "eval.max_new_tokens=16"),
]
"""Changes that make the recipe fit the bundled pair, and small."""


CHAIN = TreeConfig.chain(7)


def options_of(tmp_path, *options: str, minutes: str = "2") -> list[str]:
    changes = [argument for change in DEMO_RECIPE for argument in ("--set", change)]
    places = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--target", "demo"]
    return ["--minutes", minutes, *places, "--rows", "8", *changes, *options]


def call(tmp_path, *options: str, minutes: str = "2") -> int:
    return train_drafter.main(options_of(tmp_path, *options, minutes=minutes))


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ([7] * 11, False),  # 8 times the same four
        ([7] * 12, True),
        ([9, 1, 2, 3, 4] * 9, True),
        (list(range(256)), False),
        ([2**17, 5, 5, 5, 2**17 + 1, 5, 5, 5] * 4, False),  # large ids are not mixed up
    ],
)
def test_loops(tokens, expected):
    assert answers.is_loop(tokens) is expected


class Letters:
    """A tokenizer of characters, with one special token."""

    special = "<|end|>"

    def encode(self, text, add_special_tokens):
        parts = text.split(self.special)
        ids = [[ord(c) for c in part] for part in parts]
        joined = ids[0]
        for part in ids[1:]:
            joined = [*joined, 1, *part]
        return types.SimpleNamespace(ids=joined)

    def decode(self, ids, skip_special_tokens=True):
        return "".join("" if i == 1 and skip_special_tokens else self.special if i == 1 else chr(i) for i in ids)


def chatml(turns, is_open):
    return "".join(f"[{who}]\n{text}<|end|>\n" for who, text in turns) + ("[Assistant]\n" if is_open else "")


def test_turns_of_a_template():
    words = answers.Words(Letters(), None, chatml)
    assert words.close == "<|end|>"
    asked = [("User", "Who?"), ("Assistant", "A QUESTION")]
    assert Letters().decode(words.header(asked), False) == chatml(asked, False) + "[User]\n"
    assert words.said([ord(c) for c in "Two\nlines "], True) == "Two\nlines"
    assert words.said([*map(ord, "No end")], False) is None
    assert words.said([*map(ord, "A turn"), 1, *map(ord, "\n[A")], False) == "A turn"


def test_questions_are_sorted_out(tmp_path):
    class Scripted:
        """A writer that says the given texts, all closed."""

        rows, params = 6, types.SimpleNamespace(max_len=500)

        def __init__(self):
            self.said = [" How are you?", "how  ARE you? ", "Hm", "no end", "ab " * 40, "And you?"]

        def begins(self, stop_at):
            return True

        def write(self, prompts, temperatures, seeds, max_new_tokens, stop_at):
            assert set(temperatures) == {1.0} and len(set(seeds)) == 6
            texts = [[*map(ord, text), 1] for text in self.said]
            return answers.Written([np.array(t) for t in texts], [text != "no end" for text in self.said])

    counts, saved = answers.Counts(), []
    stage = answers.Stage("questions", counts, tmp_path / "q.jsonl", 0.0, lambda: saved.append(counts.kept))
    words = answers.Words(Letters(), None, lambda turns, is_open: chatml(turns, is_open).replace("<|end|>", "<|x|>"))
    answers.questions(stage, Scripted(), words, 0, 2)
    kept = [json.loads(line)["turns"] for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert kept == [[["User", "How are you?"]], [["User", "And you?"]]]
    assert counts.dropped == {"duplicates": 1, "too short": 1, "without an end": 1, "loops": 1}
    assert counts.is_done and counts.batches == 1 and counts.rows == 6 and saved[-1] == 2
    path = tmp_path / "q.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:9])  # the rest of a killed run
    answers.Stage("questions", counts, path, 0.0, lambda: None)
    assert path.read_text() == whole and counts.size == path.stat().st_size


def test_answers_are_half_greedy_and_without_loops(tmp_path):
    class Scripted:
        rows, temperatures = 4, []

        def begins(self, stop_at):
            return True

        def write(self, prompts, temperatures, seeds, max_new_tokens, stop_at):
            self.temperatures += temperatures
            texts = [np.array([*map(ord, "ab" * 20 if t == 0 else "An answer")]) for t in temperatures]
            return answers.Written(texts, [False] * len(texts))

    writer, counts = Scripted(), answers.Counts()
    stage = answers.Stage("answers", counts, tmp_path / "a.jsonl", 0.0, lambda: None)
    prompts = [Prompt((65, 66 + i), "A" + chr(66 + i), str(i)) for i in range(40)]
    answers.answers(stage, writer, answers.Words(Letters(), None, chatml), 0, prompts, 40)
    assert 0.3 < np.mean(np.array(writer.temperatures) == 0) < 0.7 and set(writer.temperatures) == {0.0, 0.8, 1.0}
    kept = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert {line["response"] for line in kept} == {"An answer"} and counts.dropped["loops"] + len(kept) == 40


def test_pieces_are_joined(tmp_path):
    there, drafter = tmp_path / "there", tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "weights").write_bytes(np.random.default_rng(0).bytes(2500))
    (drafter / "config.json").write_text("{}")
    first = pieces.split(drafter, there, 5000)
    assert len(first) == 4 and max(p.stat().st_size for p in first[:-1]) == 5000
    joined = pieces.join(there, tmp_path / "joined")
    assert {p.name: p.read_bytes() for p in joined.iterdir()} == {p.name: p.read_bytes() for p in drafter.iterdir()}
    (drafter / "weights").write_bytes(b"better")
    second = pieces.split(drafter, there, 5000)
    assert sorted(there.iterdir()) == sorted(second)
    assert (pieces.join(there, tmp_path / "again") / "weights").read_bytes() == b"better"
    second[0].write_bytes(second[0].read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"pieces\.json"):
        pieces.join(there, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize("end", ["normal", "signal"])
def test_large_files_come_back(tmp_path, monkeypatch, end):
    """Of a checkout with a large and a small tracked file."""
    large = tmp_path / "deep" / "large"
    large.parent.mkdir()
    large.write_bytes(b"x" * 3000)
    (tmp_path / "small").write_bytes(b"y")
    (tmp_path / ".gitignore").write_text(".gpu/\nruns/\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(pack, "REPO", tmp_path)
    assert pack.tree() == {"deep/large": 3000, "small": 1, ".gitignore": 12}
    try:
        with pack.held_back(["deep/large"]):
            assert not large.exists() and pack.tree() == {"small": 1, ".gitignore": 12}
            if end == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit:
        assert end == "signal"
    assert large.read_bytes() == b"x" * 3000 and pack.restore() == []
    away, journal = pack._places()  # as a killed run leaves it
    (away / "deep").mkdir(parents=True)
    journal.write_text('["deep/large"]')
    large.rename(away / "deep" / "large")
    assert pack.restore() == ["deep/large"] and large.is_file() and not journal.exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--start", "none"], "none"),
        (["--rows", str(10**7)], "memory|free"),
        (["--set", "model.intermediate_size=30000"], "MB"),
    ],
)
def test_a_run_is_refused_before_anything_is_written(tmp_path, capsys, options, message):
    device = [] if "--device" in options else ["--device", "any"]
    assert call(tmp_path, *device, *options) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and any(part in error for part in message.split("|"))
    assert not list(tmp_path.iterdir())


def test_another_run_is_refused(tmp_path, capsys):
    work = tmp_path / "work"
    work.mkdir()
    (work / "other").touch()
    assert call(tmp_path, "--device", "any") == 2
    assert "is not empty" in capsys.readouterr().err
    (work / "other").unlink()
    run = train_drafter.Run(train_drafter.parse(options_of(tmp_path, "--device", "any")))
    (work / "state.json").write_text(json.dumps(run.state))
    assert call(tmp_path, "--device", "any", "--seed", "1") == 2
    assert "seed is 0 there and 1 here" in capsys.readouterr().err
    assert [path.name for path in work.iterdir()] == ["state.json"] and not (tmp_path / "out").exists()


PROMPT = "User: I need a table for two.\nAssistant:"


@pytest.mark.slow
def test_the_whole_pipeline(tmp_path, capsys):
    """About three minutes on however slow a machine, since a run takes no more than it is given."""
    start = ["--start", str(DEMO / "drafter")]

    def run(minutes: str) -> str:
        """What the script prints, in a process of its own."""
        options = options_of(tmp_path, "--device", "any", *start, minutes=minutes)
        settings = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
            "PYTHONPATH": str(REPO)
        }
        command = [sys.executable, train_drafter.__file__, *options]
        ended = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    shown = run("2")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert "programs of the training are compiled" in shown
    for name in ("questions", "answers", "second questions", "second answers"):
        assert report[name]["kept"] > 0, name
    assert report["training"]["steps"] > 5 and report["seconds"] < 150
    assert report["training"]["evaluations"][0]["eval"]["tau"] > 1
    assert len(list((tmp_path / "out").iterdir())) <= 8
    folder = pieces.join(tmp_path / "out", tmp_path / "joined")
    params = hsd_jax.load("demo", drafter=folder, strict=True)
    drafted, plain = (
        hsd_jax.decode(params, PROMPT, 48, tree=tree, speculate=tree is not None) for tree in (CHAIN, None)
    )
    assert drafted.stats.tau > 1.5 and (drafted.tokens == plain.tokens).all()
    assert "resuming at step" in run("1"), "the same command goes on"
    assert call(tmp_path, "--device", "any", minutes="1") == 2, "without --start it is another run"
    assert "holds another run: start" in capsys.readouterr().err
