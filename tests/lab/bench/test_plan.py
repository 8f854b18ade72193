"""`hsd plan`, `--stack` and the key of `hsd bench`: from costs and acceptance to a stack, and its text."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from support import command_line, toy
from support.command_line import TEXTS, hsd

import hsd_jax
from hsd_jax.config import NO_REUSE, TreeConfig
from hsd_jax.drafters.table import method_of
from hsd_jax.lab.bench import hierarchy, hierarchy_report, methods, rounds
from hsd_jax.models import convert
from hsd_jax.planning.acceptance import mean
from hsd_jax.planning.hierarchy import Hierarchy, RoundParts, replayed, rounds_of
from hsd_jax.planning.pearl import as_target
from hsd_jax.planning.simulate import accepted_lengths
from hsd_jax.planning.texts import Texts, write_texts
from hsd_jax.train.target import grown, layer_sources

folders, own_cache = command_line.folders, command_line.own_cache


@pytest.fixture(scope="module")
def models(folders):
    """Folders of two small models of the target's vocabulary, the larger first."""
    config = convert.read_config(folders.target)
    weights = convert.read_weights(folders.target, config)
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


def priced(model, drafts: int, context: int):
    """A target of 2 layers for which the small model, as dear, is no use."""
    layers = model.target_config.num_layers
    return lambda: layers * (1 + 0.1 * drafts) * 1e-3


def round_priced(pair, prompts, num_tokens: int, drafts: int | None, temperature: float) -> float:
    """A pass of the target, and of the drafter for each draft."""
    whole = priced(pair, drafts or 0, 0)()
    if not method_of(pair.drafter_config).is_language_model:
        return whole + 1e-4
    return whole + (drafts * priced(as_target(pair), 0, 0)() if drafts else 0.0)


@pytest.mark.parametrize("price", [priced, pytest.param(None, marks=pytest.mark.slow)])
def test_a_plan_from_the_command_line(folders, models, prompts, monkeypatch, capsys, price):
    """Every way is predicted and measured, each with the text of plain decoding; the largest model comes last."""
    out = prompts.parent / "plan.json"
    if price is not None:
        monkeypatch.setattr(rounds, "timed_passes", price)
        monkeypatch.setattr(rounds, "round_seconds", round_priced)
    options = ["--prompts", prompts, "--limit", "2", "--max-new-tokens", "8", "--max-length", "2", "--repeats", "1"]
    assert hsd("plan", "--target", folders.target, "--models", *models, *options, "--json", out) == 0
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    rows = {row["way"]: row for row in record["rows"]}
    assert list(rows) == [hierarchy.PLAIN, hierarchy.SINGLE, hierarchy.STACK]
    for row in rows.values():
        assert row["same_text_as_plain"] == 2 and row["measured_seconds"] > 0 and row["predicted_seconds"] > 0
    # A single drafter's rounds are those of the walk over the text.
    assert rows[hierarchy.SINGLE]["predicted_tau"] == pytest.approx(rows[hierarchy.SINGLE]["tau"])
    accept = np.array(record["acceptance"])
    assert (np.diag(accept) == 1).all() and (np.tril(accept, -1) == 0).all() and (accept >= 0).all()
    stack = rows[hierarchy.STACK]
    assert len(stack["passes"]) == 2 and stack["passes"][1] >= stack["passes"][0]
    assert (
        stack["handed_up"][0] >= stack["lengths"][1] and stack["tree"] == TreeConfig.chain(sum(stack["lengths"])).name
    )
    assert "fastest by prediction" in printed and f"measured: {record['fastest_measured']}" in printed
    kept = {1: 1, 2: 4, 3: 4}  # two models below the target, and chains of 1 and 2
    assert "the search kept 1 of 1 model, 4 of 2 models, 4 of 3 models" in printed
    assert {size: sum(len(one["chain"]) == size for one in record["candidates"]) for size in kept} == kept
    for size, way in ((2, hierarchy.SINGLE), (3, hierarchy.STACK)):
        least = min(one["replayed_seconds"] for one in record["candidates"] if len(one["chain"]) == size)
        assert rows[way]["replayed_seconds"] == least > 0
    if price is not None:
        assert record["models"] == [models[1], models[0], "target"]  # by what they cost
        assert rows[hierarchy.PLAIN]["formula_seconds"] == pytest.approx(2e-3)


