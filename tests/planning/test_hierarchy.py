"""Latency of hierarchies against the worked example and a simulation; the planner against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import hierarchy as oracle

from hsd_jax.config import TreeConfig
from hsd_jax.lab import theory
from hsd_jax.planning.acceptance import acceptance_giving, accumulated, chain_distribution, expected_tokens, mean, mixed
from hsd_jax.planning.hierarchy import Rounds, expected_cost

COSTS, LENGTHS = (0.02, 0.15, 1.0), (4, 6)
ACCEPTANCE = np.array([[1.0, 0.75, 0.5], [0.0, 1.0, 0.85], [0.0, 0.0, 1.0]])


def test_the_worked_example():
    """Of methods.md 4.3; the best single drafter is model 1 with 6 tokens."""
    assert round(theory.hierarchy_latency(COSTS, ACCEPTANCE, LENGTHS), 4) == 0.3206
    assert round(theory.hierarchy_latency(COSTS, ACCEPTANCE, LENGTHS, buffered=False), 4) == 0.3162
    assert round(theory.hierarchy_latency(COSTS[1:], ACCEPTANCE[1:, 1:], (6,)), 4) == 0.4195


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("lengths", [(4, 6), (1, 3), (5, 2)])
def test_latency_is_that_of_a_simulation(buffered, lengths):
    found = theory.hierarchy_latency(COSTS, ACCEPTANCE, lengths, buffered)
    simulated = oracle.simulated_latency(COSTS, ACCEPTANCE, lengths, buffered, 200_000)
    assert abs(found / simulated - 1) < 0.01


@pytest.mark.parametrize("buffered", [True, False])
def test_four_levels_are_those_of_a_simulation(buffered):
    costs, acceptance = (0.01, 0.05, 0.2, 1.0), np.triu(np.full((4, 4), 0.7)) + np.eye(4) * 0.3
    found = theory.hierarchy_latency(costs, acceptance, (2, 3, 4), buffered)
    simulated = oracle.simulated_latency(costs, acceptance, (2, 3, 4), buffered, 200_000)
    assert abs(found / simulated - 1) < 0.01


def test_a_swapped_formula_is_found():
    """The two differ by more than the simulation errs."""
    one, other = (theory.hierarchy_latency(COSTS, ACCEPTANCE, (4, 6), buffered) for buffered in (True, False))
    assert abs(one / other - 1) > 0.012


def random_models(num: int, seed: int):
    """Costs that rise with the model and with the number of drafts; models accept less of what is further below."""
    rng = np.random.default_rng(seed)
    base, slope = np.sort(10.0 ** rng.uniform(-2.5, 0.0, num)), rng.uniform(0.0, 0.05, num)
    functions = [lambda drafts, b=b, s=s: b * (1 + s * drafts) for b, s in zip(base, slope, strict=True)]
    near = np.log(rng.uniform(0.5, 0.97, num))
    apart = np.cumsum(near)[None, :] - np.cumsum(near)[:, None]
    return functions, np.triu(np.exp(np.minimum(apart, 0.0)))


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_the_plan_is_the_best_by_brute_force(num):
    sizes = set()
    for seed in range(12 if num < 4 else 6):
        costs, acceptance = random_models(num, seed)
        plan = theory.plan_hierarchy(costs, acceptance, 5)
        assert np.isclose(plan.latency, oracle.brute_force(costs, acceptance, 5), rtol=1e-12)
        chosen = np.ix_(plan.chain, plan.chain)
        own = theory.hierarchy_latency([costs[i] for i in plan.chain], acceptance[chosen], plan.lengths)
        assert np.isclose(own, plan.latency, rtol=1e-12) and plan.chain[-1] == num - 1
        tables = [[cost(drafts) for drafts in range(6)] for cost in costs]
        assert theory.plan_hierarchy(tables, acceptance, 5) == plan
        sizes.add(len(plan.chain))
    assert num < 3 or len(sizes) > 1  # so the choice is one


def test_a_model_that_is_no_use_is_left_out():
    """A middle model as dear as the target; and plain decoding where nothing pays."""
    dear = theory.plan_hierarchy((0.02, 1.0, 1.0), ACCEPTANCE, 8)
    assert dear.chain == (0, 2)
    assert theory.plan_hierarchy((0.9, 1.0), [[1.0, 0.3], [0.0, 1.0]], 8) == theory.Hierarchy((1,), (), 1.0)


def test_what_is_no_hierarchy_is_refused():
    for lengths in ((4,), (4, 0), (4, 6, 2), (4, 1.5)):
        with pytest.raises(ValueError, match="2 numbers from 1"):
            theory.hierarchy_latency(COSTS, ACCEPTANCE, lengths)
    with pytest.raises(ValueError, match=r" 2 .*\(3, 3\)"):
        theory.hierarchy_latency(COSTS[1:], ACCEPTANCE, (6,))
    with pytest.raises(ValueError, match="0 to 1"):
        theory.plan_hierarchy(COSTS, 2 * ACCEPTANCE, 4)
    with pytest.raises(ValueError, match="from 0"):
        theory.plan_hierarchy((0.1, 1.0, -1.0), ACCEPTANCE, 4)
    with pytest.raises(ValueError, match=r"max_length=0: .*1"):
        theory.plan_hierarchy(COSTS, ACCEPTANCE, 0)


def test_a_replay_by_hand():
    """Rounds of the middle add 1 or 3 of 2 drafts, never 2. It needs 2: 3 (one round), 1 + 1 (two), 1 + 3 (two), with
    chances 1/2, 1/4, 1/4: 3 tokens and 1.5 rounds in the mean. The target takes all of them half of the time, else
    none: 1 or N + 1 tokens, 2.5 in the mean; a round of it takes 10 + N, 2 more behind one that took all."""
    middle = Rounds(lambda drafts: {1: 0.5, 3: 0.5}, lambda drafts: 4.0)
    target = Rounds(lambda drafts: {1: 0.5, drafts + 1: 0.5}, lambda drafts: 10.0 + drafts, again=2.0)
    assert accumulated({1: 0.5, 3: 0.5}, 2) == {3: 0.5, 2: 0.25, 4: 0.25}
    found = expected_cost([middle, target], (2, 2))
    assert found.handed_up == (2.0, 3.0) and found.tau == 2.5
    assert np.isclose(found.latency, (10 + 3 + 1.5 * 4 + 0.5 * 2) / 2.5)
    assert expected_cost([middle], (2,)).latency == 4.0 / 2.0


@pytest.mark.parametrize("lengths", [(2, 3), (4, 2)])
def test_a_replay_is_a_simulation_where_places_differ(lengths):
    """Acceptance that falls with the place in a chain: rounds drawn one after another take as long."""
    rng = np.random.default_rng(0)

    def adds(drafts: int, start: float) -> dict[int, float]:
        chances = start * 0.7 ** np.arange(drafts)
        reached = np.cumprod([1.0, *chances])
        return {k + 1: float(reached[k] * (1 - chances[k] if k < drafts else 1)) for k in range(drafts + 1)}

    laws = [lambda drafts: adds(drafts, 0.9), lambda drafts: adds(drafts, 0.95)]
    seconds = [lambda drafts: 0.1 + 0.02 * drafts, lambda drafts: 1.0 + 0.05 * drafts]
    found = expected_cost([Rounds(laws[0], seconds[0]), Rounds(laws[1], seconds[1], again=0.3)], lengths)
    spent = written = 0.0
    for _ in range(20_000):
        have = 0
        while have < lengths[1]:
            law = laws[0](lengths[0])
            have += rng.choice(list(law), p=list(law.values()))
            spent += seconds[0](lengths[0])
        law = laws[1](have)
        count = rng.choice(list(law), p=list(law.values()))
        spent, written = spent + seconds[1](have) + 0.3 * (count == have + 1), written + count
    assert abs(found.latency / (spent / written) - 1) < 0.02


def test_the_tokens_of_a_chain():
    """By its law as by its tree; and the acceptance from them, the same everywhere."""
    assert chain_distribution([1.0] * 3) == {1: 0.0, 2: 0.0, 3: 0.0, 4: 1.0}
    profile = [0.9, 0.5, 0.7]
    assert mean(chain_distribution(profile)) == pytest.approx(expected_tokens(profile, TreeConfig.chain(3))[-1])
    assert mean(chain_distribution(profile)) == pytest.approx(1 + 0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.7)
    tokens = [mean(chain_distribution([0.6] * n)) for n in (2, 3, 5)]
    assert tokens[2] == pytest.approx((1 - 0.6**6) / 0.4)
    assert acceptance_giving(tokens[2], 5) == pytest.approx(0.6)
    assert acceptance_giving(6.0, 5) == pytest.approx(1.0) and acceptance_giving(1.0, 5) == pytest.approx(0.0)
    either = mixed({2: 0.5, 3: 0.5}, lambda drafts: chain_distribution([0.6] * drafts))
    assert mean(either) == pytest.approx((tokens[0] + tokens[1]) / 2)
