"""Trees with as many children for every node of a level, in plain loops. Written from arXiv:2402.14160 (RSD-C)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from oracles import recursive


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


def emitted(
    target: Sequence[Sequence],
    draft: Sequence[Sequence],
    branching: Sequence[int],
    root: int,
    draws: str,
    judged_as: str,
) -> dict[tuple[int, ...], object]:
    """Distribution of what a round emits, over every tree and every coin, exact where the tables are Fractions.

    What lies below a child depends on the child's token alone, so one node is enumerated at a time. `table[a]`:
    distribution behind token a.
    """
    if not branching:
        return {(token,): p for token, p in enumerate(target[root])}
    found: dict = defaultdict(int)
    below = [emitted(target, draft, branching[1:], token, draws, judged_as) for token in range(len(target))]
    for children, mass in recursive.tree_draws(draft, root, [-1, *[0] * branching[0]], draws):
        odds, residual = recursive.judge_node(target[root], draft[root], children[1:], judged_as)
        for child, chance in zip(children[1:], odds, strict=True):
            for text, p in below[child].items():
                found[child, *text] += mass * chance * p
            mass = mass * (1 - chance)
        for token, p in enumerate(residual):
            found[token,] += mass * p
    return dict(found)


def emitted_by_trees(
    tokens: np.ndarray,
    mass: np.ndarray,
    nodes: Layout,
    valid: np.ndarray,
    acceptance: np.ndarray,
    residual: np.ndarray,
    target: np.ndarray,
) -> np.ndarray:
    """Distribution [V, ..., V] of the next D + 1 tokens, the target writing what the round did not emit.

    Args:
      tokens, valid, acceptance: of trees of one layout [trees, N], of probability `mass` [trees].
      residual: [trees, I, V], behind the rejection of all children of a node.
      target: Markov table [V, V].
    """
    length, vocab = max(nodes.depths) + 1, len(target)
    reached, found = np.zeros(tokens.shape), [np.zeros((vocab,) * (d + 1)) for d in range(length)]
    reached[:, 0] = mass
    paths: list[list[int]] = [[]]
    for node in range(1, len(nodes.parents)):
        paths.append([*paths[nodes.parents[node]], node])
    for node, depth in enumerate(nodes.depths):
        left = reached[:, node]
        for child in (n for n, parent in enumerate(nodes.parents) if parent == node):
            odds = np.where(valid[:, child], acceptance[:, child], 0.0)
            reached[:, child] = left * odds
            left = left * (1 - odds)
        is_tried = np.array([nodes.parents[n] == node for n in range(len(nodes.parents))]) & valid
        behind = target[tokens[:, node]]
        if node < residual.shape[1]:
            behind = np.where(is_tried.any(1)[:, None], residual[:, node], behind)
        for token in range(vocab):
            where = (*(tokens[:, n] for n in paths[node]), np.full(len(tokens), token))
            np.add.at(found[depth], where, left * behind[:, token])
    whole = found[0]
    for longer in found[1:]:
        whole = whole[..., None] * target + longer
    return whole


def text_distribution(target: np.ndarray, root: int, length: int) -> np.ndarray:
    """Of the next `length` tokens under a Markov table alone [V, ..., V]."""
    found = target[root]
    for _ in range(length - 1):
        found = found[..., None] * target
    return found
