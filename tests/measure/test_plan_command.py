"""`hsd plan`, `--stack` and the key of `hsd bench`: from costs and acceptance to a stack, and its text."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
from support import command_line, toy
from support.command_line import TEXTS, hsd

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.table import method_of
from hsd_jax.lab.bench import methods
from hsd_jax.measure import stack as stacks
from hsd_jax.measure.simulate import accepted_lengths
from hsd_jax.measure.texts import write_texts
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.planning.acceptance import mean
from hsd_jax.train.pretrain import grown, layer_sources

folders, own_cache = command_line.folders, command_line.own_cache


@pytest.fixture(scope="module")
def models(folders):
    """Folders of two small models of the target's vocabulary, the larger first."""
    config, weights = find(folders.target).config, find(folders.target).weights()
    convert.save_target(folders.root / "small", config, toy.make_small_lm(weights))
    tiny = dataclasses.replace(config, num_layers=1)
    convert.save_target(folders.root / "tiny", tiny, toy.make_target(tiny, seed=3))
    return [str(folders.root / "small"), str(folders.root / "tiny")]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": str(i), "prompt": " ".join(text.split()[:4])} for i, text in enumerate(TEXTS)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def priced(params, prompts, num_tokens: int, drafts: list[int], temperature: float) -> list[float]:
    """A pass of the target, by its layers and drafts, and of the model that drafts for each draft."""
    is_model = max(drafts) and method_of(params.drafter_config).is_language_model
    one = 1e-3 * params.drafter_config.num_layers if is_model else 1e-4
    return [1e-3 * params.target_config.num_layers * (1 + 0.1 * n) + n * one for n in drafts]


SHORT = ["--limit", "2", "--max-new-tokens", "8", "--max-length", "2", "--repeats", "1"]


@pytest.mark.parametrize("price", [priced, pytest.param(None, marks=pytest.mark.slow)])
def test_a_plan_from_the_command_line(folders, models, prompts, monkeypatch, capsys, price):
    """Every way is predicted and measured, each with the text of plain decoding; the largest model comes last."""
    out = prompts.parent / "plan.json"
    if price is not None:
        monkeypatch.setattr(stacks, "round_seconds", price)
    names = ["--target", folders.target, "--models", *models, "--prompts", prompts]
    assert hsd("plan", *names, *SHORT, "--json", out) == 0
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    rows = {row["way"]: row for row in record["rows"]}
    assert list(rows) == [stacks.PLAIN, stacks.SINGLE, stacks.STACK]
    for row in rows.values():
        assert row["same_text_as_plain"] == 2 and row["measured_seconds"] > 0 and row["predicted_seconds"] > 0
    # A single drafter's rounds are those of the walk over the text.
    assert rows[stacks.SINGLE]["predicted_tau"] == pytest.approx(rows[stacks.SINGLE]["tau"])
    assert {tuple(one["pair"]) for one in record["pairs"]} == {(0, 1), (0, 2), (1, 2)}
    assert all(0 <= one["accepted"] <= 1 and len(one["round_seconds"]) == 3 for one in record["pairs"])
    stack = rows[stacks.STACK]
    assert stack["tree"] == TreeConfig.chain(sum(stack["lengths"])).name
    assert "fastest by prediction" in printed and "decode with" in printed
    if price is not None:
        assert record["models"] == [models[1], models[0], "target"]  # by what they cost
        assert rows[stacks.PLAIN]["predicted_seconds"] == pytest.approx(2e-3)


@pytest.mark.slow
def test_a_trained_drafter_at_the_bottom(folders, prompts, tmp_path, monkeypatch, capsys):
    """A deeper target, the model that it was grown from, and that model's hidden-state drafter, which drafts for no
    other: so what drafts for the target alone is the model."""
    config = find(folders.target).config
    sources = layer_sources(config.num_layers, 2 * config.num_layers)
    deep = grown(find(folders.target).weights(), sources)
    convert.save_target(tmp_path / "deep", dataclasses.replace(config, num_layers=len(sources)), deep, eos=(1,))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(f"{folders.target}/{name}", tmp_path / "deep" / name)
    monkeypatch.setattr(stacks, "round_seconds", priced)
    out, names = prompts.parent / "plan.json", [folders.target, folders.drafter]
    pair = ["--target", tmp_path / "deep", "--models", *names, "--prompts", prompts]
    assert hsd("plan", *pair, *SHORT, "--json", out) == 0
    record = json.loads(out.read_text())
    assert record["models"] == [folders.drafter, folders.target, "target"]
    rows = {row["way"]: row for row in record["rows"]}
    assert [rows[way]["chain"] for way in (stacks.SINGLE, stacks.STACK)] == [[1, 2], [0, 1, 2]]
    assert all(row["same_text_as_plain"] == 2 for row in rows.values())
    assert [one["pair"] for one in record["pairs"]] == [[0, 1], [1, 2]]
    assert rows[stacks.SINGLE]["predicted_tau"] == pytest.approx(rows[stacks.SINGLE]["tau"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_is_right_where_its_drafts_are(folders, models, temperature):
    """One pass over a text counts what drafting from every token of it does, for chains of every length."""
    params = hsd_jax.load(target=folders.target, drafter=models[0], precision="exact")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, params.target_config.vocab_size, n) for n in (3, 6)]
    texts = write_texts(params, prompts, 12, temperature, seed=5)
    laws = stacks.laws_of(params, texts, 4, temperature)
    drafts = [TreeConfig.chain(n) for n in (1, 2, 3, 4)]
    fates, _ = accepted_lengths(params, texts, drafts, temperature)
    for n, (law, fate) in enumerate(zip(laws, fates, strict=True), 1):
        assert mean(law) == pytest.approx(fate.tau) and sum(law.values()) == pytest.approx(1.0)
        assert [law[k + 1] * fate.num_passes for k in range(n + 1)] == pytest.approx(list(fate.histogram))
    assert mean(laws[3]) > 1.2  # so something was right
    counts = stacks.count_accepted(params, texts, temperature)
    assert counts.shape == (2, int((texts.length - texts.prompt_length).max()))


@pytest.mark.slow
def test_stacks_by_name(folders, models, prompts, capsys):
    params = hsd_jax.load(target=folders.target, drafter=models[0])
    stacked = stacks.stacked(params, [f"{models[1]}@3", "lookup:2"]).drafter_config
    assert (stacked.length, stacked.inner.length, stacked.inner.inner.max_ngram) == (3, 7, 2)
    assert stacks.stacked(params, []) is params
    with pytest.raises(ValueError, match=r"--stack lookup@x: .*DRAFTER@T"):
        stacks.stacked(params, ["lookup@x"])
    file = prompts.parent / "methods.yaml"
    file.write_text('deep: {tree: 6x5x1, stack: "lookup@3"}\nown: {stack: lookup}\n')
    _, deep, own = methods.make_modes(params, methods.read_methods(str(file))[0], lambda drafter: None)
    assert deep.params.drafter_config.length == 3 and own.tree == TreeConfig.chain(11)
    small = ["--target", folders.target, "--drafter", models[0], "--max-new-tokens", "8", "--json", "the cat"]
    texts = []
    for more in ([], ["--stack", f"{models[1]}@2", "--stack", "lookup@3"]):
        assert hsd("generate", *more, *small) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1]
    assert hsd("generate", "--target", folders.target, "--stack", "lookup", "the cat") == 2
    assert "small language model" in capsys.readouterr().err