@pytest.mark.slow
def test_a_trained_drafter_at_the_bottom(folders, prompts, tmp_path, monkeypatch, capsys):
    """A deeper target, the model that it was grown from, and that model's hidden-state drafter, which drafts for no
    other: so what drafts for the target alone is the model."""
    config = convert.read_config(folders.target)
    sources = layer_sources(config.num_layers, 2 * config.num_layers)
    deep = grown(convert.read_weights(folders.target, config), sources)
    convert.save_target(tmp_path / "deep", dataclasses.replace(config, num_layers=len(sources)), deep, eos=(1,))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(f"{folders.target}/{name}", tmp_path / "deep" / name)
    monkeypatch.setattr(rounds, "timed_passes", priced)
    monkeypatch.setattr(rounds, "round_seconds", lambda pair, *asked: 5e-3)
    options = ["--prompts", prompts, "--limit", "2", "--max-new-tokens", "8", "--max-length", "2", "--repeats", "1"]
    out, names = prompts.parent / "plan.json", [folders.target, folders.drafter]
    assert hsd("plan", "--target", tmp_path / "deep", "--models", *names, *options, "--json", out) == 0
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert record["models"] == [folders.drafter, folders.target, "target"]
    rows = {row["way"]: row for row in record["rows"]}
    assert [rows[way]["chain"] for way in (hierarchy.SINGLE, hierarchy.STACK)] == [[1, 2], [0, 1, 2]]
    assert all(row["same_text_as_plain"] == 2 for row in rows.values())
    accept = record["acceptance"]
    assert accept[0][2] == 0 and 0 < accept[0][1] <= 1 and accept[1][2] == pytest.approx(1.0)
    assert rows[hierarchy.SINGLE]["predicted_tau"] == pytest.approx(rows[hierarchy.SINGLE]["tau"])
    assert "for a drafter, ms per draft" in printed


def test_lookup_in_a_plan(folders, models, prompts, monkeypatch):
    """It may draft for the target and for every model."""
    monkeypatch.setattr(rounds, "timed_passes", priced)
    monkeypatch.setattr(rounds, "round_seconds", round_priced)
    monkeypatch.setattr(rounds, "follow_seconds", lambda pair, prompt, drafts: 1e-5)
    options = ["--prompts", prompts, "--limit", "2", "--max-new-tokens", "8", "--max-length", "2", "--repeats", "1"]
    out = prompts.parent / "plan.json"
    names = ["lookup", models[1]]
    assert hsd("plan", "--target", folders.target, "--models", *names, *options, "--json", out) == 0
    record = json.loads(out.read_text())
    assert record["models"] == [*names, "target"]
    assert {tuple(one["chain"]) for one in record["candidates"]} == {(2,), (0, 2), (1, 2), (0, 1, 2)}
    rows = {row["way"]: row for row in record["rows"]}
    assert rows[hierarchy.STACK]["chain"] == [0, 1, 2]
    assert all(row["same_text_as_plain"] == 2 for row in rows.values())


def test_the_ways_are_those_of_the_least_replay():
    """The formula takes long chains of the middle model; the replay knows that their last drafts are never right."""
    accept = np.array([[1, 0.75, 0.5], [0, 1, 0.85], [0, 0, 1.0]])
    passes = [[0.02], [0.15] * 17, [1.0] * 17]
    edges = dict.fromkeys(itertools.combinations(range(3), 2), 8)
    laws = {edge: [{2: 1.0}] * 16 for edge in edges}
    parts = RoundParts(passes, laws, dict.fromkeys(edges, 0.0), {(0, 1): [0.0] * 9})
    table = hierarchy.PlanInputs(lambda small, large: None, [], passes, accept, edges, parts)
    candidates = table.candidates()
    assert candidates[2][0].lengths != (1,)  # the formula's first
    found = hierarchy.chosen_of(candidates, parts)
    assert list(found) == [hierarchy.PLAIN, hierarchy.SINGLE, hierarchy.STACK]
    assert found[hierarchy.PLAIN].chain == (2,) and found[hierarchy.SINGLE].lengths == (1,)
    for way in found.values():
        same = candidates[len(way.chain)]
        assert replayed(parts, way).latency == min(replayed(parts, other).latency for other in same)
    assert hierarchy.STACK not in hierarchy.chosen_of({1: candidates[1], 2: candidates[2]}, parts)
    chosen = hierarchy.chosen_by(table, found[hierarchy.SINGLE])
    assert chosen == {"formula_seconds": found[hierarchy.SINGLE].latency, "replayed_seconds": 1.02 / 2}


