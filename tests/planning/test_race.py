"""Races: what they measure, how long they last, and that no text depends on them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from support.costs import cost_model

import hsd_jax
from hsd_jax import session, setup
from hsd_jax.config import TreeConfig
from hsd_jax.planning import plan, race
from hsd_jax.settings import Speculation
from hsd_jax.setup import set_up
from hsd_jax.types import Drafts

IDLE = 1e-3
nothing = lambda: None  # noqa: E731


@pytest.fixture(scope="module")
def demo():
    return hsd_jax.load("demo")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of outcomes."""
    monkeypatch.setenv(race.FOLDER_VARIABLE, str(tmp_path))
    race._races.clear()
    yield tmp_path
    race._races.clear()


class Clock:
    """A machine that is made up: what the loop would take. It stands in for the module `time`."""

    def __init__(self, drafted: float, plain: float, ratio: float = 1.0, noise: float = 0.0):
        self.seconds, self.ratio = {True: drafted, False: plain}, ratio
        self.now, self.laps, self._draw, self._noise = 0.0, [], np.random.default_rng(0), noise

    def perf_counter(self) -> float:
        return self.now

    def pass_by(self, num_rounds: int, has_drafts: bool) -> float:
        self.laps.append((num_rounds, has_drafts))
        slower = 1 + self._noise * self._draw.exponential()
        self.now += IDLE + num_rounds * self.seconds[has_drafts] * slower
        return self.ratio


