"""Hierarchical speculative decoding over Markov tables by enumeration, a simulation of its latency, and all
hierarchies of some models.

Written from methods.md 4.3 (Globerson et al., arXiv:2510.19705): level i collects at least T_i tokens verified by its
model, then the model above judges all of them. Numbers may be Fractions, then every distribution is exact.
"""

from __future__ import annotations

import itertools
import random
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


def accepted(alpha: float, drafts: int, rng: random.Random) -> int:
    """Tokens of one verification: i.i.d. acceptance, and one more token."""
    count = 1
    while count <= drafts and rng.random() < alpha:
        count += 1
    return count


def simulated_latency(costs, acceptance, lengths, buffered: bool, num_tokens: int, seed: int = 0) -> float:
    """Seconds a token of a simulated hierarchy that writes so many tokens.

    Buffered: a level hands up exactly T tokens, and keeps what it has more for the next call.
    """
    rng, spent = random.Random(seed), 0.0
    waiting = [0] * len(costs)

    def collect(level: int, needed: int) -> int:
        """Tokens of this level's model, at least so many."""
        nonlocal spent
        found = waiting[level]
        while found < needed:
            if level == 0:
                spent += costs[0]
                found += 1
                continue
            drafts = collect(level - 1, lengths[level - 1])
            spent += costs[level]
            found += accepted(acceptance[level - 1][level], drafts, rng)
        waiting[level] = found - needed if buffered else 0
        return needed if buffered else found

    written = collect(len(costs) - 1, num_tokens)
    return spent / written


def geometric_sum(alpha: float, drafts: int) -> float:
    return sum(alpha**k for k in range(drafts + 1))


def all_hierarchies(costs, acceptance, max_length: int) -> list[tuple[tuple[int, ...], tuple[int, ...], float]]:
    """All chains of models with all lengths, and the time a token; `costs[j](T)` and buffered accumulation."""
    last, found = len(costs) - 1, []
    for size in range(last + 1):
        for below in itertools.combinations(range(last), size):
            chain = (*below, last)
            for lengths in itertools.product(range(1, max_length + 1), repeat=size):
                latency = costs[chain[0]](0)
                for low, high, drafts in zip(chain, chain[1:], lengths, strict=False):
                    total = costs[high](drafts) + drafts * latency
                    latency = total / geometric_sum(acceptance[low][high], drafts)
                found.append((chain, lengths, latency))
    return found