def test_a_round_costs_what_it_takes_besides_passes():
    """A round of 2 drafts took 1.5: 1.2 are the target's pass, 0.2 the drafter's two."""
    passes = [[0.1, 0.11, 0.12, 0.13], [1.0, 1.1, 1.2, 1.3]]
    assert rounds.beyond_passes(passes, (0, 1, 2), 1.5) == pytest.approx(0.1)


def test_times_of_following_lie_on_a_line(monkeypatch):
    monkeypatch.setattr(rounds, "follow_seconds", lambda pair, prompt, drafts: 1.0 + 0.5 * drafts)
    assert rounds.follow_table(None, [1], 4, 6) == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    assert rounds.follow_table(None, [1], 1, 2) == pytest.approx([1.5, 1.5, 1.5])


def test_acceptance_is_the_overlap_on_text_of_the_larger_model(folders, models):
    """Of a model with itself 1; greedy, the share of places where both would say the same."""
    params = hsd_jax.load(target=folders.target, drafter=models[0], precision="exact")
    small = as_target(params)
    tokens = np.random.default_rng(0).integers(0, params.target_config.vocab_size, (2, 12))
    texts = Texts.join([row[:3] for row in tokens], [row[3:] for row in tokens])
    same = dataclasses.replace(params, drafter=params.target, drafter_config=params.target_config)
    assert rounds.count_accepted(same, texts, 1.0)[1] == pytest.approx(1.0, abs=1e-5)
    best = [
        np.asarray(toy.causal_pass(one.target, one.target_config, texts.tokens).logits).argmax(-1)[:, 2:-1]
        for one in (small, params)
    ]
    _, found = rounds.count_accepted(params, texts, 0.0)
    assert found == pytest.approx((best[0] == best[1]).mean()) and 0 < found < 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_is_right_where_its_drafts_are(folders, models, temperature):
    """One pass over a text counts what drafting from every token of it does, for chains of every length."""
    params = hsd_jax.load(target=folders.target, drafter=models[0], precision="exact")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, params.target_config.vocab_size, n) for n in (3, 6)]
    texts = write_texts(params, prompts, 12, temperature, seed=5)
    laws = rounds.laws_of(params, texts, 4, temperature)
    drafts = [(TreeConfig.chain(n), NO_REUSE) for n in (1, 2, 3, 4)]
    names = params.drafter, params.drafter_config, params.target, params.target_config
    fates, _ = accepted_lengths(*names, texts, drafts, temperature)
    for n, (law, fate) in enumerate(zip(laws, fates, strict=True), 1):
        assert mean(law) == pytest.approx(fate.tau) and sum(law.values()) == pytest.approx(1.0)
        assert [law[k + 1] * fate.num_passes for k in range(n + 1)] == pytest.approx(list(fate.histogram))
    assert mean(laws[3]) > 1.2  # so something was right
    counts, _ = rounds.count_accepted(params, texts, temperature)
    assert counts.shape == (2, 1, int((texts.length - texts.prompt_length).max()))


def test_stacks_by_name(folders, models, prompts, capsys):
    params = hsd_jax.load(target=folders.target, drafter=models[0])
    stacked = hierarchy.stacked(params, [f"{models[1]}@3", "lookup:2"]).drafter_config
    assert (stacked.length, stacked.inner.length, stacked.inner.inner.max_ngram) == (3, 7, 2)
    assert hierarchy.stacked(params, []) is params
    with pytest.raises(ValueError, match=r"--stack lookup@x: .*DRAFTER@T"):
        hierarchy.stacked(params, ["lookup@x"])
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