@pytest.mark.parametrize(
    ("gain", "drafted", "plain", "most"),
    [(1.9, 9e-3, 7e-3, 1), (1.4, 9e-3, 7e-3, 4), (1.2, 15e-4, 5e-4, 2)],
)
def test_a_race_measures_the_ratio_of_rounds_and_ends_as_soon_as_it_is_clear(monkeypatch, gain, drafted, plain, most):
    clock = Clock(drafted, plain, ratio=1.5, noise=0.05)
    monkeypatch.setattr(race, "time", clock)
    one = race.Race(gain)
    assert one.run(clock.pass_by, 2**30, 1, nothing) == sum(num for num, _ in clock.laps)
    assert one.outcome.correction == pytest.approx(drafted / plain / 1.5, rel=0.1)
    assert clock.laps[:4] == [(0, True)] * 3 + [(race.FEWEST_ROUNDS, True)]
    least = race.LONG_ENOUGH * race.LAP * IDLE
    laps = [has_drafts for num, has_drafts in clock.laps[4:] if num * clock.seconds[has_drafts] > least]
    assert laps == [True, False] * (len(laps) // 2) and 2 <= len(laps) <= 2 * most


def test_a_slow_first_lap_decides_nothing(monkeypatch):
    """The first plain rounds take 20 times as long."""
    clock = Clock(9e-3, 7e-3)
    monkeypatch.setattr(race, "time", clock)
    was_slow = []

    def lap(num_rounds, has_drafts):
        if not has_drafts and not was_slow:
            was_slow.append(num_rounds)
            clock.now += 19 * num_rounds * 7e-3
        return clock.pass_by(num_rounds, has_drafts)

    one = race.Race(1.9)
    one.run(lap, 2**30, 1, nothing)
    assert was_slow and one.outcome.correction == pytest.approx(9 / 7, rel=0.01)


def test_a_race_goes_on_in_the_next_call(monkeypatch):
    """Of the laps of short calls those count that were complete. A call of two rounds has none."""
    clock = Clock(9e-3, 7e-3)
    monkeypatch.setattr(race, "time", clock)
    one, calls = race.Race(1.9), itertools.count()
    ended = lambda *lap: (clock.pass_by(*lap), None)[next(calls) % 2]  # noqa: E731
    assert one.run(ended, 1, 1, nothing) == 0
    for _ in range(9):
        one.run(ended, 40, 1, nothing)
    assert one.outcome.correction == pytest.approx(9 / 7, rel=1e-3)


def test_laps_of_other_numbers_of_rows_do_not_compare(monkeypatch):
    """A lap with drafts ran with one row. The others run with two, which take 20 times as long."""
    clock = Clock(9e-3, 7e-3)
    monkeypatch.setattr(race, "time", clock)
    one = race.Race(1.9)
    one.run(clock.pass_by, 4, 1, nothing)
    clock.seconds = {True: 180e-3, False: 140e-3}
    one.run(clock.pass_by, 2**30, 2, nothing)
    assert one.outcome.drafted_seconds == pytest.approx(180e-3)


def test_calls_that_are_too_short_are_left_alone_after_a_while():
    one, num_calls = race.Race(1.9), 0
    while one.goes_on(40):
        one.run(lambda *lap: None, 40, 1, nothing)
        num_calls += 1
    assert num_calls == race.MOST_LOST and not race.Race(1.9).goes_on(1)


def test_an_outcome_is_kept_for_this_machine_and_these_versions(folder, monkeypatch):
    clock = Clock(9e-3, 7e-3)
    monkeypatch.setattr(race, "time", clock)
    one = race.race_of(1.9, "a call")
    one.run(clock.pass_by, 2**30, 1, nothing)
    race._races.clear()  # as another process
    assert race.race_of(1.9, "a call").outcome == one.outcome
    assert race.race_of(1.9, "another call").outcome is None
    race._races.clear()
    monkeypatch.setattr(race.files, "version", lambda name: "0.0")
    assert race.race_of(1.9, "a call").outcome is None


def test_process_0_measures_and_decides_for_all(folder, monkeypatch):
    """Process 1 has a clock that stands still and no file. What it takes over is all in millionths."""
    said = iter([10**3] * 3 + [10**3 + 2 * 9000] + [10**3 + 3 * 9000, 10**3 + 3 * 7000] * 9)
    monkeypatch.setattr(race, "time", Clock(0.0, 0.0))
    monkeypatch.setattr(race, "of_first", lambda own: next(said))
    one = race.Race(1.9)
    one.run(lambda *lap: 1.0, 2**30, 1, nothing)
    assert (one.outcome.drafted_seconds, one.outcome.plain_seconds) == pytest.approx((9e-3 * 3 / 2, 7e-3 * 3 / 2))
    monkeypatch.setattr(race.jax, "process_count", lambda: 2)
    assert race.race_of(1.9, "a call").path is None


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafts_pay", [False, True])
def test_no_text_depends_on_a_race(demo, folder, monkeypatch, drafts_pay, temperature):
    """Rounds with drafts take as long as a plain round, or 20 times as long. From then on such calls are plain."""
    prompts, how = ["User: Hello!\nAssistant:", "User: Where is"], {"temperature": temperature, "seed": 3, "eos": ()}
    wanted = hsd_jax.decode(demo, prompts, 40, speculate=False, **how)
    monkeypatch.setattr(race, "_timed", timed := Rounds(1.0 if drafts_pay else 20.0))
    first, second = (hsd_jax.decode(demo, prompts, 40, **how) for _ in range(2))
    assert len(timed.laps) >= 4 and {has_drafts for num, has_drafts in timed.laps if num} == {False, True}
    assert (first.tokens == wanted.tokens).all() and (second.tokens == wanted.tokens).all()
    for stats in (first.stats, second.stats):
        assert (stats.plan.tree is not None) == drafts_pay and "ms with drafts" in stats.plan.reason
    assert first.stats.num_target_passes < wanted.stats.num_target_passes
    of_race = sum(num for num, has_drafts in timed.laps if has_drafts)
    assert drafts_pay or first.stats.drafted_share * first.stats.num_target_passes <= len(prompts) * of_race
    assert (second.stats.num_target_passes < wanted.stats.num_target_passes) == drafts_pay


class Rounds:
    """Replaces the clock: how long a round with drafts takes, in plain rounds; None: as predicted."""

    def __init__(self, drafted: float | None = None):
        self.drafted, self.laps = drafted, []

    def __call__(self, lap, num_rounds, has_drafts):
        self.laps.append((num_rounds, has_drafts))
        ratio = lap(num_rounds, has_drafts)
        a_round = 1.0 if not has_drafts else ratio or 1.0 if self.drafted is None else self.drafted
        return num_rounds * a_round + 1e-4, ratio


@pytest.mark.slow
def test_where_rounds_round_differently_a_race_runs_on_a_copy(demo, folder, monkeypatch):
    """Its rounds are those of no text: the statistics are the same as without a race."""
    monkeypatch.setattr(race, "_timed", timed := Rounds())
    ask = {"prompt": "User: Hello!\nAssistant:", "max_new_tokens": 40, "eos": ()}
    without = hsd_jax.decode(demo, **ask, race=False)
    assert not timed.laps
    monkeypatch.setattr(session, "set_up", lambda *args: dataclasses.replace(set_up(*args), is_exact=False))
    raced = hsd_jax.decode(demo, **ask)
    assert timed.laps and "ms with drafts" in raced.stats.plan.reason
    assert (raced.stats.accepted_histogram == without.stats.accepted_histogram).all()
    assert raced.text == without.text


def test_without_memory_for_a_copy_there_is_no_race(demo, folder, monkeypatch):
    def no_room(mesh, needed, what, advice):
        raise ValueError(f"{what}: {needed} bytes are too many")

    monkeypatch.setattr(race, "_timed", timed := Rounds())
    monkeypatch.setattr(session, "set_up", lambda *args: dataclasses.replace(set_up(*args), is_exact=False))
    monkeypatch.setattr(session, "check_free", no_room)
    ask = {"prompt": "User: Hello!\nAssistant:", "max_new_tokens": 40, "eos": ()}
    assert hsd_jax.decode(demo, **ask).text == hsd_jax.decode(demo, **ask, race=False).text
    assert not timed.laps and not list(folder.iterdir())
    (given_up,) = race._races.values()
    assert given_up.outcome is None and not given_up.goes_on(2**30)


def test_streams_and_sessions_race_between_pieces(demo, folder, monkeypatch):
    monkeypatch.setattr(race, "_timed", timed := Rounds(20.0))
    monkeypatch.setattr(plan, "LEAST_GAIN", 0.0)  # a tree for every number of rows
    prompts = [f"User: {text}\nAssistant:" for text in ("Hello!", "Why?", "Where is it?")]
    wanted = [hsd_jax.decode(demo, prompt, 90, speculate=False, eos=()).text[0] for prompt in prompts]
    pieces = "".join(piece.text for piece in hsd_jax.stream(demo, prompts[0], 90, rounds=8, eos=()))
    assert pieces == wanted[0] and timed.laps
    timed.laps.clear()
    with session.Session(demo, slots=2) as opened:
        requests = [{"prompt": prompt, "max_new_tokens": 90, "eos": ()} for prompt in prompts]
        assert [answer.text for answer in opened.generate(requests, ordered=True)] == wanted
        assert timed.laps and "ms with drafts" in opened.plan.reason


def test_a_step_runs_no_more_rounds_than_it_was_asked_for(demo, folder, monkeypatch):
    monkeypatch.setattr(race, "_timed", timed := Rounds())
    with session.Session(demo, slots=1) as opened:
        opened.admit("User: Hello!\nAssistant:", 90, eos=())
        opened.step(rounds=1)  # beside which the prompt was read
        before = opened.rows[0].stats.num_target_passes.item()
        opened.step(rounds=11)
        assert timed.laps and opened.rows[0].stats.num_target_passes.item() - before == 11


def test_a_session_learns_what_another_has_measured(demo, folder, monkeypatch):
    monkeypatch.setattr(race, "_timed", timed := Rounds())
    ask = {"prompt": "User: Hello!\nAssistant:", "max_new_tokens": 90, "eos": ()}
    with session.Session(demo, slots=1) as one, session.Session(demo, slots=1) as other:
        list(one.generate([ask]))
        num_laps = len(timed.laps)
        list(other.generate([ask]))
        assert all("ms with drafts" in opened.plan.reason for opened in (one, other))
    assert len(timed.laps) == num_laps


def test_a_session_that_lost_its_race_drafts_while_few_rows_run():
    """The more rows, the less drafts gain. Here they gain 1.05 times or more for one row and for no others."""
    model = cost_model()
    tree, gains = TreeConfig.chain(4), [plan.best_plan(model, rows, 512, False, True).gain for rows in (1, 2, 4)]
    assert gains[0] > 1.2 * gains[1] > 1.2 * gains[2]
    outcome = race.Outcome(1.0, 1.0, correction=gains[0] / 1.1)
    costs = plan.loop_costs(model, 4, tree, slots_of_trial=512, raced=outcome)
    assert costs.drafts.tolist() == [Drafts.IF_THEY_PAY] * 2 + [Drafts.NEVER] * 3
    assert costs.correction == pytest.approx(outcome.correction)


@pytest.mark.parametrize("mesh", ["model=2", None])
def test_rounds_have_the_same_bits_only_with_the_kernels(monkeypatch, mesh):
    """In exact precision too: XLA sums one row and several in different orders."""
    monkeypatch.setenv("HSD_NATIVE_ISA", "off" if mesh is None else "")
    params = hsd_jax.load("demo", precision="exact", mesh=mesh)
    assert not set_up(params, Speculation(race=True), 1, 1, 512, 0.0).is_exact


def test_races_run_on_cpus_alone(demo, folder, monkeypatch):
    asked = Speculation(race=True), 1, 1, 512, 0.0
    assert set_up(demo, *asked).race is not None
    there = dataclasses.replace(setup.program_for(), backend="gpu")
    monkeypatch.setattr(setup, "program_for", lambda *args, **how: there)
    found = set_up(demo, *asked)
    assert found.race is None and found.plan.is_adaptive


@pytest.mark.slow
def test_nothing_is_raced_where_it_is_off_or_a_tree_was_named(demo, folder, monkeypatch):
    monkeypatch.setattr(race, "_timed", timed := Rounds(1.0))
    how = {"prompt": "User: Hi\nAssistant:", "max_new_tokens": 12}
    hsd_jax.decode(demo, **how, race=False)
    hsd_jax.decode(demo, **how, tree=hsd_jax.TreeConfig.chain(2))
    hsd_jax.decode(demo, **how, accept="recursive")
    monkeypatch.setenv(race.FOLDER_VARIABLE, "off")
    hsd_jax.decode(demo, **how)
    assert not timed.laps
