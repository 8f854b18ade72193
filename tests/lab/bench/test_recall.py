"""`hsd bench recall`: counts of ranks, and what must equal what is decoded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support import command_line
from support.command_line import TEXTS, both, hsd

from hsd_jax.lab.bench import lattice, recall
from hsd_jax.planning.texts import Texts

folders, own_cache = command_line.folders, command_line.own_cache


def test_recall_by_hand():
    """Two texts of 3 and 2 tokens: depth 2 exists for the roots before their last tokens alone."""
    texts = Texts.join([[5, 6], [7, 8]], [[1, 2, 3], [4, 5]])
    past = 99
    rank = np.array([[[0, 3], [0, 0], [2, past]], [[1, 0], [5, past], [past, past]]])
    found = recall.recall(rank, texts)
    assert found["1"] == pytest.approx([2 / 5, 2 / 3])
    assert found["4"] == pytest.approx([4 / 5, 3 / 3])
    assert found["16"] == pytest.approx([5 / 5, 3 / 3])
    # Text 1: two tokens and a third of the target's own in one pass; text 2: a pass a token.
    assert lattice.oracle_tau(rank, texts)["4"] == pytest.approx(5 / 2)
    assert lattice.oracle_tau(rank, texts)["1"] == pytest.approx(5 / 4)


def test_the_best_token_of_the_command_line_is_the_chain(folders, tmp_path, capsys):
    """Of greedy text: an oracle that may choose one token of the informed logits is the drafter's own chain."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("\n".join(" ".join(text.split()[:4]) for text in TEXTS))
    options = ["--prompts", prompts, "--max-new-tokens", "12", "--temperatures", "0", "--json", out]
    assert hsd("bench", "recall", *both(folders), *options) == 0
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    alone, informed = record["rows"]
    assert (alone["logits"], informed["logits"]) == (recall.STATES, recall.INFORMED)
    assert informed["oracle_tau"]["1"] == informed["chain_tau"]
    for row in record["rows"]:
        shares = np.array([row["recall"][k] for k in ("1", "4", "16")])
        assert (np.diff(shares, axis=0) >= 0).all() and shares.min() >= 0 and shares.max() <= 1
    assert "oracle tau" in printed and "with token information" in printed


def test_drafters_that_read_their_drafts_are_refused(folders, capsys):
    asked = ["--target", folders.target, "--drafter", "lookup", "--prompts", folders.data]
    assert hsd("bench", "recall", *asked) == 2
    assert "kind lookup has no token-free states; these have: hidden, medusa" in capsys.readouterr().err
