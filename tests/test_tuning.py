"""`tune`: predictions against simulation and by hand, the choice against injected timings, the record, the program.

That simulation is real decoding, round by round, stands in `test_evaluate.py`.
"""

from __future__ import annotations

import dataclasses
import json
import types

import numpy as np
import pytest
import test_cli
import toy

import hsd_jax
from hsd_jax import measure, tuned, tuning
from hsd_jax.config import FEATURE, LookupConfig, ReuseConfig, SmallLMConfig, TreeConfig
from hsd_jax.infer import metrics
from hsd_jax.params import Params
from hsd_jax.request import prepare
from hsd_jax.train import evaluate

folders, own_cache, hsd, both = test_cli.folders, test_cli.own_cache, test_cli.hsd, test_cli.both

PROMPTS = [np.arange(3, 3 + n) % toy.VOCAB for n in (2, 5, 9)]
SMALL, CHAIN, WIDE = TreeConfig(3, 2, 1), TreeConfig(5, 4, 1), TreeConfig(8, 3, 2)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def params() -> Params:
    config = toy.VARIANTS["llama"]
    weights = toy.weights("llama")
    drafter_config = toy.drafter_config(config)
    drafter = toy.make_drafter(drafter_config, config, weights)
    return Params(weights, drafter, config, drafter_config, max_len=128, precision="exact")


class Clock:
    """In place of `time_modes`: plain texts are real, every mode takes the time that its tokens per second ask for.

    Args:
      params: of the pair; decodes plainly, once.
      rates: tokens per second of each mode, for every call in turn; the last one also serves those behind it.
    """

    def __init__(self, params: Params, *rates: dict[str, float]):
        self.rates, self.calls = rates, []
        options = {"max_new_tokens": NEW_TOKENS, "speculate": False}
        self.results = [hsd_jax.decode(params, [prompt], **options) for prompt in PROMPTS]

    def __call__(self, modes, prompts, *, repeats, **settings) -> measure.Runs:
        assert [list(map(int, p)) for p in prompts] == [p.tolist() for p in PROMPTS]
        rates = self.rates[min(len(self.calls), len(self.rates) - 1)]
        self.calls.append([mode.name for mode in modes])
        tokens = [int(result.num_tokens[0]) for result in self.results]
        seconds = {mode.name: [[n / rates[mode.name] for n in tokens]] * repeats for mode in modes}
        return measure.Runs({mode.name: self.results for mode in modes}, seconds)


def tuned_by(monkeypatch, params: Params, clock: Clock, **changes) -> hsd_jax.Tuned:
    monkeypatch.setattr(tuning, "time_modes", clock)
    settings = {"trees": [SMALL, CHAIN, WIDE], "reuses": ["none"], "max_new_tokens": NEW_TOKENS} | changes
    return hsd_jax.tune(params, PROMPTS, report=lambda line: None, **settings)


RATES = {"plain": 100.0, "3x2x1": 150.0, "5x4x1": 120.0, "8x3x2": 90.0}


def test_the_fastest_is_chosen_and_settings_decode_the_same_text(monkeypatch, params):
    found = tuned_by(monkeypatch, params, Clock(params, RATES))
    assert (found.speculate, found.tree, found.reuse, found.speedup) == (True, SMALL, "none", pytest.approx(1.5))
    assert str(found) == "tree 3x2x1: 1.50 times as fast as plain decoding"
    plain, *rest = found.table
    assert plain.tree is None and plain.tokens_per_second["median"] == pytest.approx(100.0)
    assert [row.name for row in rest] == ["3x2x1", "5x4x1", "8x3x2"]
    assert [row.speedup["median"] for row in rest] == pytest.approx([1.5, 1.2, 0.9])
    out = hsd_jax.decode(params, PROMPTS[0], max_new_tokens=NEW_TOKENS, **found.settings)
    without = hsd_jax.decode(params, PROMPTS[0], max_new_tokens=NEW_TOKENS, speculate=False)
    np.testing.assert_array_equal(out.tokens, without.tokens)
    assert out.stats.tau > 1


