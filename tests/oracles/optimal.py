"""Draws of a node's children in rational arithmetic, and the most that any rule can accept of them, in three ways.

Written from methods.md 6.5 and 6.6 (Hu et al., arXiv:2502.18779).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from oracles.recursive import Distribution, rest_of, without

INDEPENDENT, WITHOUT_REPLACEMENT, TOP_THEN_RANDOM = "independent", "without_replacement", "top_then_random"


def likeliest(draft: Distribution, count: int) -> list[int]:
    """Of equals the first, as in drafting."""
    return sorted(range(len(draft)), key=lambda token: (-draft[token], token))[:count]


def node_draws(draft: Distribution, count: int, scheme: str) -> dict[tuple[int, ...], Fraction]:
    """Every list of children, in their order, and its probability; the random child of TOP_THEN_RANDOM stands first.

    Where too few tokens have mass a list is shorter: without replacement it ends, and off the top nothing is drawn.
    """
    if scheme == TOP_THEN_RANDOM:
        top = [token for token in likeliest(draft, count - 1) if draft[token] > 0]
        if sum(draft[token] for token in range(len(draft)) if token not in top) == 0:
            return {tuple(top): Fraction(1)}
        return {(token, *top): p for token, p in enumerate(without(draft, top)) if p > 0}
    found = {(): Fraction(1)}
    for _ in range(count):
        longer: dict = {}
        for children, mass in found.items():
            off = children if scheme == WITHOUT_REPLACEMENT else ()
            if sum(p for token, p in enumerate(draft) if token not in off) == 0:
                longer[children] = mass
                continue
            for token, p in enumerate(without(draft, off)):
                if p > 0:
                    longer[(*children, token)] = mass * p
        found = longer
    return found


def best_subset(target: Distribution, draws: dict[tuple[int, ...], Fraction]) -> Fraction:
    """1 + the minimum of P(H) - Q(H) over all sets of tokens."""
    tokens = range(len(target))
    subsets = itertools.chain.from_iterable(itertools.combinations(tokens, n) for n in range(len(target) + 1))
    return 1 + min(
        sum((target[y] for y in subset), Fraction(0))
        - sum((mass for children, mass in draws.items() if set(children) <= set(subset)), Fraction(0))
        for subset in map(set, subsets)
    )


def chain_and_match(
    target: Distribution, draft: Distribution, children: Sequence[int], count: int
) -> tuple[list, list]:
    """The rule for TOP_THEN_RANDOM: the odds of each child once those before it are refused, and what is left then.

    The random child, if there is one, is judged as a chain; then a token is drawn from what is left, and a top child
    that holds it is accepted.
    """
    top = [token for token in likeliest(draft, count - 1) if draft[token] > 0]
    rest, odds = list(target), []
    if len(children) > len(top):
        proposal, first = without(draft, top), children[0]
        odds.append(min(rest[first] / proposal[first], 1 + 0 * rest[first]))
        rest = rest_of(rest, proposal)
    for token in top:
        odds.append(rest[token] / sum(rest) if sum(rest) > 0 else 0 * rest[token])
        rest = [p if other != token else 0 * p for other, p in enumerate(rest)]
    return odds, [p / sum(rest) if sum(rest) > 0 else p for p in rest]


def tree_draws(
    table: Sequence[Distribution], root: int, parents: Sequence[int], scheme: str
) -> list[tuple[list[int], list[bool], Fraction]]:
    """Tokens, valid nodes and probability of every tree of this layout; what could not be drawn is not valid."""
    found = [([root] + [0] * (len(parents) - 1), [True] + [False] * (len(parents) - 1), Fraction(1))]
    for node in range(len(parents)):
        places, longer = [n for n, parent in enumerate(parents) if parent == node], []
        for tokens, valid, mass in found:
            if not places or not valid[node]:
                longer.append((tokens, valid, mass))
                continue
            for children, p in node_draws(table[tokens[node]], len(places), scheme).items():
                grown, kept = list(tokens), list(valid)
                # Without a random child the first place stays empty; what is short otherwise is short at the end.
                skipped = int(scheme == TOP_THEN_RANDOM and not has_random(table[tokens[node]], len(places)))
                for place, token in zip(places[skipped:], children, strict=False):
                    grown[place], kept[place] = token, True
                longer.append((grown, kept, mass * p))
        found = longer
    return found


def has_random(draft: Distribution, count: int) -> bool:
    """Whether the drafter leaves any mass off its `count - 1` likeliest tokens."""
    return sum(draft) > sum(draft[token] for token in likeliest(draft, count - 1))
