"""What a round yields: the tokens of a tree by the drafter's profile, and laws of numbers of tokens.

A profile is the share of a chain's drafts that is accepted, by depth, where all before were; a law has the chance of
each number of tokens. Read next: `costs.py` for what a round costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hsd_jax.config import TreeConfig
from hsd_jax.planning.tuned import WARM

UNKNOWN_PROFILE = {True: (0.75,) * 8, False: (0.55,) * 8}
"""Of a drafter without one, greedy (True) and at temperature 1: conservative, the call learns the rest."""

Law = Mapping[int, float]
"""Chances of numbers of tokens."""


def profile_at(config: Any, temperature: float) -> tuple[float, ...]:
    """The share of a chain's drafts that is accepted, by depth, where all before were."""
    greedy = getattr(config, "profile", ()) or UNKNOWN_PROFILE[True]
    sampled = getattr(config, "sampled_profile", ()) or UNKNOWN_PROFILE[False]
    share = min(temperature, 1.0) if temperature >= WARM else 0.0
    most = min(len(greedy), len(sampled))
    return tuple((1 - share) * g + share * s for g, s in zip(greedy[:most], sampled[:most], strict=True))


def expected_tokens(profile: Sequence[float], tree: TreeConfig) -> np.ndarray:
    """Tokens a round if the 1, 2, ... N likeliest nodes of every tree are verified.

    Each level holds the W likeliest children of each of the W likeliest nodes of the level above. The likeliest child
    of a node is right with the profile's a, one of the first W with 1 - (1 - a)^(1 + log2(W) / 2). That is fitted: it
    gives the tokens of trees of 8 and 16 nodes within a tenth, SmolLM2's and the demo pair's. The tuner measures.
    """
    power = 1 + np.log2(np.arange(1, tree.width + 1)) / 2
    reached, gains = np.ones(1), []
    for a in profile[: tree.depth]:
        shares = np.diff(1 - (1 - a) ** power, prepend=0.0)
        children = np.sort(np.outer(reached, shares).ravel())[::-1]
        gains.append(children)
        reached = children[: tree.width]
    best = np.sort(np.concatenate(gains))[::-1][: tree.nodes - 1]
    return 1 + np.concatenate([[0.0], np.cumsum(best)])


def chain_law(profile: Sequence[float]) -> Law:
    """What one verification of a chain adds that has this profile."""
    reached = np.cumprod([1.0, *profile])
    stops = [1.0 - a for a in profile] + [1.0]
    return {count + 1: float(p * stop) for count, (p, stop) in enumerate(zip(reached, stops, strict=True))}


def mean(law: Law) -> float:
    """Of a number of tokens."""
    return sum(n * p for n, p in law.items())


def mixed(judged: Law, adds: Callable[[int], Law]) -> Law:
    """What a verification adds that judges so many drafts."""
    found: dict[int, float] = {}
    for drafts, p in judged.items():
        for count, q in adds(drafts).items():
            found[count] = found.get(count, 0.0) + p * q
    return found


def accumulated(adds: Law, need: int) -> Law:
    """How many tokens there are once there are `need`, if each round adds so many."""
    reached, final = {0: 1.0}, {}
    for have in range(need):
        for more, p in adds.items():
            into = reached if have + more < need else final
            into[have + more] = into.get(have + more, 0.0) + reached.get(have, 0.0) * p
    return final


def acceptance_giving(tokens: float, drafts: int) -> float:
    """The acceptance, the same everywhere, with which a verification of so many drafts gives so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(chain_law([middle] * drafts)) < tokens else (low, middle)
    return (low + high) / 2
