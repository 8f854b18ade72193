"""What a hierarchy of models should cost, and the fastest one: hierarchical speculative decoding as mathematics.

Models 0 to K, the smallest first. Level i collects at least T_i tokens of its model, and the model above judges them in
one pass (Globerson et al., arXiv:2510.19705; methods.md 4.3). Acceptance is taken to be independent from token to
token. Nothing here is part of a decode. `lab/theory.py` has these names, too; `lab/bench/hierarchy.py` measures what
they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hsd_jax.settings import shown

Costs = Sequence[Any] | np.ndarray
"""Seconds of a pass of each model: a number; or one for 0, 1, 2, ... drafts in it, as an array or a function of their
number. That for none is what a token costs that the model writes alone."""

Law = Mapping[int, float]
"""Chances of numbers of tokens."""


class Hierarchy(NamedTuple):
    """A chain of models, and how they hand up."""

    chain: tuple[int, ...]
    """Models by number, the smallest first; the last is K. Of one model: plain decoding."""
    lengths: tuple[int, ...]
    """T of each but the last: tokens that it collects at least."""
    latency: float
    """Seconds a token of the last model."""


def hierarchy_latency(
    costs: Costs, acceptance: Sequence[Sequence[float]] | np.ndarray, lengths: Sequence[int], buffered: bool = True
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
      buffered: exactly T_i tokens go up, and none beyond is ever lost: a bound that no decode reaches, since a
        rejection spoils what waits. False: all that were accumulated go up.
    Raises:
      ValueError: if sizes do not fit, a length is below 1, a cost negative or an acceptance no probability.
    """
    seconds, accept = _checked(costs, acceptance)
    last = len(seconds) - 1
    if len(lengths) != last or any(int(n) != n or n < 1 for n in lengths):
        raise ValueError(f"lengths={shown(list(lengths))}: expected {last} numbers from 1, one a model but the last")
    latency, handed_up = seconds[0](0), {}
    for level in range(1, last + 1):
        need, chance = int(lengths[level - 1]), float(accept[level - 1, level])
        if buffered or level == 1:
            handed_up = {need: 1.0}
        else:
            handed_up = accumulated(adds_of(handed_up, accept[level - 2, level - 1]), need)
        spent = sum(p * (seconds[level](n) + n * latency) for n, p in handed_up.items())
        latency = spent / sum(p * expected_tokens(chance, n) for n, p in handed_up.items())
    return latency


def expected_tokens(acceptance: float, drafts: int) -> float:
    """S: tokens of one verification of so many drafts, each accepted with this chance if those before it were."""
    return drafts + 1.0 if acceptance == 1.0 else (1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance)


def acceptance_giving(tokens: float, drafts: int) -> float:
    """The acceptance, the same everywhere, with which a verification of so many drafts gives so many tokens: S
    inverted, by halving."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, drafts) < tokens else (low, middle)
    return (low + high) / 2


def mean_accumulation(acceptance: Sequence[Sequence[float]] | np.ndarray, lengths: Sequence[int]) -> list[float]:
    """E[N_i] of each level but the last, where all that were accumulated go up; arguments as in `hierarchy_latency`."""
    accept, handed_up, found = np.asarray(acceptance, float), {}, []
    for level, need in enumerate(lengths):
        handed_up = {need: 1.0} if level == 0 else accumulated(adds_of(handed_up, accept[level - 1, level]), need)
        found.append(mean(handed_up))
    return found


def adds_of(judged: Law, acceptance: float) -> Law:
    """What a verification adds that judges so many drafts, of the same acceptance everywhere."""
    return mixed(judged, lambda drafts: geometric(float(acceptance), drafts))


def mean(law: Law) -> float:
    """Of a number of tokens."""
    return sum(n * p for n, p in law.items())


def geometric(acceptance: float, drafts: int) -> Law:
    """What one verification of so many drafts adds, each accepted with this chance if those before it were."""
    stops = [1.0 - acceptance] * drafts + [1.0]
    return {count + 1: acceptance**count * stop for count, stop in enumerate(stops)}


def mixed(judged: Law, adds: Callable[[int], Law]) -> Law:
    """What a verification adds that judges so many drafts."""
    found: dict[int, float] = {}
    for drafts, p in judged.items():
        for count, q in adds(drafts).items():
            found[count] = found.get(count, 0.0) + p * q
    return found


def accumulated(adds: Law, need: int) -> Law:
    """How many tokens a level has once it has `need`, if each of its rounds adds so many."""
    reached, final = {0: 1.0}, {}
    for have in range(need):
        for more, p in adds.items():
            into = reached if have + more < need else final
            into[have + more] = into.get(have + more, 0.0) + reached.get(have, 0.0) * p
    return final


class Rounds(NamedTuple):
    """What was measured of the rounds of a model over drafts from below, their acceptance by place in it."""

    adds: Callable[[int], Law]
    """Tokens that a verification of so many drafts adds."""
    seconds: Callable[[int], float]
    """Of a round that verifies so many drafts; of the first level with what drafting them takes, of others without what
    the levels below take."""
    again: float = 0.0
    """Seconds more of a round behind one whose drafts were all accepted: the level below reads the token after them."""


class Replay(NamedTuple):
    """What a hierarchy takes by `Rounds`."""

    latency: float
    """Seconds a token of the last model."""
    tau: float
    """Tokens of the last model in a round of it."""
    handed_up: tuple[float, ...]
    """Tokens that each level but the last hands up, in the mean."""


def replayed(levels: Sequence[Rounds], lengths: Sequence[int]) -> Replay:
    """What rounds add and take, level by level, where all that were accumulated go up.

    Nothing is taken to be the same at every place; but that how much a level accumulates says nothing of how much of it
    the next one accepts. With rounds whose acceptance is the same everywhere this is `hierarchy_latency`, unbuffered.

    Args:
      levels: of each model but the smallest.
      lengths: as there.
    """
    handed_up, means, spent, adds = {}, [], 0.0, {}
    for number, (level, need) in enumerate(zip(levels, lengths, strict=True)):
        handed_up = {need: 1.0} if number == 0 else accumulated(adds, need)
        rounds = mean(handed_up) / mean(adds) if number else 0.0  # of the level below (Wald)
        all_accepted = sum(p * level.adds(n).get(n + 1, 0.0) for n, p in handed_up.items())
        own = sum(p * level.seconds(n) for n, p in handed_up.items())
        spent = own + rounds * spent + all_accepted * level.again
        adds = mixed(handed_up, level.adds)
        means.append(mean(handed_up))
    return Replay(spent / mean(adds), mean(adds), tuple(means))


def plan_hierarchy(costs: Costs, acceptance: Sequence[Sequence[float]] | np.ndarray, max_length: int) -> Hierarchy:
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
                latency = spent / expected_tokens(float(accept[below.chain[-1], model]), length)
                if latency < found.latency:
                    found = Hierarchy((*below.chain, model), (*below.lengths, length), latency)
        best.append(found)
    return best[-1]


def _checked(costs: Costs, acceptance: Any) -> tuple[list[Callable[[int], float]], np.ndarray]:
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
