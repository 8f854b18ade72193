"""The predicted cost of a hierarchy of models, and the fastest hierarchy.

The models are numbered 0 to K, the smallest first. Level i collects at least T_i tokens of its model, and the model
above judges them in one pass (Globerson et al., arXiv:2510.19705; methods.md 4.3). The formulas assume that acceptance
is independent from token to token. No decode runs this code. `lab/theory.py` exports these names too.
`lab/bench/hierarchy.py` measures their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hsd_jax.config import TreeConfig
from hsd_jax.planning.acceptance import Distribution, accumulated, chain_distribution, mean, mixed
from hsd_jax.settings import shown

PassCosts = Sequence[Any] | np.ndarray
"""Seconds of a pass of each model: a number, or one for 0, 1, 2, ... drafts in the pass, as an array or as a function
of the number of drafts. The value for 0 drafts is the cost of a token of plain decoding."""


class Hierarchy(NamedTuple):
    """A chain of models, and how many tokens each passes to the next."""

    chain: tuple[int, ...]
    """The numbers of the models, the smallest first; the last is K. A single model means plain decoding."""
    lengths: tuple[int, ...]
    """T of each model but the last: the number of tokens that it collects at least."""
    latency: float
    """Seconds per token of the last model."""

    @property
    def tree(self) -> TreeConfig | None:
        """The longest chain that the last model verifies, with the tokens that overshoot T."""
        return None if not self.lengths else TreeConfig.chain(self.most(len(self.lengths) - 1))

    def most(self, level: int) -> int:
        """The largest number of drafts that the model above a level verifies in a pass."""
        return sum(self.lengths[max(level - 1, 0) : level + 1])


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
        rejection makes the waiting tokens useless. A real stack may take more or less time. False: all accumulated
        tokens go up.
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


def plan_hierarchy(costs: PassCosts, acceptance: Sequence[Sequence[float]] | np.ndarray, max_length: int) -> Hierarchy:
    """The hierarchy with the least buffered latency, over all chains that end in the last model and over all lengths.

    An edge from model i to model j with length T maps the latency of i to the latency of j:

        l -> (c_j(T) + T l) / S(a_ij, T)

    This map is affine and increasing. So the best chain to j that passes through i contains the best chain to i. The
    models are in order of size, so a dynamic program finds this generalised shortest path in time K^2 times
    `max_length`.

    Args:
      costs, acceptance: as in `hierarchy_latency`.
      max_length: the largest T to try.
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
                latency = spent / mean(chain_distribution([float(accept[below.chain[-1], model])] * length))
                if latency < found.latency:
                    found = Hierarchy((*below.chain, model), (*below.lengths, length), latency)
        best.append(found)
    return best[-1]


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