def test_the_measurement_counts_not_the_prediction(monkeypatch, params):
    """The first timings make 3x2x1 the favourite by prediction, the second another."""
    clock = Clock(params, RATES, RATES | {"3x2x1": 80.0, "8x3x2": 130.0})
    found = tuned_by(monkeypatch, params, clock)
    assert clock.calls[0] == ["plain", "3x2x1", "5x4x1", "8x3x2"]
    by_prediction = max(found.table[1:], key=lambda row: row.predicted_tokens_per_second)
    assert by_prediction.name == clock.calls[1][1] == "3x2x1"
    assert found.tree == WIDE and found.speedup == pytest.approx(1.3)


def test_plain_decoding_may_be_the_fastest(monkeypatch, params):
    found = tuned_by(monkeypatch, params, Clock(params, dict.fromkeys(RATES, 90.0) | {"plain": 100.0}))
    assert found.settings == {"speculate": False, "tree": None, "reuse": "none", "accept": "match"}
    assert found.speedup == 1.0 and str(found) == "plain decoding is the fastest here"
    out = hsd_jax.decode(params, PROMPTS[1], max_new_tokens=8, **found.settings)
    assert out.stats.tau == 1.0


def test_predicted_tau_is_simulated_tau_and_only_finalists_are_measured(monkeypatch, params):
    middle = TreeConfig(4, 3, 1)
    trees = [SMALL, middle, CHAIN, WIDE]
    clock = Clock(params, RATES | {"3x2x1": 300.0, "4x3x1": 200.0})
    found = tuned_by(monkeypatch, params, clock, trees=trees, finalists=1)
    assert clock.calls == [["plain", "3x2x1", "5x4x1", "8x3x2"], ["plain", "3x2x1"]]
    by_tree = {row.tree: row for row in found.table}
    assert set(by_tree) == {None, *trees}
    assert {tree for tree, row in by_tree.items() if row.tau is None} == {middle}
    assert by_tree[middle].predicted_tokens_per_second > 0
    texts = evaluate.write_texts(params, PROMPTS, NEW_TOKENS, 0.0, seed=0, batch=1)
    models = params.drafter, params.drafter_config, params.target, params.target_config
    simulated = evaluate.simulate(*models, texts, WIDE, 0.0)
    assert by_tree[WIDE].predicted_tau == simulated["tau"]
    assert by_tree[CHAIN].predicted_tau == simulated["chain_tau"]


def test_reuse_is_a_candidate_where_it_should_pay(monkeypatch, params):
    """A trunk that takes nine tenths of a round: `skip:1`, which leaves it out, is the favourite."""
    rates = RATES | {"5x4x1 skip:1": 400.0, "3x2x1 skip:1": 300.0}
    slow_trunk = types.SimpleNamespace(share=0.0)

    def trunk_seconds(*args, **settings):
        return [slow_trunk.share * x for x in (0.005, 0.009)]

    monkeypatch.setattr(tuning, "trunk_seconds", trunk_seconds)
    clock = Clock(params, rates)
    changes = {"trees": [SMALL, CHAIN], "reuses": ["none", "skip:1"], "finalists": 2}
    found = tuned_by(monkeypatch, params, clock, **changes)
    assert found.reuse == "none" and not any("skip" in name for name in clock.calls[-1])
    assert [row.reuse for row in found.table].count("skip:1") == 2  # predicted all the same
    slow_trunk.share = 1.0
    found = tuned_by(monkeypatch, params, clock, **changes)
    assert "skip:1" in clock.calls[-1][1]
    assert found.reuse == "skip:1" and found.settings["reuse"] == "skip:1"


# --- prediction by hand ----------------------------------------------------------------------------------------------


def test_rounds_of_a_batch():
    """Two rows of 3 rounds and 1, then one alone; the trunk runs if one row asks."""
    runs = ((True, False, True), (True,), (True, False))
    fate = evaluate.Fate(2.0, (1, 5), runs)
    assert tuning.in_step(fate, 1) == (6, 4)
    assert tuning.in_step(fate, 2) == (5, 3)
    assert tuning.in_step(fate, 3) == (3, 2)


