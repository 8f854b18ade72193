"""Draft trees in plain loops: growing by beam, ancestor mask, and which path a list of draws follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from oracles.divergence import log_softmax


def grow_beam(
    base_logits: np.ndarray, bias: Callable[[int], np.ndarray], root: int, nodes: int, depth: int, width: int
) -> tuple[list[int], list[int], list[int]]:
    """`grow_paths` where a path says no more than its length and its last token."""

    def logits(path: tuple[int, ...]) -> np.ndarray:
        return np.asarray(base_logits[len(path) - 1], np.float64) + bias(path[-1])

    return grow_paths(logits, root, nodes, depth, width)


def grow_paths(
    logits: Callable[[tuple[int, ...]], np.ndarray], root: int, nodes: int, depth: int, width: int
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and depths of one row: the `nodes - 1` best candidates of a beam over all levels.

    `logits` are those behind a path of tokens that starts with the root. Candidates are (score, parent candidate,
    token, depth). Of equal scores the earlier candidate wins, and earlier levels come first.
    """
    candidates: list[tuple[float, int, int, int]] = []
    frontier = [(0.0, -1, (root,))]
    for level in range(depth):
        grown = []
        for score, identity, path in frontier:
            logp = log_softmax(logits(path))
            likeliest = sorted(range(len(logp)), key=lambda t: (-logp[t], t))[:width]
            for child in likeliest:
                grown.append((score + logp[child], len(candidates), (*path, child)))
                candidates.append((score + logp[child], identity, child, level + 1))
        frontier = sorted(grown, key=lambda c: (-c[0], c[1]))[:width]
    kept = sorted(range(len(candidates)), key=lambda i: (-candidates[i][0], i))[: nodes - 1]
    index = {-1: 0} | {candidate: node + 1 for node, candidate in enumerate(kept)}
    tokens = [root] + [candidates[i][2] for i in kept]
    parents = [-1] + [index[candidates[i][1]] for i in kept]
    depths = [0] + [candidates[i][3] for i in kept]
    return tokens, parents, depths


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
    return paths


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """`mask[i, j]`: j is i or lies on the way from i to the root."""
    mask = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        up = node
        while up != -1:
            mask[node, up] = True
            up = parents[up]
    return mask


def walk(
    tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool], draws: Sequence[int]
) -> tuple[list[int], list[int], bool]:
    """Path from the root, the emitted tokens, and whether the path ended at a leaf (then the last token is a bonus).

    Depth first through every valid child that holds the draw of its parent. Such children differ only if siblings hold
    the same token; then the longest path counts, and of equals the first.
    """

    def follow(node: int) -> list[int]:
        children = [n for n in range(1, len(tokens)) if parents[n] == node and valid[n]]
        longest: list[int] = []
        for child in children:
            if tokens[child] == draws[node]:
                path = follow(child)
                if len(path) > len(longest):
                    longest = path
        return [node, *longest]

    path = follow(0)
    has_child = any(parents[n] == path[-1] and valid[n] for n in range(1, len(tokens)))
    return path, [int(draws[n]) for n in path], not has_child
