"""What a round yields: the expected tokens of a tree, and distributions of numbers of tokens.

A profile gives the acceptance probability at each depth of a chain: the probability that a draft is accepted, given
that all drafts before it were. A `Distribution` gives the probability of each number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from hsd_jax.config import TreeConfig

UNKNOWN_PROFILE = {False: (0.75,) * 8, True: (0.55,) * 8}
"""The profile of a drafter that has none: greedy (False) and at temperature 1 (True). The values are low. A call learns
the real ones while it decodes."""

SPREAD_OF_TEXTS = 0.4
"""The standard deviation, over texts, of the log-odds that a draft is accepted. It was fitted to SmolLM2 and to the
bundled pair, chains of 2 to 8 nodes, greedy and at temperature 1, 64 and 128 tokens: 0.26 to 0.58 (docs/history.md)."""

Distribution = Mapping[int, float]
"""The probability of each number of tokens."""


def profile_of(config: Any, is_sampled: bool) -> tuple[float, ...]:
    """A drafter's acceptance probabilities by depth, greedy or at temperature 1."""
    name = "sampled_profile" if is_sampled else "profile"
    return getattr(config, name, ()) or UNKNOWN_PROFILE[is_sampled]


def profile_of_slowest(profile: Sequence[float], rows: int) -> tuple[float, ...]:
    """The profile of that one of `rows` texts which accepts least.

    A call lasts as long as its slowest row. Blom's formula (1958) gives about the mean of the least of several normal
    numbers.
    """
    factor = math.exp(-SPREAD_OF_TEXTS * NormalDist().inv_cdf((rows - 3 / 8) / (rows + 1 / 4)))
    return tuple(a * factor / (1 - a + a * factor) for a in profile)


SIBLINGS = {False: 0.5, True: 0.6}
"""What a doubled number of siblings adds, greedy (False) and sampled, in `expected_tokens`. It was fitted to trees of 8
to 16 nodes of SmolLM2 and of the bundled pair, and gives their tokens within 10 %."""


def expected_tokens(profile: Sequence[float], tree: TreeConfig, is_sampled: bool = False) -> np.ndarray:
    """Expected tokens per round if the 1, 2, ... N likeliest nodes of every tree are verified, at most [N].

    Each level holds the W likeliest children of each of the W likeliest nodes of the level above. The likeliest child
    of a node is accepted with the profile's probability a. One of the first W children is accepted with probability
    1 - (1 - a)^(1 + SIBLINGS * log2(W)).
    """
    power = 1 + SIBLINGS[is_sampled] * np.log2(np.arange(1, tree.width + 1))
    reached, gains = np.ones(1), []
    for a in profile[: tree.depth]:
        shares = np.diff(1 - (1 - a) ** power, prepend=0.0)
        children = np.sort(np.outer(reached, shares).ravel())[::-1]
        gains.append(children)
        reached = children[: tree.width]
    best = np.sort(np.concatenate(gains))[::-1][: tree.nodes - 1]
    return 1 + np.concatenate([[0.0], np.cumsum(best)])


def mean(distribution: Distribution) -> float:
    """The expected number of tokens."""
    return sum(n * p for n, p in distribution.items())


def mixed(judged: Distribution, adds: Callable[[int], Distribution]) -> Distribution:
    """The distribution of the tokens that a verification adds: `adds(drafts)`, with `drafts` random too."""
    found: dict[int, float] = {}
    for drafts, p in judged.items():
        for count, q in adds(drafts).items():
            found[count] = found.get(count, 0.0) + p * q
    return found


def accumulated(adds: Distribution, need: int) -> Distribution:
    """The distribution of the number of tokens as soon as rounds have accumulated at least `need`."""
    reached, final = {0: 1.0}, {}
    for have in range(need):
        for more, p in adds.items():
            into = reached if have + more < need else final
            into[have + more] = into.get(have + more, 0.0) + reached.get(have, 0.0) * p
    return final