def test_cost_of_a_round():
    """Seconds of 1 + 2 nodes + 3 depths, measured thrice, known everywhere; runs of 1 and 5 states take 1 and 9."""
    trees = [TreeConfig(4, 3, 1), TreeConfig(7, 6, 1), TreeConfig(16, 6, 4)]
    cost = tuning.RoundCost.fit({tree: 1.0 + 2.0 * tree.nodes + 3.0 * tree.depth for tree in trees})
    assert cost.seconds(WIDE) == pytest.approx(1 + 16 + 9)
    assert cost.seconds(TreeConfig(2, 1, 1)) == pytest.approx(18 / 2)  # 8, but half of the fastest is the least
    cost = dataclasses.replace(cost, trunk=(5, 1.0, 9.0))
    assert cost.trunk_seconds(2) == pytest.approx(3.0)
    fate = evaluate.Fate(2.0, (1, 5), ((True, False, True), (True,), (True, False)))
    assert cost.rate((WIDE, ReuseConfig()), fate, 1) == pytest.approx(12 / (6 * 26))
    # In place of six runs of 3 states there are four of 5 states.
    assert cost.rate((WIDE, ReuseConfig("skip")), fate, 1) == pytest.approx(12 / (6 * 26 - 6 * 5 + 4 * 9))
    assert cost.rate((WIDE, ReuseConfig("sum")), fate, 2) == pytest.approx(12 / (5 * 26 - 5 * 5 + 3 * 5))


def test_reuse_must_gain_something():
    def predictions(**rates: float):
        forms = {"none": ReuseConfig(), "skip": ReuseConfig("skip"), "union": ReuseConfig("union")}
        return {(WIDE, forms[name]): tuning.Prediction(2.0, rate) for name, rate in rates.items()}

    def names(found) -> list[str]:
        return [str(reuse) for _, reuse in found]

    assert names(tuning.best_of(predictions(none=100.0, skip=100.5, union=120.0), 3)) == ["union", "none"]
    assert names(tuning.best_of(predictions(none=100.0, skip=102.0, union=120.0), 2)) == ["union", "skip"]
    assert names(tuning.best_of(predictions(skip=50.0), 3)) == ["skip"]


@pytest.mark.parametrize(
    ("num_steps", "names"),
    [
        (1, ["2x1x1", "3x1x2", "4x1x3", "5x1x4"]),
        (2, ["3x2x1", "7x2x2", "12x2x3", "16x2x4"]),
        (6, ["4x3x1", "5x4x1", "6x5x1", "7x6x1", "8x5x2", "12x6x3", "16x6x4"]),
    ],
)
def test_default_trees_are_those_a_drafter_can_grow(num_steps, names):
    config = toy.drafter_config(toy.target_config(), num_steps=num_steps)
    assert [tree.name for tree in tuning.default_trees(config)] == names


def test_default_trees_of_other_drafters():
    hot = toy.drafter_config(toy.target_config(), hot_tokens=2, num_steps=30)
    found = tuning.default_trees(hot)
    assert max(tree.width for tree in found) == 2 and max(tree.nodes for tree in found if tree.width == 1) == 16
    assert [t.nodes for t in tuning.default_trees(LookupConfig())] == list(range(4, 17))
    assert [t.nodes for t in tuning.default_trees(SmallLMConfig(**vars(toy.target_config())))] == [4, 5, 6, 7, 8]


def test_three_trees_tell_what_nodes_and_depth_cost():
    trees = tuning.default_trees(toy.drafter_config(toy.target_config(), num_steps=6))
    assert [tree.name for tree in tuning.sample_of(trees)] == ["4x3x1", "7x6x1", "16x6x4"]
    assert tuning.sample_of([WIDE]) == [WIDE]


