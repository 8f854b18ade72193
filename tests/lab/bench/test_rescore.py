"""`hsd train ngram`, `hsd bench rescore` and `--rescore`: from text to a table, and to drafts of the same text."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support import command_line, toy
from support.command_line import TEXTS, both, hsd

import hsd_jax
from hsd_jax.drafters.rescored.config import RescoredConfig
from hsd_jax.lab.bench import lattice, methods, rescore
from hsd_jax.planning.texts import Texts

folders, own_cache = command_line.folders, command_line.own_cache


@pytest.fixture(scope="module")
def ngrams(folders):
    """A folder of 3-grams counted in the texts of the prompts."""
    out = folders.root / "ngram"
    options = ["--target", folders.target, "--data", folders.data, "--order", "3", "--loss-on", "all", "--out", out]
    assert hsd("train", "ngram", *options) == 0
    return out


def test_a_table_from_the_command_line(folders, ngrams, tmp_path, capsys):
    """One arc and an oracle are the argmax of each head; the low-rank scorer of a hidden drafter is its injector."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": " ".join(t.split()[:4])}) + "\n" for i, t in
                               enumerate(TEXTS * 8)))  # fmt: skip
    options = ["--scorers", f"three={ngrams}", "--prompts", prompts, "--limit", "3", "--max-new-tokens", "12"]
    assert hsd("bench", "rescore", *both(folders), *options, "--trees", "6x3x2", "--json", out) == 0
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    rows = {(row["states"], row["scorer"]): row for row in record["rows"]}
    kinds = ["none", "its own", "0-gram", "three"]
    assert list(rows) == [(states, kind) for states in ("states alone", "with token information") for kind in kinds]
    lattice = record["lattice"]
    oracles = [lattice["oracle_tau"][k] for k in ("1", "4", "16")]
    assert oracles[0] == rows["states alone", "none"]["tau"] and oracles == sorted(oracles)
    assert len(lattice["entropy"]) == 3 and 0 <= lattice["repeated_neighbours"] <= 1
    for row in rows.values():
        control = rows[row["states"], "0-gram"]["tau"]
        assert row["tau"] >= 1 and row["over_0_gram"] == row["tau"] / control and row["tree"] in printed
    assert rows["states alone", "three"]["alpha"] in rescore.ALPHAS
    assert "tau if an oracle chose the path: 1 arcs" in printed


@pytest.mark.slow
def test_rescored_drafts_do_not_change_a_text(folders, ngrams, capsys):
    tree = ["--nodes", "6", "--depth", "3", "--width", "2", "--max-new-tokens", "8", "--json", "the cat"]
    found = []
    for more in ([], ["--rescore", ngrams], ["--rescore", "0-gram", "--alpha", "0"]):
        assert hsd("generate", *both(folders), *more, *tree) == 0
        found.append(json.loads(capsys.readouterr().out)["tokens"])
    assert found[0] == found[1] == found[2]
    assert hsd("generate", *both(folders), "--alpha", "1", *tree) == 2
    assert "--alpha weighs the scores of --rescore DIR: give both" in capsys.readouterr().err
    assert hsd("generate", *both(folders), "--rescore", "nowhere", *tree) == 2
    message = capsys.readouterr().err
    assert "nowhere: not one of" in message and "ngram_config.json" in message


def test_a_method_may_be_rescored(folders, ngrams, tmp_path):
    file = tmp_path / "methods.yaml"
    file.write_text(f"three: {{tree: 6x3x2, rescore: {ngrams}, alpha: 0.25}}\nown: {{tree: 6x3x2}}\n")
    params = hsd_jax.load(target=folders.target, drafter=folders.drafter)
    _, three, own = methods.make_modes(params, methods.read_methods(file), lambda drafter: None)
    assert isinstance(three.params.drafter_config, RescoredConfig) and own.params is params
    assert float(three.params.drafter["rescorer"]["alpha"][0]) == 0.25
    file.write_text("three: {rescore: 0-gram, alpha: much}\n")
    with pytest.raises(ValueError, match=r"three\.alpha='much': .*number"):
        methods.read_methods(file)


def test_entropy_repetitions_and_ranks_are_those_of_the_logits():
    """Of a drafter whose heads are what the feature says: every state is the target's own head on its own feature."""
    config = toy.target_config()
    weights = toy.make_target(config)
    drafter_config = toy.drafter_config(config, "medusa")
    drafter = toy.make_drafter(drafter_config, config, weights)
    drafter["heads"] = {name: jnp.zeros_like(part) for name, part in drafter["heads"].items()}
    params = hsd_jax.Params(weights, drafter, config, drafter_config)
    text = np.arange(9) % 5
    texts = Texts.join([text[:4]], [text[4:]])
    found = lattice.facts(params, texts, 2)
    hidden = np.float64(toy.causal_pass(weights, config, jnp.int32(text)[None]).hidden[0])
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + drafter_config.norm_eps)
    logits = normed * np.float64(drafter["output_norm"]["weight"]) @ np.float64(weights["embedding"]).T
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    roots = np.arange(3, 8)
    entropy = -(np.exp(logp) * logp).sum(-1)[roots - 1].mean()
    np.testing.assert_allclose(found["entropy"], [entropy, entropy], rtol=1e-4)
    assert found["repeated_neighbours"] == 1.0
    order = np.argsort(-logits[roots - 1], -1)
    for arcs in lattice.ORACLES:
        right = [[text[root + 1 + d] in row[:arcs] for d in range(2) if root + 1 + d < 9] for root, row in
                 zip(roots, order, strict=True)]  # fmt: skip
        root, passes = 0, 0
        while root < 5:
            num = next((i for i, is_right in enumerate(right[root]) if not is_right), len(right[root]))
            root, passes = root + min(num + 1, 5 - root), passes + 1
        assert found["oracle_tau"][str(arcs)] == pytest.approx(5 / passes)
