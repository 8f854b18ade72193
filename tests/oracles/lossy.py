"""Lossy acceptance at one node in plain loops (DistillSpec, section 5.3; methods.md 7.5), in Fractions or floats."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from oracles.recursive import INDEPENDENT, rest_of, without

RAISED = {
    "linear": lambda p, epsilon: p / epsilon,
    "square": lambda p, epsilon: p / epsilon**2,
    "exponential": lambda p, epsilon: float(p) ** float(epsilon),
}
"""f(p, epsilon)."""


def emitted(target: Sequence, draft: Sequence, draws: str, children: int, function: str, epsilon) -> list:
    """The distribution of the first token a node emits, over all draws of its children and all coins."""
    vocab, total = len(target), [0 * target[0]] * len(target)
    for drawn in itertools.product(range(vocab), repeat=children):
        mass, left, residual = 1 + 0 * target[0], 1 + 0 * target[0], list(target)
        parts = [0 * target[0]] * vocab
        for j, token in enumerate(drawn):
            removed = () if draws == INDEPENDENT else drawn[:j]
            if token in removed:
                mass = 0 * mass
                break
            proposal = without(draft, removed)
            mass = mass * proposal[token]
            odds = min(RAISED[function](residual[token], epsilon) / proposal[token], 1)
            parts[token] += left * odds
            left = left * (1 - odds)
            residual = rest_of(residual, proposal)
        if mass:
            parts = [part + left * r for part, r in zip(parts, residual, strict=True)]
            total = [t + mass * part for t, part in zip(total, parts, strict=True)]
    return total


def formula(target: Sequence, draft: Sequence, function: str, epsilon) -> list:
    """The same for one child, in closed form: a + (1 - sum of a) norm((p - q)_+), a = min(q, f(p))."""
    kept = [min(q, RAISED[function](p, epsilon)) for p, q in zip(target, draft, strict=True)]
    return [a + (1 - sum(kept)) * r for a, r in zip(kept, rest_of(target, draft), strict=True)]
