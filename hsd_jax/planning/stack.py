"""The predicted cost of a stack of models, put together from measured parts, and the search over all stacks.

The models are numbered from the smallest to the target. Level i collects at least T_i tokens of its model, and the
model above judges them in one pass (Globerson et al., arXiv:2510.19705; methods.md 4.3).
"""

from __future__ import annotations

from typing import NamedTuple

from hsd_jax.config import TreeConfig
from hsd_jax.planning.acceptance import Distribution, accumulated, mean, mixed

Edge = tuple[int, int]
"""The numbers of a model that drafts and of the model that verifies its drafts."""


class RoundParts(NamedTuple):
    """What is measured of models and of pairs in which one model drafts for the other."""

    plain: dict[int, float]
    """Seconds of a pass of plain decoding of each language model."""
    rounds: dict[Edge, list[float]]
    """Seconds of a round of a pair alone with 0, 1, ... drafts, drafting included."""
    laws: dict[Edge, list[Distribution]]
    """The tokens that a verification of 1, 2, ... drafts of the first model adds to the second's text."""
    longest: dict[Edge, int]
    """The largest T to try for each pair."""


class Stack(NamedTuple):
    """A chain of models, how many tokens each passes to the next, and what a round of the last model is predicted to
    add and to take."""

    chain: tuple[int, ...]
    """The numbers of the models, the smallest first. A single model means plain decoding."""
    lengths: tuple[int, ...]
    """T of each model but the last: the number of tokens that it collects at least."""
    adds: Distribution
    """The tokens that a round of the last model adds."""
    seconds: float
    """Seconds of such a round, with all rounds of the models below."""

    @property
    def latency(self) -> float:
        """Seconds per token of the last model."""
        return self.seconds / mean(self.adds)

    @property
    def tree(self) -> TreeConfig | None:
        """The longest chain that the last model verifies."""
        return None if not self.lengths else TreeConfig.chain(self.most(len(self.lengths) - 1))

    def most(self, level: int) -> int:
        """The largest number of tokens that a level hands up: a round adds one token more than the level below handed
        up, and up to T - 1 are there before the last round."""
        return sum(self.lengths[: level + 1])


def extended(parts: RoundParts, below: Stack, model: int, length: int) -> Stack:
    """A stack whose last model hands at least `length` tokens up to `model`.

    Acceptance may depend on the position in the chain. But the number of tokens that a level accumulates and the number
    of them that the next level accepts are taken to be independent.
    """
    middle = below.chain[-1]
    taken, laws, one = parts.rounds[middle, model], parts.laws[middle, model], parts.plain[middle]
    handed_up = accumulated(below.adds, length)
    seconds = mean(handed_up) / mean(below.adds) * below.seconds  # so many rounds of the level below (Wald's equation)
    for num, p in handed_up.items():
        # The pair drafted with a pass per draft. Here the drafts are there, but after a round that accepted all of them
        # the middle model has yet to read the bonus token.
        own = max(taken[num] - num * one, parts.plain[model])
        seconds += p * (own + one * laws[num - 1].get(num + 1, 0.0))
    adds = mixed(handed_up, lambda num: laws[num - 1])
    return Stack((*below.chain, model), (*below.lengths, length), adds, seconds)


def all_stacks(parts: RoundParts) -> list[Stack]:
    """Plain decoding of the largest model, and every stack that ends in it, over all chains and all lengths."""
    target = max(parts.plain)
    found: dict[int, list[Stack]] = {model: [] for model in range(target + 1)}
    for i, model in sorted(parts.rounds, key=lambda edge: edge[1]):
        for length in range(1, parts.longest[i, model] + 1):
            law, taken = parts.laws[i, model][length - 1], parts.rounds[i, model][length]
            found[model].append(Stack((i, model), (length,), law, taken))
            found[model] += [extended(parts, below, model, length) for below in found[i]]
    return [Stack((target,), (), {1: 1.0}, parts.plain[target]), *found[target]]
