"""The predicted time of stacks against a count by hand and a simulation; and the search over all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hsd_jax.measure.stack import RoundParts, Stack, all_stacks, extended
from hsd_jax.planning.acceptance import accumulated


def law_of(chances) -> dict[int, float]:
    """The tokens that a verification of drafts with these chances adds."""
    reached = np.cumprod([1.0, *chances])
    return {k + 1: float(p * (1 - a)) for k, (p, a) in enumerate(zip(reached, [*chances, 0.0], strict=True))}


def random_parts(num: int, seed: int = 0, longest: int = 3) -> RoundParts:
    """Rounds of models that accept less of what is further below and later in a chain."""
    rng = np.random.default_rng(seed)
    plain, most = np.sort(10.0 ** rng.uniform(-2.5, 0.0, num)), num * longest
    near = np.cumsum(np.log(rng.uniform(0.6, 0.97, num)))
    edges = list(itertools.combinations(range(num), 2))
    chances = {(i, j): float(np.exp(near[j] - near[i])) * 0.9 ** np.arange(most) for i, j in edges}
    laws = {edge: [law_of(row[:n]) for n in range(1, most + 1)] for edge, row in chances.items()}
    rounds = {(i, j): [1.1 * plain[j] + n * plain[i] for n in range(most + 1)] for i, j in edges}
    return RoundParts(dict(enumerate(plain)), rounds, laws, dict.fromkeys(edges, longest))


def test_a_stack_by_hand():
    """Rounds of the middle add 1 or 3 of 2 drafts, never 2. It needs 2: 3 (one round), 1 + 1 (two), 1 + 3 (two), with
    chances 1/2, 1/4, 1/4: 3 tokens and 1.5 rounds in the mean. The target takes all of them half of the time, else
    none: 1 or N + 1 tokens, 2.5 in the mean. A round of the pair takes 10 and a pass of the middle for every draft; in
    the stack these passes are part of the middle's rounds, but for one of 2 after a round that took all."""
    half = [{1: 0.5, n + 1: 0.5} for n in range(1, 5)]
    laws = {(0, 1): [{1: 1.0}, {1: 0.5, 3: 0.5}], (1, 2): half}
    parts = RoundParts({1: 2.0, 2: 9.0}, {(0, 1): [0, 4.0, 4.0], (1, 2): [10.0 + 2.0 * n for n in range(5)]}, laws, {})
    assert accumulated({1: 0.5, 3: 0.5}, 2) == {3: 0.5, 2: 0.25, 4: 0.25}
    below = Stack((0, 1), (2,), laws[0, 1][1], 4.0)
    found = extended(parts, below, 2, 2)
    assert below.latency == 4.0 / 2.0 and found.chain == (0, 1, 2) and found.lengths == (2, 2)
    assert found.seconds == pytest.approx(1.5 * 4 + 10 + 0.5 * 2)
    assert found.latency == pytest.approx(found.seconds / 2.5)


@pytest.mark.parametrize("lengths", [(2, 3), (3, 1)])
def test_the_prediction_is_a_simulation(lengths):
    """Rounds that are drawn one after another take as long."""
    parts, rng = random_parts(3), np.random.default_rng(1)
    found = next(way for way in all_stacks(parts) if way.lengths == lengths)
    spent = written = 0.0
    for _ in range(20_000):
        have = 0
        while have < lengths[1]:
            law = parts.laws[0, 1][lengths[0] - 1]
            have += rng.choice(list(law), p=list(law.values()))
            spent += parts.rounds[0, 1][lengths[0]]
        law = parts.laws[1, 2][have - 1]
        count = rng.choice(list(law), p=list(law.values()))
        spent += parts.rounds[1, 2][have] - have * parts.plain[1] + parts.plain[1] * (count == have + 1)
        written += count
    assert abs(found.latency / (spent / written) - 1) < 0.02


def test_the_search_has_every_chain_and_every_length_once():
    """Of the pairs that are there, each with its longest chain; plain decoding comes first."""
    parts, size = random_parts(4), 0
    for edge, most in {(0, 1): 2, (0, 3): 1}.items():
        parts.longest[edge] = most
    del parts.rounds[0, 2]
    ways = all_stacks(parts)
    assert ways[0] == Stack((3,), (), {1: 1.0}, parts.plain[3])
    for below in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in range(4)):
        edges = list(itertools.pairwise((*below, 3)))
        wanted = set() if (0, 2) in edges else set(itertools.product(*(range(1, parts.longest[e] + 1) for e in edges)))
        assert {way.lengths for way in ways if way.chain == (*below, 3)} == wanted
        size += len(wanted)
    assert len(ways) == size
    best = [min(all_stacks(random_parts(3, seed)), key=lambda way: way.latency) for seed in range(9)]
    assert len({len(way.chain) for way in best}) > 1  # so a plan is a choice
