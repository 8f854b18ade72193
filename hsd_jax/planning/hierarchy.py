"""What a hierarchy of models should cost, and the fastest one: hierarchical speculative decoding as mathematics.

Models 0 to K, the smallest first. Level i collects at least T_i tokens of its model, and the model above judges them in
one pass (Globerson et al., arXiv:2510.19705; methods.md 4.3). Acceptance is taken to be independent from token to
token. Nothing here is part of a decode. `lab/theory.py` has these names, too; `lab/bench/hierarchy.py` measures what
they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hsd_jax.config import TreeConfig
from hsd_jax.planning.acceptance import Law, accumulated, chain_law, mean, mixed
from hsd_jax.settings import shown

PassCosts = Sequence[Any] | np.ndarray
"""Seconds of a pass of each model: a number; or one for 0, 1, 2, ... drafts in it, as an array or a function of their
number. That for none is what a token costs that the model writes alone."""


class Hierarchy(NamedTuple):
    """A chain of models, and how they hand up."""

    chain: tuple[int, ...]
    """Models by number, the smallest first; the last is K. Of one model: plain decoding."""
    lengths: tuple[int, ...]
    """T of each but the last: tokens that it collects at least."""
    latency: float
    """Seconds a token of the last model."""

    @property
    def tree(self) -> TreeConfig | None:
        """What goes up at most: what the level below the last model collects, and what overshoots."""
        return None if not self.lengths else TreeConfig.chain(self.most(len(self.lengths) - 1))

    def most(self, level: int) -> int:
        """Drafts that the model above a level verifies at most."""
        return sum(self.lengths[max(level - 1, 0) : level + 1])


def hierarchy_latency(
    costs: PassCosts, acceptance: Sequence[Sequence[float]] | np.ndarray, lengths: Sequence[int], buffered: bool = True
) -> float:
    """Expected seconds a token of a hierarchy of all models.

    With S(a, T) = (1 - a^(T+1)) / (1 - a), the expected tokens of one verification, and l_0 = c_0:

        buffered:   l_j = (c_j + T_i l_i) / S(a_ij, T_i)
        otherwise:  l_j = (E[c_j(N_i)] + E[N_i] l_i) / E[S(a_ij, N_i)]

    N_i is what level i has once it has T_i: its rounds add truncated geometric numbers, of which the last overshoots.
    `drafters/stack` hands up all of them, the second formula.

    Args:
      costs: of K + 1 models. A pass over more drafts than an array has is taken to cost as much as its last entry.
      acceptance: [K + 1, K + 1]; `acceptance[i][j]`: the chance that model j accepts a token of model i.
      lengths: T_0 to T_{K-1}.
      buffered: exactly T_i tokens go up, and none beyond is ever lost. No decode does that, since a rejection spoils
        what waits; what a real stack takes may be more or less. False: all that were accumulated go up.
    Raises:
      ValueError: if sizes do not fit, a length is below 1, a cost negative or an acceptance no probability.
    """
    seconds, accept = _checked(costs, acceptance)
    last = len(seconds) - 1
    if len(lengths) != last or any(int(n) != n or n < 1 for n in lengths):
        raise ValueError(f"lengths={shown(list(lengths))}: expected {last} numbers from 1, one a model but the last")
    if not last:
        return seconds[0](0)
    rounds = []
    for level, cost in enumerate(seconds[1:]):
        adds = lambda drafts, chance=float(accept[level, level + 1]): chain_law([chance] * drafts)  # noqa: E731
        drafting = 0.0 if level else seconds[0](0)
        rounds.append(Rounds(adds, lambda drafts, cost=cost, one=drafting: cost(drafts) + drafts * one))
    return expected_cost(rounds, [int(n) for n in lengths], buffered).latency


class Rounds(NamedTuple):
    """What rounds of a model over drafts from below yield and cost."""

    adds: Callable[[int], Law]
    """Tokens that a verification of so many drafts adds."""
    seconds: Callable[[int], float]
    """Of a round that verifies so many drafts; of the first level with what drafting them takes, of others without what
    the levels below take."""
    again: float = 0.0
    """Seconds more of a round behind one whose drafts were all accepted: the level below reads the token after them."""


class HierarchyCost(NamedTuple):
    """What a hierarchy takes."""

    latency: float
    """Seconds a token of the last model."""
    tau: float
    """Tokens of the last model in a round of it."""
    handed_up: tuple[float, ...]
    """Tokens that each level but the last hands up, in the mean."""


def expected_cost(levels: Sequence[Rounds], lengths: Sequence[int], buffered: bool = False) -> HierarchyCost:
    """What rounds add and take, level by level.

    Acceptance may differ from place to place; but how much a level accumulates is taken to say nothing of how much of
    it the next one accepts.

    Args:
      levels: of each model but the smallest.
      lengths, buffered: as in `hierarchy_latency`.
    """
    means, spent, adds = [], 0.0, {}
    for number, (level, need) in enumerate(zip(levels, lengths, strict=True)):
        handed_up = {need: 1.0} if buffered or number == 0 else accumulated(adds, need)
        rounds = mean(handed_up) / mean(adds) if number else 0.0  # of the level below (Wald)
        all_accepted = sum(p * level.adds(n).get(n + 1, 0.0) for n, p in handed_up.items())
        own = sum(p * level.seconds(n) for n, p in handed_up.items())
        spent = own + rounds * spent + all_accepted * level.again
        adds = mixed(handed_up, level.adds)
        means.append(mean(handed_up))
    return HierarchyCost(spent / mean(adds), mean(adds), tuple(means))


def plan_hierarchy(costs: PassCosts, acceptance: Sequence[Sequence[float]] | np.ndarray, max_length: int) -> Hierarchy:
    """The hierarchy of the least buffered latency, over all chains that end in the last model and all lengths.

    An edge from model i to model j with length T maps the latency of i to that of j, affinely and upwards,

        l -> (c_j(T) + T l) / S(a_ij, T)

    so the best way to j passes through the best way to i: a generalised shortest path, and as models come in order of
    size a dynamic program finds it, in time K^2 times `max_length`.

    Args:
      costs, acceptance: as in `hierarchy_latency`.
      max_length: the largest T that is tried.
    Raises:
      ValueError: as `hierarchy_latency`, and for a `max_length` below 1.
    """
    seconds, accept = _checked(costs, acceptance)
    if int(max_length) != max_length or max_length < 1:
        raise ValueError(f"max_length={shown(max_length)}: allowed are 1 and more")
    best: list[Hierarchy] = []
    for model, cost in enumerate(seconds):
        found = Hierarchy((model,), (), cost(0))
        for below in best:
            for length in range(1, int(max_length) + 1):
                spent = cost(length) + length * below.latency
                latency = spent / mean(chain_law([float(accept[below.chain[-1], model])] * length))
                if latency < found.latency:
                    found = Hierarchy((*below.chain, model), (*below.lengths, length), latency)
        best.append(found)
    return best[-1]


def _checked(costs: PassCosts, acceptance: Any) -> tuple[list[Callable[[int], float]], np.ndarray]:
    """Costs as functions, and the matrix of acceptance."""
    seconds, accept = [_function_of(cost) for cost in costs], np.asarray(acceptance, float)
    if not seconds or accept.shape != (len(seconds), len(seconds)):
        raise ValueError(
            f"costs of {len(seconds)} models and acceptance of shape {accept.shape}: expected a row and a column of"
            " acceptance for each model, at least one"
        )
    below = accept[np.triu_indices(len(seconds), 1)]
    if not ((below >= 0) & (below <= 1)).all():
        raise ValueError(f"acceptance={shown(accept.tolist())}: above the diagonal allowed are 0 to 1")
    if any(not cost(0) >= 0 for cost in seconds):
        raise ValueError(f"costs={shown(list(costs))}: allowed are numbers from 0")
    return seconds, accept


def _function_of(cost: Any) -> Callable[[int], float]:
    if isinstance(cost, Callable):
        return cost
    table = np.atleast_1d(np.asarray(cost, float))
    return lambda drafts: float(table[min(drafts, len(table) - 1)])
