"""A tree and a copied chain under one root in plain loops, and what a text shows of either."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oracles import tree

Path = tuple[int, ...]
"""The tokens from below the root on."""


def paths_of(tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]) -> dict[int, Path]:
    """The path to each node that there is, the root's being empty."""
    return {node: path[1:] for node, path in enumerate(tree.paths_of(tokens, parents)) if valid[node]}


def merge(grown: dict[Path, float], chain: dict[Path, float], num_nodes: int) -> dict[Path, float]:
    """The best `num_nodes` - 1 paths of both by their scores; one that is in both has the larger."""
    together = {path: max(grown.get(path, -math.inf), chain.get(path, -math.inf)) for path in {**grown, **chain}}
    best = sorted(together, key=lambda path: -together[path])[: num_nodes - 1]
    return {path: together[path] for path in best}


def judge_chain(chain: Sequence[int], text: Sequence[int]) -> list[bool]:
    """Of each copied token that a text can judge whether it was right, up to the first that was not."""
    found = []
    for drafted, said in zip(chain, text, strict=False):
        found.append(drafted == said)
        if drafted != said:
            break
    return found


def places(paths: dict[int, Path], chain: Sequence[int]) -> list[int]:
    """Of each copied token whether it stands on a node of the tree (0), leaves the tree (1), or comes behind (2)."""
    lengths = [len(path) for path in paths.values() if path == tuple(chain[: len(path)])]
    last = max(lengths)
    return [0 if i < last else 1 if i == last else 2 for i in range(len(chain))]


def judge_tree(paths: dict[int, Path], scores: Sequence[float], text: Sequence[int]) -> tuple[int, float]:
    """How many nodes a text goes through, and how many of those that it tried should have been: the children of a node
    that it went through, as far as it reaches."""
    text = tuple(text)
    node_of = {path: node for node, path in paths.items()}
    accepted = sum(bool(path) and path == text[: len(path)] for path in node_of)
    expected = 0.0
    for path, node in node_of.items():
        if path and len(path) <= len(text) and path[:-1] == text[: len(path) - 1]:
            expected += math.exp(scores[node] - scores[node_of[path[:-1]]])
    return accepted, expected
