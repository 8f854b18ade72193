"""Trees with as many children for every node of a level, in plain loops. Written from arXiv:2402.14160 (RSD-C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """Of the nodes in order: parent, depth, place among the siblings."""

    parents: list[int]
    depths: list[int]
    ranks: list[int]


def layout(branching: Sequence[int]) -> Layout:
    """Level by level; the children of a node stand together."""
    nodes, level = Layout([-1], [0], [0]), [0]
    for depth, count in enumerate(branching):
        below = []
        for parent in level:
            for rank in range(count):
                below.append(len(nodes.parents))
                nodes.parents.append(parent)
                nodes.depths.append(depth + 1)
                nodes.ranks.append(rank)
        level = below
    return nodes


def likeliest_tree(logits: Callable[[int, int], np.ndarray], root: int, branching: Sequence[int]) -> list[int]:
    """Tokens: the children of every node are its likeliest tokens. `logits(depth, token)`: behind a node."""
    nodes, tokens = layout(branching), [root]
    for parent, depth, rank in list(zip(*nodes, strict=True))[1:]:
        found = logits(depth - 1, tokens[parent])
        tokens.append(sorted(range(len(found)), key=lambda token: (-found[token], token))[rank])
    return tokens
