"""The predicted cost of a hierarchy of models, and the search for the fastest hierarchy.

The models are numbered 0 to K, the smallest first. Level i collects at least T_i tokens of its model, and the model
above judges them in one pass (Globerson et al., arXiv:2510.19705; methods.md 4.3). A plan has two steps.
`plan_hierarchy` searches all hierarchies by a formula, which assumes that acceptance is independent from token to token
and that no collected token is lost. `fastest` replays the rounds of those that the search kept, from measured parts,
and decides among them. No decode runs this code.
`lab/bench/hierarchy.py` measures the inputs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hsd_jax.config import TreeConfig
from hsd_jax.planning.acceptance import Distribution, accumulated, chain_distribution, mean, mixed
from hsd_jax.settings import shown

PassCosts = Sequence[Any] | np.ndarray
"""Seconds of a pass of each model: a number, or one for 0, 1, 2, ... drafts in the pass, as an array or as a function
of the number of drafts. The value for 0 drafts is the cost of a token of plain decoding."""
Edge = tuple[int, int]
"""The numbers of a model that drafts and of the model that verifies its drafts."""


class Hierarchy(NamedTuple):
    """A chain of models, and how many tokens each passes to the next."""

    chain: tuple[int, ...]
    """The numbers of the models, the smallest first. A single model means plain decoding."""
    lengths: tuple[int, ...]
    """T of each model but the last: the number of tokens that it collects at least."""
    latency: float
    """Seconds per token of the last model, by the buffered formula of `hierarchy_latency`."""

    @property
    def tree(self) -> TreeConfig | None:
        """The longest chain that the last model verifies."""
        return None if not self.lengths else TreeConfig.chain(self.most(len(self.lengths) - 1))

    def most(self, level: int) -> int:
        """The largest number of tokens that a level hands up.

        A round of the level adds one token more than the level below handed up, and up to T - 1 tokens are there before
        its last round.
        """
        return sum(self.lengths[: level + 1])


def hierarchy_latency(
    costs: PassCosts, acceptance: Sequence[Sequence[float]] | np.ndarray, lengths: Sequence[int], buffered: bool = True
) -> float:
    """Expected seconds per token of a hierarchy of all models.

    S(a, T) = (1 - a^(T+1)) / (1 - a) is the expected number of tokens of one verification. With l_0 = c_0:

        buffered:   l_j = (c_j + T_i l_i) / S(a_ij, T_i)
        otherwise:  l_j = (E[c_j(N_i)] + E[N_i] l_i) / E[S(a_ij, N_i)]

    N_i is the number of tokens that level i has when it has at least T_i. Its rounds add truncated geometric numbers,
    and the last round overshoots. `drafters/stack` passes all N_i tokens up, so the second formula describes it.

    Args:
      costs: of K + 1 models. A pass over more drafts than an array has entries is taken to cost its last entry.
      acceptance: [K + 1, K + 1]; `acceptance[i][j]` is the probability that model j accepts a token of model i.
      lengths: T_0 to T_{K-1}.
      buffered: True: exactly T_i tokens go up, and no further token is lost. No decode works like this, because a
        rejection makes the waiting tokens useless. A stack may take more or less time. False: all accumulated tokens go
        up.
    Raises:
      ValueError: if sizes do not fit, a length is below 1, a cost negative or an acceptance no probability.
    """
    seconds, accept = _checked(costs, acceptance)
    last = len(seconds) - 1
    if len(lengths) != last or any(int(n) != n or n < 1 for n in lengths):
        raise ValueError(
            f"lengths={shown(list(lengths))}: expected {last} numbers from 1, one for each model but the last"
        )
    if not last:
        return seconds[0](0)
    rounds = []
    for level, cost in enumerate(seconds[1:]):
        adds = lambda drafts, chance=float(accept[level, level + 1]): chain_distribution([chance] * drafts)  # noqa: E731
        drafting = 0.0 if level else seconds[0](0)
        rounds.append(Rounds(adds, lambda drafts, cost=cost, one=drafting: cost(drafts) + drafts * one))
    return expected_cost(rounds, [int(n) for n in lengths], buffered).latency


class Rounds(NamedTuple):
    """What rounds of a model over drafts from the level below yield and cost."""

    adds: Callable[[int], Distribution]
    """The distribution of the tokens that a verification adds, given its number of drafts."""
    seconds: Callable[[int], float]
    """Seconds of a round that verifies the given number of drafts. At the first level they include drafting; at the
    other levels they exclude the levels below."""
    again: float = 0.0
    """Extra seconds of a round after one whose drafts were all accepted: the level below must read the bonus token."""


class HierarchyCost(NamedTuple):
    """The expected cost of a hierarchy."""

    latency: float
    """Seconds per token of the last model."""
    tau: float
    """Tokens per pass of the last model."""
    handed_up: tuple[float, ...]
    """The mean number of tokens that each level but the last passes up."""


def expected_cost(levels: Sequence[Rounds], lengths: Sequence[int], buffered: bool = False) -> HierarchyCost:
    """The expected cost of a hierarchy, computed level by level.

    Acceptance may depend on the position in the chain. But the number of tokens that a level accumulates and the
    number of them that the next level accepts are taken to be independent.

    Args:
      levels: one for each model but the smallest.
      lengths, buffered: as in `hierarchy_latency`.
    """
    means, spent, adds = [], 0.0, {}
    for number, (level, need) in enumerate(zip(levels, lengths, strict=True)):
        handed_up = {need: 1.0} if buffered or number == 0 else accumulated(adds, need)
        rounds = mean(handed_up) / mean(adds) if number else 0.0  # of the level below (Wald's equation)
        all_accepted = sum(p * level.adds(n).get(n + 1, 0.0) for n, p in handed_up.items())
        own = sum(p * level.seconds(n) for n, p in handed_up.items())
        spent = own + rounds * spent + all_accepted * level.again
        adds = mixed(handed_up, level.adds)
        means.append(mean(handed_up))
    return HierarchyCost(spent / mean(adds), mean(adds), tuple(means))


def plan_hierarchy(
    costs: PassCosts,
    acceptance: Sequence[Sequence[float]] | np.ndarray,
    longest: int | Mapping[Edge, int],
    keep: int = 1,
) -> dict[int, list[Hierarchy]]:
    """The hierarchies with the least buffered latency for each number of models, over all chains and all lengths.

    An edge from model i to model j with length T maps the latency of i to the latency of j:

        l -> (c_j(T) + T l) / S(a_ij, T)

    This map is affine and increasing. So a hierarchy among the best `keep` of m models up to j, through i, continues
    one of the best `keep` of m - 1 models up to i. The models are in order of size, so a dynamic program finds these
    generalised shortest paths in time K^3 times the longest length times `keep`.

    Args:
      costs, acceptance: as in `hierarchy_latency`.
      longest: the largest T to try: one number, or one for each pair in which the first model may draft for the second.
      keep: hierarchies of each number of models. The formula errs, so `fastest` should decide among several.
    Returns:
      By number of models, the hierarchies that end in the last model, the best first. 1 is plain decoding. A number of
      models for which there is no chain is missing.
    Raises:
      ValueError: as `hierarchy_latency`, and for a length or `keep` below 1.
    """
    seconds, accept = _checked(costs, acceptance)
    if not isinstance(longest, Mapping):
        longest = dict.fromkeys(itertools.combinations(range(len(seconds)), 2), longest)
    for name, value in (("longest", min(longest.values(), default=1)), ("keep", keep)):
        if int(value) != value or value < 1:
            raise ValueError(f"{name}={shown(value)}: allowed are 1 and more")
    best: list[dict[int, list[Hierarchy]]] = []
    for model, cost in enumerate(seconds):
        found = {1: [Hierarchy((model,), (), cost(0))]}
        for below, hierarchies in enumerate(best):
            for length in range(1, int(longest.get((below, model), 0)) + 1):
                tokens = mean(chain_distribution([float(accept[below, model])] * length))
                for size, some in hierarchies.items():
                    found.setdefault(size + 1, []).extend(
                        Hierarchy(
                            (*hierarchy.chain, model),
                            (*hierarchy.lengths, length),
                            (cost(length) + length * hierarchy.latency) / tokens,
                        )
                        for hierarchy in some
                    )
        best.append(
            {size: heapq.nsmallest(keep, some, key=lambda hierarchy: hierarchy.latency) for size, some in found.items()}
        )
    return best[-1]


class RoundParts(NamedTuple):
    """The measured parts of the rounds of pairs of models, from which `replayed` predicts a hierarchy."""

    passes: Sequence[Sequence[float]]
    """For each model the seconds of passes over 0, 1, ... drafts; for a drafter that is no language model one number,
    the seconds of a draft."""
    laws: Mapping[Edge, Sequence[Distribution]]
    """The tokens that a verification of 1, 2, ... drafts of the first model adds to the second's text."""
    besides: Mapping[Edge, float]
    """Seconds of a round of a pair beyond its passes."""
    follow: Mapping[Edge, Sequence[float]]
    """Seconds in which the drafter of a pair follows 0, 1, ... drafts and the token after them. Only pairs on which
    another model can be stacked."""