def test_forms_a_drafter_does_not_allow_are_no_candidates(params):
    drafts = tuning._legal_drafts(params, None, None)
    forms = {str(reuse): [tree.depth for tree, other in drafts if other == reuse] for _, reuse in drafts}
    assert set(forms) == {"none", "sum", "union", "skip", "unfused"}  # mix is not fitted, four steps are few for ahead
    deep = dataclasses.replace(params.drafter_config, num_steps=7, has_mix=True)
    drafts = tuning._legal_drafts(params.replace(drafter_config=deep), None, None)
    assert {tree.depth for tree, reuse in drafts if reuse.form == "ahead"} == {3}
    feature = toy.drafter_config(params.target_config, kind=FEATURE, rank=128)
    drafts = tuning._legal_drafts(params.replace(drafter_config=feature), None, None)
    assert {str(reuse) for _, reuse in drafts} == {"none"}


def test_prompts_of_one_bucket_in_full_batches(params):
    said = []
    prompts = [[1] * n for n in (5, 40, 6, 7, 8)]
    assert [len(row) for row in tuning._choose_prompts(params, prompts, 1, 8, said.append)] == [5, 6, 7, 8]
    assert said == ["4 of 5 prompts used: full batches of the most frequent length, up to 16 tokens"]
    assert [len(row) for row in tuning._choose_prompts(params, prompts[2:], 2, 8, said.append)] == [6, 7]


def test_trunk_seconds_are_measured_and_the_state_stays(params):
    request = prepare(params, PROMPTS[2], 16, 0.0, None, None, 0, SMALL, True, (), 1)
    state, config = request.state.drafter, params.drafter_config
    before = np.asarray(state.cache.length)
    found = metrics.trunk_seconds(request.models, params.target_config, config, state, (1, 4), iterations=2, repeats=2)
    assert len(found) == 2 and min(found) > 0
    np.testing.assert_array_equal(np.asarray(state.cache.length), before)


# --- the record ------------------------------------------------------------------------------------------------------


def make_record(params: Params, speculate: bool = True) -> hsd_jax.Tuned:
    spread = {"median": 1.5, "min": 1.0, "max": 2.0}
    row = tuned.Candidate(SMALL, "skip:2", 2.0, 10.0, 2.1, spread, spread, spread)
    table = (tuned.Candidate(None, tau=1.0), row, tuned.Candidate(WIDE, "none", 1.5, 9.0))
    choice = (True, SMALL, "skip:2", 1.5) if speculate else (False, None, "none", 1.0)
    return hsd_jax.Tuned(*choice, tuned.Conditions.of(params, 2, 0.8), table)


@pytest.mark.parametrize("speculate", [True, False])
def test_a_record_survives_a_file(params, tmp_path, speculate):
    record, said = make_record(params, speculate), []
    record.save(tmp_path / "tuned.json")
    found = hsd_jax.Tuned.load(tmp_path / "tuned.json", params, batch=2, temperature=0.8, report=said.append)
    assert found == record and not said
    assert hsd_jax.Tuned.load(tmp_path / "tuned.json", params) == record  # a warning would be an error here


def test_a_record_of_other_models_is_refused(params, tmp_path):
    path = tmp_path / "tuned.json"
    make_record(params).save(path)
    other = toy.make_drafter(params.drafter_config, params.target_config, params.target, seed=7)
    for change, name in (
        ({"drafter": other}, "drafter"),
        ({"drafter_config": dataclasses.replace(params.drafter_config, num_steps=3)}, "drafter"),
        ({"drafter": None, "drafter_config": None}, "drafter"),
        ({"target": toy.make_target(params.target_config, seed=7)}, "target"),
    ):
        with pytest.raises(ValueError, match=rf"tuned\.json: made for another {name}"):
            hsd_jax.Tuned.load(path, params.replace(**change))


