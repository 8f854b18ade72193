"""Latency of hierarchies against the worked example and a simulation; the planner against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracles import hierarchy as oracle

from hsd_jax.planning.acceptance import accumulated
from hsd_jax.planning.hierarchy import (
    Rounds,
    expected_cost,
    hierarchy_latency,
    plan_hierarchy,
)

COSTS, LENGTHS = (0.02, 0.15, 1.0), (4, 6)
ACCEPTANCE = np.array([[1.0, 0.75, 0.5], [0.0, 1.0, 0.85], [0.0, 0.0, 1.0]])


def test_the_worked_example():
    """Of methods.md 4.3; the best single drafter is model 1 with 6 tokens."""
    assert round(hierarchy_latency(COSTS, ACCEPTANCE, LENGTHS), 4) == 0.3206
    assert round(hierarchy_latency(COSTS, ACCEPTANCE, LENGTHS, buffered=False), 4) == 0.3162
    assert round(hierarchy_latency(COSTS[1:], ACCEPTANCE[1:, 1:], (6,)), 4) == 0.4195


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("lengths", [(4, 6), (1, 3), (5, 2)])
def test_latency_is_that_of_a_simulation(buffered, lengths):
    found = hierarchy_latency(COSTS, ACCEPTANCE, lengths, buffered)
    simulated = oracle.simulated_latency(COSTS, ACCEPTANCE, lengths, buffered, 200_000)
    assert abs(found / simulated - 1) < 0.01


def random_models(num: int, seed: int):
    """Costs that rise with the model and with the number of drafts; models accept less of what is further below."""
    rng = np.random.default_rng(seed)
    base, slope = np.sort(10.0 ** rng.uniform(-2.5, 0.0, num)), rng.uniform(0.0, 0.05, num)
    functions = [lambda drafts, b=b, s=s: b * (1 + s * drafts) for b, s in zip(base, slope, strict=True)]
    near = np.log(rng.uniform(0.5, 0.97, num))
    apart = np.cumsum(near)[None, :] - np.cumsum(near)[:, None]
    return functions, np.triu(np.exp(np.minimum(apart, 0.0)))


@pytest.mark.parametrize("keep", [5, 1000])
@pytest.mark.parametrize("num", [2, 4])
def test_the_search_finds_the_best_by_brute_force(num, keep):
    """Of every number of models the best hierarchies, in order; all of them if `keep` is large."""
    sizes = set()
    for seed in range(12 if num < 4 else 4):
        costs, acceptance = random_models(num, seed)
        every = oracle.all_hierarchies(costs, acceptance, 4)
        plan = plan_hierarchy(costs, acceptance, 4, keep)
        assert sorted(plan) == list(range(1, num + 1))
        for size, found in plan.items():
            wanted = sorted(latency for chain, _, latency in every if len(chain) == size)[:keep]
            np.testing.assert_allclose([way.latency for way in found], wanted, rtol=1e-12)
            assert len({(way.chain, way.lengths) for way in found}) == len(found)
        for way in plan[num][:2]:
            chosen = np.ix_(way.chain, way.chain)
            own = hierarchy_latency([costs[i] for i in way.chain], acceptance[chosen], way.lengths)
            assert np.isclose(own, way.latency, rtol=1e-12) and way.chain[-1] == num - 1
        tables = [[cost(drafts) for drafts in range(5)] for cost in costs]
        assert plan_hierarchy(tables, acceptance, 4, keep) == plan
        sizes.add(min(plan, key=lambda size: plan[size][0].latency))
    assert num < 3 or len(sizes) > 1  # so a plan is a choice


@pytest.mark.parametrize("without", [(0, 1), (0, 2)])
def test_the_search_keeps_to_the_pairs_that_are_there(without):
    """And to the longest chain of each of them."""
    costs, acceptance = random_models(4, 1)
    longest = {(0, 1): 3, (0, 2): 2, (1, 2): 4, (1, 3): 1, (2, 3): 3}
    del longest[without]
    every = oracle.all_hierarchies(costs, acceptance, 4)

    def is_there(chain, lengths) -> bool:
        return all(n <= longest.get(edge, 0) for edge, n in zip(itertools.pairwise(chain), lengths, strict=True))

    plan = plan_hierarchy(costs, acceptance, longest, 1000)
    assert {(way.chain, way.lengths) for some in plan.values() for way in some} == {
        (chain, lengths) for chain, lengths, _ in every if is_there(chain, lengths)
    }


def test_what_is_no_hierarchy_is_refused():
    for lengths in ((4,), (4, 0)):
        with pytest.raises(ValueError, match="2 numbers from 1"):
            hierarchy_latency(COSTS, ACCEPTANCE, lengths)
    with pytest.raises(ValueError, match="0 to 1"):
        plan_hierarchy(COSTS, 2 * ACCEPTANCE, 4)
    with pytest.raises(ValueError, match="from 0"):
        plan_hierarchy((0.1, 1.0, -1.0), ACCEPTANCE, 4)


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
