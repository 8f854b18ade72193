"""Recursive rejection sampling in plain loops: one node, a whole tree, and the exact distribution of what it emits.

Numbers may be Fractions, then every distribution is exact, or floats. Written from methods.md 6.1 (SpecInfer, RSD).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

INDEPENDENT, WITHOUT_REPLACEMENT = "independent", "without_replacement"
Distribution = Sequence
"""Probabilities, a number a token."""


def without(distribution: Distribution, removed: Sequence[int]) -> list:
    """The distribution renormalised off some tokens."""
    kept = [0 * p if token in removed else p for token, p in enumerate(distribution)]
    return [p / sum(kept) for p in kept]


def rest_of(target: Distribution, draft: Distribution) -> list:
    """norm((target - draft)_+), or the target where nothing is left."""
    rest = [max(p - q, 0 * p) for p, q in zip(target, draft, strict=True)]
    return [r / sum(rest) for r in rest] if sum(rest) > 0 else list(target)


def judge_node(target: Distribution, draft: Distribution, children: Sequence[int], draws: str) -> tuple[list, list]:
    """The chance of each child once its earlier siblings are refused, and what is left once all are."""
    residual, odds = list(target), []
    for j, token in enumerate(children):
        proposal = draft if draws == INDEPENDENT else without(draft, children[:j])
        # A child without mass was drawn under another distribution: only the tests' mutants come here.
        ratio = residual[token] / proposal[token] if proposal[token] > 0 else 0 * residual[token]
        odds.append(min(ratio, 1 + 0 * ratio))
        residual = rest_of(residual, proposal)
    return odds, residual


def children_of(parents: Sequence[int], valid: Sequence[bool], node: int) -> list[int]:
    return [n for n in range(1, len(parents)) if parents[n] == node and valid[n]]


def verdict_distribution(
    tokens: Sequence[int],
    parents: Sequence[int],
    valid: Sequence[bool],
    judged: Callable[[int], tuple[Sequence, Sequence]],
) -> dict[tuple[int, ...], object]:
    """Distribution of what is emitted for one tree. `judged(node)`: odds of its children, and the distribution behind
    their refusal."""

    def behind(node: int) -> dict:
        odds, residual = judged(node)
        distribution, left = defaultdict(int), 1
        for child, chance in zip(children_of(parents, valid, node), odds, strict=True):
            if left * chance > 0:
                for text, mass in behind(child).items():
                    distribution[tokens[child], *text] += left * chance * mass
            left = left * (1 - chance)
        for token, mass in enumerate(residual):
            distribution[token,] += left * mass
        return distribution

    return dict(behind(0))


def walk(
    tokens: Sequence[int],
    parents: Sequence[int],
    valid: Sequence[bool],
    judged: Callable[[int], tuple[Sequence, Sequence]],
    coins: Sequence[float],
) -> tuple[list[int], Sequence]:
    """The path of accepted nodes, whose coins lie below their odds, and the distribution of the token behind it."""
    path = [0]
    while True:
        odds, residual = judged(path[-1])
        children = children_of(parents, valid, path[-1])
        accepted = [c for c, chance in zip(children, odds, strict=True) if coins[c] < chance]
        if not accepted:
            return path, residual
        path.append(accepted[0])