def test_a_record_of_other_conditions_says_so(params, tmp_path, monkeypatch):
    path, said = tmp_path / "tuned.json", []
    make_record(params).save(path)
    monkeypatch.setattr(tuned, "device_name", lambda: "a stone")
    hsd_jax.Tuned.load(path, params.replace(precision="fast"), batch=1, temperature=0, report=said.append)
    (line,) = said
    assert "device " in line and ", here a stone;" in line and "precision exact, here fast" in line
    assert "batch 2, here 1" in line and "temperature 0.8, here 0.0" in line
    with pytest.warns(UserWarning, match="here a stone: the text is the same, but another choice may be faster"):
        hsd_jax.Tuned.load(path, params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: "{", "Expecting property name"),
        (lambda values: [], "tuned.json: expected keys and values, found []"),
        (lambda values: {"tree": None}, "tuned.json: missing key 'speculate'"),
        (lambda values: values | {"table": [1]}, "table.0=1: expected keys and values"),
        (lambda values: values | {"table": 1}, "table=1: allowed are lists of keys and values"),
        (lambda values: values | {"conditions": 1}, "conditions=1: expected keys and values"),
        (lambda values: values | {"colour": 1}, "unknown key 'colour'"),
        (lambda values: values | {"tree": {"nodes": 1}}, "TreeConfig.nodes=1"),
        (lambda values: values | {"reuse": "old"}, "reuse='old'"),
        (lambda values: values | {"speculate": "no"}, "speculate='no': allowed are true and false"),
        (lambda values: values | {"speedup": "2"}, "speedup='2': allowed are finite numbers"),
        (lambda values: values | {"tree": None}, "Tuned.tree=None"),
    ],
)
def test_files_that_are_no_record(params, tmp_path, change, message):
    path = tmp_path / "tuned.json"
    make_record(params).save(path)
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(ValueError, match=r"tuned\.json.*this is no record of `hsd tune`") as error:
        hsd_jax.Tuned.load(path, params)
    assert message in str(error.value)


# --- refusals --------------------------------------------------------------------------------------------------------

