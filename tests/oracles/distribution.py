"""Exact distributions of emitted tokens in rational arithmetic, by enumeration of every draw."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from oracles.tree import walk

Text = tuple[int, ...]
Table = Sequence[Sequence[Fraction]]
"""`table[a][b]`: probability of token b behind token a."""


def random_table(numbers: Sequence[int], vocab: int) -> list[list[Fraction]]:
    """A Markov table from positive integers, row by row."""
    rows = [numbers[i * vocab : (i + 1) * vocab] for i in range(vocab)]
    return [[Fraction(x, sum(row)) for x in row] for row in rows]


def markov_table(vocab: int, seed: int) -> list[list[Fraction]]:
    """A Markov table of small fractions; from seed 100 on the first row has a token without mass, from 200 on only two
    have any."""
    numbers = np.random.default_rng(seed).integers(1, 12, (vocab, vocab))
    if seed >= 100:
        numbers[0, 1] = 0
    if seed >= 200:
        numbers[:, 2:] = 0
    return random_table(numbers.ravel().tolist(), vocab)


def text_distribution(table: Table, root: int, length: int) -> dict[Text, Fraction]:
    """Distribution of the next `length` tokens under the target alone."""
    distribution = {(): Fraction(1)}
    for _ in range(length):
        longer = {}
        for text, mass in distribution.items():
            for token, p in enumerate(table[text[-1] if text else root]):
                longer[(*text, token)] = mass * p
        distribution = longer
    return distribution


def emitted_distribution(
    table: Table,
    tokens: Sequence[int],
    parents: Sequence[int],
    valid: Sequence[bool],
    judge: Callable[..., Sequence[int]] | None = None,
) -> dict[Text, Fraction]:
    """Distribution of what one verification of this tree emits, accepted tokens and the next one.

    Enumerates the draw of every node, each from the target's distribution behind the node's token. `judge(tokens,
    parents, valid, draws, table)` returns the emitted tokens; None: the walk of `oracles/tree.py`.
    """
    judge = judge or (lambda tokens, parents, valid, draws, table: walk(tokens, parents, valid, draws)[1])
    distribution = defaultdict(Fraction)
    for draws in itertools.product(range(len(table)), repeat=len(tokens)):
        mass = Fraction(1)
        for token, y in zip(tokens, draws, strict=True):
            mass *= table[token][y]
        distribution[tuple(judge(tokens, parents, valid, draws, table))] += mass
    return dict(distribution)


def completed_distribution(table: Table, emitted: dict[Text, Fraction], length: int) -> dict[Text, Fraction]:
    """Distribution of `length` tokens when the target alone writes what the verification did not emit."""
    distribution = defaultdict(Fraction)
    for start, mass in emitted.items():
        start = start[:length]
        for text, p in text_distribution(table, start[-1], length - len(start)).items():
            distribution[start + text] += mass * p
    return dict(distribution)


def distance(table: Table, root: int, length: int, emitted: dict[Text, Fraction]) -> Fraction:
    """Total variation between texts of `length` tokens that start with `emitted` and texts of the target alone."""
    return total_variation(completed_distribution(table, emitted, length), text_distribution(table, root, length))


def total_variation(one: dict[Text, Fraction], other: dict[Text, Fraction]) -> Fraction:
    return sum((abs(one.get(t, Fraction(0)) - other.get(t, Fraction(0))) for t in {*one, *other}), Fraction(0)) / 2
