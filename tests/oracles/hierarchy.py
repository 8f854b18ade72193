"""Hierarchical speculative decoding over Markov tables by enumeration.

Written from methods.md 4.3 (Globerson et al., arXiv:2510.19705): level i collects at least T_i tokens verified by its
model, then the model above judges all of them. Numbers may be Fractions, then every distribution is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from oracles import recursive


def judged_chain(target, draft, root: int, chain: Sequence[int]) -> dict[tuple[int, ...], object]:
    """Distribution of what one verification of a chain emits: the p / q test at each token, then residual or bonus."""
    tokens, parents = [root, *chain], [-1, *range(len(chain))]

    def judged(node):
        children = [tokens[node + 1]] if node < len(chain) else []
        return recursive.judge_node(target[tokens[node]], draft[tokens[node]], children, recursive.INDEPENDENT)

    return recursive.verdict_distribution(tokens, parents, [True] * len(tokens), judged)


def accumulated(tables: Sequence, lengths: Sequence[int], root: int) -> dict[tuple[int, ...], object]:
    """Distribution of the tokens that level `len(lengths) - 1` hands up: at least its T of them.

    Args:
      tables: of its model and those below, the smallest first: `table[a]` is the distribution behind a.
      lengths: T of each level.
    """
    vocab = len(tables[0])
    found, unfinished = defaultdict(int), {(): 1}
    while unfinished:
        text, mass = unfinished.popitem()
        last = text[-1] if text else root
        if len(lengths) == 1:
            longer = {(token,): tables[0][last][token] for token in range(vocab)}
        else:
            longer = emitted(tables, lengths[:-1], last)
        for more, p in longer.items():
            whole = (*text, *more)
            if p == 0:
                continue
            if len(whole) >= lengths[-1]:
                found[whole] += mass * p
            else:
                unfinished[whole] = unfinished.get(whole, 0) + mass * p
    return dict(found)


def emitted(tables: Sequence, lengths: Sequence[int], root: int, judged_as: int = -2) -> dict[tuple[int, ...], object]:
    """Distribution of what the largest model's verification of one accumulation emits.

    Args:
      judged_as: the model whose distribution the chain is judged to follow; the one below the largest is right.
    """
    found = defaultdict(int)
    for chain, mass in accumulated(tables[:-1], lengths, root).items():
        for text, p in judged_chain(tables[-1], tables[judged_as], root, chain).items():
            found[text] += mass * p
    return dict(found)