BAD_CALLS = {
    "temperature": ({"temperature": -1.0}, r"temperature=-1\.0: allowed are 0"),
    "batch": ({"batch": 0}, "batch=0: allowed are 1 and more"),
    "finalists": ({"finalists": 0}, "finalists=0"),
    "few": ({"batch": 4}, "batch=4 with 3 prompts"),
    "none": ({"prompts": []}, "prompt is an empty list"),
    "short": ({"prompts": [[1, 2], [3]]}, "prompt 1 has 1 token"),
    "long": ({"max_new_tokens": 1000}, "together more than max_len=128"),
    "no trees": ({"trees": []}, "trees and reuses: give at least one"),
    "no tree": ({"trees": ["8x5x2"]}, "trees: '8x5x2': expected hsd_jax.TreeConfig"),
    "deep": ({"trees": [SMALL, TreeConfig(9, 8, 1)]}, r"TreeConfig\.depth=8: this drafter was trained for 1 to 4"),
    "form": ({"reuses": ["old"]}, "reuse='old': allowed are none"),
    "mix": ({"reuses": ["none", "mix"]}, "no fitted weights"),
    "ahead": ({"reuses": ["ahead"], "trees": [CHAIN]}, r"reuse='ahead' with TreeConfig\.depth=4"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_end_before_anything_compiles(params, monkeypatch, name):
    monkeypatch.setattr(tuning, "time_modes", lambda *args, **settings: pytest.fail("decoded"))
    changes, message = BAD_CALLS[name]
    arguments = {"prompts": PROMPTS} | changes
    with pytest.raises(ValueError, match=message):
        hsd_jax.tune(params, **arguments)


def test_params_without_a_drafter_are_refused(params):
    with pytest.raises(ValueError, match="these params have no drafter"):
        hsd_jax.tune(params.replace(drafter=None, drafter_config=None), PROMPTS)


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tune_then_generate_and_bench(folders, tmp_path, capsys):
    """Nothing faked: every form, two trees; the record serves the other commands, whatever it says."""
    out = tmp_path / "tuned.json"
    settings = ["--prompts", folders.data, "--max-new-tokens", "12", "--dtype", "float32"]
    candidates = ["--trees", "5x3x2,3x2x1", "--reuse", "none", "skip:1", "union", "--finalists", "2", "--repeats", "1"]
    assert hsd("tune", *both(folders), *settings, *candidates, "--out", out) == 0
    shown = capsys.readouterr()
    record = json.loads(out.read_text())
    assert [row["tree"] for row in record["table"]].count(None) == 1 and len(record["table"]) >= 4
    finalists = [row for row in record["table"] if row["tau"] is not None and row["predicted_tau"] is not None]
    for row in finalists:  # what is predicted of the text is what decoding then does
        assert row["tau"] == pytest.approx(row["predicted_tau"]), row
    assert "tokens/s predicted" in shown.out and "simulating" in shown.err
    chosen = hsd_jax.Tuned.load(out, hsd_jax.load(**vars_of(folders), dtype="float32"), temperature=0)
    prompt = [*both(folders), "--dtype", "float32", "--max-new-tokens", "12", "the cat"]
    assert hsd("generate", "--tuned", out, *prompt) == 0 and hsd("generate", "--no-speculate", *prompt) == 0
    texts = capsys.readouterr().out.splitlines()
    assert texts[0] == texts[1]
    arguments = [
        "--tuned",
        out,
        *both(folders),
        *settings,
        "--repeats",
        "1",
        "--no-stages",
        "--json",
        tmp_path / "b.json",
    ]
    assert hsd("bench", *arguments) == (0 if chosen.speculate else 2)


def vars_of(folders) -> dict[str, str]:
    return {"target": folders.target, "drafter": folders.drafter}


@pytest.fixture(scope="module")
def record(folders, tmp_path_factory):
    """Files of `--tuned`: one that speculates, one that does not."""
    params = hsd_jax.load(**vars_of(folders))
    root = tmp_path_factory.mktemp("tuned")
    for name, speculate in (("fast", True), ("plain", False)):
        found = dataclasses.replace(make_record(params, speculate), reuse="none")
        found.save(root / f"{name}.json")
    return root


def test_generate_drafts_as_the_record_says(folders, record, capsys, monkeypatch):
    seen = []

    def decode(params, prompt, **settings):
        seen.append({name: settings[name] for name in ("speculate", "tree", "reuse")})
        raise ValueError("enough")

    monkeypatch.setattr(hsd_jax, "decode", decode)
    for name in ("fast", "plain"):
        assert hsd("generate", *both(folders), "--no-stream", "--tuned", record / f"{name}.json", "the cat") == 2
    assert seen == [
        {"speculate": True, "tree": SMALL, "reuse": "none"},
        {"speculate": False, "tree": None, "reuse": "none"},
    ]
    assert "batch 2, here 1; temperature 0.8, here 0.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--tuned", "fast.json", "--nodes", "8"], "--nodes with --tuned"),
        (["generate", "x", "--tuned", "fast.json", "--reuse", "none"], "--reuse with --tuned"),
        (["generate", "x", "--tuned", "fast.json", "--no-speculate"], "--no-speculate with --tuned"),
        (["generate", "x", "--tuned", "fast.json", "--accept", "recursive"], "--accept with --tuned"),
        (["generate", "x", "--tuned", "none.json"], "none.json"),
        (["bench", "--tuned", "fast.json", "--trees", "8x5x2"], "--trees with --tuned"),
        (["bench", "--tuned", "plain.json"], "plain decoding was the fastest"),
        (["tune", "--out", "nowhere/tuned.json"], "there is no folder nowhere"),
        (["tune", "--trees", "8"], "NODESxDEPTHxWIDTH"),
        (["tune", "--batch", "4"], "batch=4 with 3 prompts"),
    ],
)
def test_bad_values_end_with_2_and_one_line(folders, record, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(record)
    if arguments[0] != "generate":
        arguments = [*arguments, "--prompts", folders.data]
    assert hsd(*arguments, *both(folders)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