def replayed(parts: RoundParts, hierarchy: Hierarchy) -> HierarchyCost:
    """The predicted cost of a hierarchy, whose rounds are put together from measured parts (methods.md 4.3)."""
    if not hierarchy.lengths:
        return HierarchyCost(parts.passes[hierarchy.chain[-1]][0], 1.0, ())
    return expected_cost(rounds_of(parts, hierarchy), hierarchy.lengths)


def rounds_of(parts: RoundParts, hierarchy: Hierarchy) -> list[Rounds]:
    """The tokens and the seconds of a round at every level of a hierarchy."""
    found, edges = [], list(itertools.pairwise(hierarchy.chain))
    for level, (i, j) in enumerate(edges):
        laws = parts.laws[i, j][: hierarchy.most(level)]
        passes, one = parts.passes[j], parts.passes[i][0]
        if level == 0:
            again, preparing = 0.0, [n * one for n in range(len(laws) + 1)]
        else:
            drafts = hierarchy.most(level - 1)
            follow = parts.follow[edges[level - 1]][drafts]
            again, preparing = one + follow, [follow * num_follows(law, n, drafts) for n, law in enumerate([{}, *laws])]
        seconds = [passes[n] + parts.besides[i, j] + preparing[n] for n in range(len(laws) + 1)]
        found.append(Rounds(lambda n, laws=laws: laws[n - 1], seconds.__getitem__, again))
    return found


