"""`tune`: the choice against injected timings, the record, the program.

That simulation is real decoding, round by round, stands in `test_simulate.py`.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from support import command_line, setups, toy

import hsd_jax
from hsd_jax.asked import Speculation
from hsd_jax.config import TreeConfig
from hsd_jax.measure import speeds
from hsd_jax.measure import tune as tuning
from hsd_jax.params import Params
from hsd_jax.planning import plan, tuned
from hsd_jax.request import set_up

folders, own_cache, hsd, both = command_line.folders, command_line.own_cache, command_line.hsd, command_line.both

PROMPTS = [np.arange(3, 3 + n) % toy.VOCAB for n in (2, 5, 9)]
SMALL, CHAIN, WIDE = TreeConfig(3, 2, 1), TreeConfig(5, 4, 1), TreeConfig(8, 3, 2)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def params() -> Params:
    return setups.params_of("beam", max_len=128, precision="exact")


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

    def __call__(self, modes, prompts, *, repeats, **settings) -> speeds.Runs:
        assert [list(map(int, p)) for p in prompts] == [p.tolist() for p in PROMPTS]
        rates = self.rates[min(len(self.calls), len(self.rates) - 1)]
        rates = {mode.name: rates.get(mode.name, UNNAMED) for mode in modes}
        self.calls.append([mode.name for mode in modes])
        tokens = [int(result.num_tokens[0]) for result in self.results]
        seconds = {mode.name: [[n / rates[mode.name] for n in tokens]] * repeats for mode in modes}
        return speeds.Runs({mode.name: self.results for mode in modes}, seconds, seconds)


def tuned_by(monkeypatch, params: Params, clock: Clock, **changes) -> hsd_jax.Tuned:
    monkeypatch.setattr(tuning, "time_modes", clock)
    settings = {"trees": [SMALL, WIDE], "reuses": ["none"], "max_new_tokens": NEW_TOKENS, "keep": False}
    return hsd_jax.tune(params, PROMPTS, report=lambda line: None, **settings | changes)


UNNAMED = 10.0
"""Tokens per second of modes that a test does not name: those that verify what pays."""
RATES = {"plain": 100.0, "3x2x1": 150.0, "8x3x2": 90.0}


def test_the_measurement_counts_and_not_the_prediction(monkeypatch, params):
    """The first timings make 3x2x1 the favourite by prediction, the second another; or nothing is faster than plain."""
    clock = Clock(params, RATES, RATES | {"3x2x1": 80.0, "8x3x2": 130.0})
    (found,) = tuned_by(monkeypatch, params, clock).choices
    assert clock.calls[0] == ["plain", "3x2x1", "8x3x2"] and clock.calls[1][1] == "3x2x1"
    assert found.tree == WIDE and found.speedup == pytest.approx(1.3)
    clock = Clock(params, RATES, RATES | {"plain": 200.0})
    (found,) = tuned_by(monkeypatch, params, clock).choices
    assert found.tree is None


def test_what_pays_is_verified_where_that_was_the_fastest(monkeypatch, params):
    clock = Clock(params, RATES | {"up to 3x2x1": 400.0})
    record = tuned_by(monkeypatch, params, clock)
    (found,) = record.choices
    assert (found.tree, found.is_adaptive, found.name) == (SMALL, True, "up to 3x2x1")
    out = hsd_jax.decode(params, PROMPTS[0], max_new_tokens=4, tuned=record)
    assert out.stats.plan.is_adaptive and str(out.stats.plan).startswith("trees of up to 3x2x1: 4.00 times as fast")


# --- the record ------------------------------------------------------------------------------------------------------


def make_choice(tree: TreeConfig | None = SMALL, reuse: str = "skip:2", **changes) -> tuned.Choice:
    spread = {"median": 1.5, "min": 1.0, "max": 2.0}
    row = tuned.Candidate(SMALL, "skip:2", False, 2.0, 10.0, 2.1, spread, spread, spread)
    table = (tuned.Candidate(None, tau=1.0), row, tuned.Candidate(WIDE, "none", True, 1.5, 9.0))
    given = {"rows": 1, "slots": 256, "temperature": 0.8, "is_adaptive": False, "speedup": 1.5, "table": table}
    return tuned.Choice(tree=tree, reuse=reuse, **given | changes)


def make_record(params: Params, *choices: tuned.Choice) -> hsd_jax.Tuned:
    return hsd_jax.Tuned(tuned.Conditions.of(params), choices or (make_choice(),))


def test_a_record_survives_a_file(params, tmp_path):
    record, said = make_record(params, make_choice(), make_choice(None, "none", rows=4)), []
    record.save(tmp_path / "tuned.json")
    assert hsd_jax.Tuned.load(tmp_path / "tuned.json", params, said.append) == record and not said


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


def test_the_nearest_choice_of_as_many_rows_counts(params):
    small, large = make_choice(slots=512), make_choice(slots=4096, reuse="none")
    greedy = make_choice(slots=512, temperature=0.0)
    record = make_record(params, small, large, greedy)
    assert record.choice(1, 512, 1.0) is small and record.choice(1, 1024, 0.5) is small
    assert record.choice(1, 2048, 1.0) is large and record.choice(1, 16384, 1.0) is large
    assert record.choice(1, 512, 0.1) is greedy and record.choice(1, 2048, 0.0) is greedy
    assert record.choice(2, 512, 1.0) is None
    assert record.choice(1, 32768, 1.0) is None and record.choice(1, 4096, 0.0) is None  # too far


@pytest.fixture
def kept_folder(tmp_path, monkeypatch):
    """A folder of records, with nothing in it, not there yet."""
    monkeypatch.setenv(tuned.FOLDER_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def found_by_name(params) -> Params:
    """As if they were loaded."""
    return params.replace(fingerprint_pair=params.fingerprints())


def plan_of(params: Params, temperature: float = 0.0, **settings) -> plan.Plan:
    """Of a call of one row. Nothing compiles."""
    return set_up(params, Speculation(**settings), 1, 1, 256, temperature).plan


def test_decode_finds_what_was_kept(found_by_name, kept_folder):
    params = found_by_name
    usual = plan_of(params)
    path = make_record(params, make_choice(reuse="none", temperature=0.0)).keep()
    assert path.parent == kept_folder
    found = plan_of(params)
    assert found.tree == SMALL and "when `tune` measured it" in found.reason and not found.is_adaptive
    assert plan_of(params, tuned=False) == usual != found
    assert plan_of(params, tree=CHAIN).reason == plan_of(params, speculate=False).reason == "requested"
    for settings in ({"reuse": "sum"}, {"accept": "recursive"}, {"temperature": 0.8}):  # not measured so
        assert "`tune`" not in plan_of(params, **settings).reason
    # A later record for the same size takes its place; those for other sizes stay.
    make_record(params, make_choice(CHAIN, "none", temperature=0.0, is_adaptive=True)).keep()
    make_record(params, make_choice(rows=2)).keep()
    assert (plan_of(params).tree, plan_of(params).is_adaptive) == (CHAIN, True)
    assert [choice.rows for choice in hsd_jax.Tuned.load(path, params).choices] == [2, 1]


def test_a_record_is_found_for_its_pair_and_machine_alone(found_by_name, kept_folder, monkeypatch):
    params = found_by_name
    make_record(params, make_choice(reuse="none", temperature=0.0)).keep()
    assert plan_of(params).tree == SMALL
    for change in ({"fingerprint_pair": None}, {"fingerprint_pair": ("a", "b")}, {"dtype": "bfloat16"}):
        assert "`tune`" not in plan_of(params.replace(**change)).reason
    monkeypatch.setattr(tuned, "device_name", lambda: "a stone")
    assert "`tune`" not in plan_of(params).reason


def test_a_damaged_record_is_named_once_and_ends_nothing(found_by_name, kept_folder):
    params = found_by_name
    usual = plan_of(params, tuned=False)
    path = make_record(params).keep()
    path.write_text("{")
    with pytest.warns(UserWarning, match=path.name):
        assert plan_of(params) == usual
    assert plan_of(params) == usual  # a second warning would be an error
    make_record(params, make_choice(reuse="none", temperature=0.0)).keep()  # takes its place
    assert plan_of(params).tree == SMALL


# --- refusals --------------------------------------------------------------------------------------------------------

BAD_CALLS = {
    "batch": ({"batch": 0}, "batch=0: .*1"),
    "few": ({"batch": 4}, "batch=4.* 3 "),
    "no tree": ({"trees": ["8x5x2"]}, "trees"),
    "ahead": ({"reuses": ["ahead"], "trees": [CHAIN]}, r"reuse='ahead' with TreeConfig\.depth=4"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_end_before_anything_compiles(params, monkeypatch, name):
    monkeypatch.setattr(tuning, "time_modes", lambda *args, **settings: pytest.fail("decoded"))
    changes, message = BAD_CALLS[name]
    arguments = {"prompts": PROMPTS} | changes
    with pytest.raises(ValueError, match=message):
        hsd_jax.tune(params, **arguments)


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tune_then_generate(folders, tmp_path, capsys):
    """Nothing faked: every form, two trees; the record serves the other commands, whatever it says."""
    out = tmp_path / "tuned.json"
    settings = ["--prompts", folders.data, "--max-new-tokens", "12", "--dtype", "float32"]
    candidates = ["--trees", "5x3x2,3x2x1", "--reuse", "none", "skip:1", "sum", "--finalists", "2", "--repeats", "1"]
    assert hsd("tune", *both(folders), *settings, *candidates, "--out", out) == 0
    shown = capsys.readouterr()
    (choice,) = json.loads(out.read_text())["choices"]
    assert [row["tree"] for row in choice["table"]].count(None) == 1 and len(choice["table"]) >= 4
    finalists = [row for row in choice["table"] if row["tau"] is not None and row["predicted_tau"] is not None]
    for row in finalists:  # what is predicted of the text is what decoding then does
        assert row["tau"] == pytest.approx(row["predicted_tau"]), row
    assert "tokens/s predicted" in shown.out and "simulating" in shown.err
    prompt = [*both(folders), "--dtype", "float32", "--max-new-tokens", "12", "the cat"]
    assert hsd("generate", "--tuned", out, *prompt) == 0 and hsd("generate", "--no-speculate", *prompt) == 0
    texts = capsys.readouterr().out.splitlines()
    assert texts[0] == texts[1]


def test_commands_hand_the_record_to_decode(folders, tmp_path, monkeypatch):
    seen, file = [], tmp_path / "fast.json"
    params = hsd_jax.load(target=folders.target, drafter=folders.drafter)
    record = make_record(params, make_choice(reuse="none", temperature=0.0))
    record.save(file)

    def decode(params, prompt, **settings):
        seen.append(settings["tuned"])
        assert (settings["tree"], settings.get("speculate", True)) == (None, True)
        raise ValueError("enough")

    monkeypatch.setattr(hsd_jax, "decode", decode)
    for arguments in (["--tuned", file], ["--no-tuned"], []):
        assert hsd("generate", *both(folders), *arguments, "--json", "the cat") == 2
    assert seen == [record, False, True]
