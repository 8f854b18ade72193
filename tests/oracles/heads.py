"""The static tree of independent heads, by trying every path."""

from __future__ import annotations

import itertools


def static_tree(nodes: int, depth: int, width: int, first: float, following: float) -> set[tuple[int, ...]]:
    """Paths of ranks of the `nodes - 1` likeliest nodes; rank r has probability first * following^r at every depth."""
    paths = [path for length in range(1, depth + 1) for path in itertools.product(range(width), repeat=length)]
    paths.sort(key=lambda path: (-(first ** len(path)) * following ** sum(path), len(path), path))
    return set(paths[: nodes - 1])