def test_what_is_no_plan_is_refused(folders, models, tmp_path, capsys):
    shutil.copytree(folders.drafter, tmp_path / "strange")
    config = json.loads((tmp_path / "strange/drafter_config.json").read_text())
    (tmp_path / "strange/drafter_config.json").write_text(json.dumps(config | {"target_hash": "0" * 64}))
    for names, said in (
        (["lookup", "lookup"], "each once"),
        ([models[0], "--max-length", "200"], "1 to 127"),
        ([models[0], models[0]], models[0]),
        ([models[0], str(tmp_path / "strange")], "strange"),
        (["nowhere"], "nowhere"),
    ):
        assert hsd("plan", "--target", folders.target, "--models", *names) == 2
        assert said in capsys.readouterr().err


def test_parts_that_are_timed_anew():
    """A model's round is timed with 2 drafts, a drafter's with those of the way; passes and following are put to the
    pace of the rounds (twice as slow here). Nothing of the stack itself is asked for."""
    models = [hierarchy.Model("d", None, "m"), hierarchy.Model("m", "middle"), hierarchy.Model("target", "target")]
    passes = [[0.1], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [5.0, 5.1, 5.2, 5.3, 5.4, 5.5]]
    edges = {(0, 1): 3, (1, 2): 3}
    laws = {edge: [{n + 1: 1.0} for n in range(1, 7)] for edge in edges}
    parts = RoundParts(passes, laws, dict.fromkeys(edges, 9.0), {(0, 1): [0.25] * 4})
    table = hierarchy.PlanInputs(lambda small, large: None, models, passes, np.eye(3), edges, parts)
    single, stack = Hierarchy((1, 2), (3,), 0.0), Hierarchy((0, 1, 2), (3, 1), 0.0)
    assert hierarchy.parts_of(table, single) == [(1, 2, 2)]
    assert hierarchy.parts_of(table, stack) == [(0, 1, 3), (1, 2, 2)]
    taken = {(1, 2, 2): 15.4, (0, 1, 3): 3.0}  # 2 * (5.2 + 2 * 1.0) and 2 * (1.3 + 3 * 0.1) are passes and drafts
    found = hierarchy.timed_parts(table, stack, taken, 2.0)
    assert found.besides == {(0, 1): pytest.approx(-0.2), (1, 2): pytest.approx(1.0)}
    assert found.passes[2][3] == 10.6 and found.follow == {(0, 1): [0.5] * 4} and found.laws is laws
    (_, above) = rounds_of(found, stack)
    assert above.seconds(4) == pytest.approx(2 * 5.4 + 1.0 + 0.5) and above.again == pytest.approx(2.0 + 0.5)
    taken[1, 2, 2] = 14.0
    assert hierarchy.timed_parts(table, single, taken, 2.0).besides == {(1, 2): 0.0}


def test_four_levels_are_decoded_as_they_were_planned(folders, models):
    """Every level of the stack collects the planned number of tokens, and the printed options build this stack."""
    params = hsd_jax.load(target=folders.target, precision="exact")
    load = lambda name: dataclasses.replace(  # noqa: E731
        hsd_jax.load(target=folders.target, drafter=name, precision="exact"), tokenizer=None
    )
    names, way = ["lookup", models[1], models[0], "target"], Hierarchy((0, 1, 2, 3), (2, 1, 3), 0.0)
    mode = hierarchy.mode_of("deep", way, names, load, params)
    outer = mode.params.drafter_config
    assert mode.tree == TreeConfig.chain(6) and (outer.length, outer.inner.length) == (3, 2)
    row = {"models": names, "chain": way.chain, "lengths": way.lengths, "tree": mode.tree.name}
    assert hierarchy_report.use_of(row) == (
        f"decode with --drafter {models[0]} --stack {models[1]}@3 --stack lookup@2 --nodes 7 --depth 6 --width 1"
    )
    call = {"max_new_tokens": 16, "temperature": 0.8, "seed": 3}
    found = hsd_jax.decode(mode.params, [5, 6, 7, 5, 6], tree=mode.tree, **call)
    plain = hsd_jax.decode(params, [5, 6, 7, 5, 6], speculate=False, **call)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    counts = found.stats.drafter
    assert counts["tokens of level 1"] >= 3 * found.stats.num_target_passes
    assert counts["tokens of level 2"] >= 1 * counts["passes of level 1"]