def num_follows(law: Distribution, drafts: int, length: int) -> float:
    """The mean number of times that the drafter of a middle model follows at most `length` + 1 committed tokens.

    The last token of a round that accepted all drafts is not counted, because it is read later.

    Args:
      law: the distribution of the tokens of a round of `drafts` drafts.
    """
    return sum(p * -(-min(count, drafts) // (length + 1)) for count, p in law.items())


def fastest(candidates: Iterable[Hierarchy], parts: RoundParts) -> Hierarchy:
    """The hierarchy with the least replayed latency."""
    return min(candidates, key=lambda hierarchy: replayed(parts, hierarchy).latency)


def _checked(costs: PassCosts, acceptance: Any) -> tuple[list[Callable[[int], float]], np.ndarray]:
    """Costs as functions, and the acceptance matrix, both checked."""
    seconds, accept = [_function_of(cost) for cost in costs], np.asarray(acceptance, float)
    if not seconds or accept.shape != (len(seconds), len(seconds)):
        raise ValueError(
            f"costs of {len(seconds)} models and acceptance of shape {accept.shape}: expected a row and a column of"
            " acceptance for each model, and at least one model"
        )
    below = accept[np.triu_indices(len(seconds), 1)]
    if not ((below >= 0) & (below <= 1)).all():
        raise ValueError(f"acceptance={shown(accept.tolist())}: above the diagonal, allowed are 0 to 1")
    if any(not cost(0) >= 0 for cost in seconds):
        raise ValueError(f"costs={shown(list(costs))}: allowed are numbers from 0")
    return seconds, accept


def _function_of(cost: Any) -> Callable[[int], float]:
    if isinstance(cost, Callable):
        return cost
    table = np.atleast_1d(np.asarray(cost, float))
    return lambda drafts: float(table[min(drafts, len(table) - 1)])
