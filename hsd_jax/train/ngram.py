"""Counts the n-grams of text that the target wrote, as arrays in which `drafters/rescored/ngram.py` looks them up.

The smoothing is interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1999), with one discount per order:

    p(w | h) = max(a(h w) - D, 0) / a(h .) + D t(h) / a(h .) p(w | h without its first token)

For the longest n-grams, a(h w) is their number of occurrences. For shorter ones it is the number of different tokens
that stand before them; the beginning of a document counts as one more. a(h .) is the sum of a(h w) over w, and t(h) is
the number of different w. Below single tokens all tokens are equally likely, so every token has a probability after
every context. The counting uses NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hsd_jax.drafters.rescored.ngram import NgramConfig, save_ngram
from hsd_jax.host.files import replace_folder
from hsd_jax.models.checkpoint import Source, find
from hsd_jax.train.data import DataConfig, read_encoded
from hsd_jax.train.journal import Report
from hsd_jax.train.rows import Encoded
from hsd_jax.types import Weights

LEAST_DISCOUNT, MOST_DISCOUNT = 0.1, 0.9
"""Bounds of the discount. They leave probability for unseen tokens, and more for seen ones, in texts of any size."""


class NgramCounts(NamedTuple):
    """The n-grams of one order, sorted by parent and token."""

    parent: np.ndarray
    """Index of the n-gram without its last token, among those of the next lower order."""
    token: np.ndarray
    """Its last token."""
    suffix: np.ndarray
    """Index of the n-gram without its first token, among those of the next lower order."""
    adjusted: np.ndarray
    """The count a of the module's docstring; 0 for an n-gram that only begins longer ones."""


def count_ngrams(documents: Sequence[Encoded], order: int, vocab_size: int) -> list[NgramCounts]:
    """The n-grams of the orders 1 to `order` that end at a counted token, and their beginnings, within a document."""
    tokens, counted = (np.concatenate(parts) for parts in zip(*documents, strict=True))
    place = np.concatenate([np.arange(len(ids)) for ids, _ in documents])
    wanted = [np.zeros(0, bool)] * (order + 1)  # by order: the positions whose n-gram needs a node
    above = np.zeros(len(tokens), bool)
    for n in range(order, 0, -1):
        wanted[n] = (counted & (place >= n - 1)) | above
        above = np.append(wanted[n][1:], False)
    node = tokens.astype(np.int64)
    orders = [NgramCounts(np.zeros(vocab_size, int), np.arange(vocab_size), np.zeros(vocab_size, int), np.zeros(0))]
    at_positions = [node]
    for n in range(2, order + 1):
        at = np.flatnonzero(wanted[n])
        keys, found = np.unique(at_positions[-1][at - 1] * vocab_size + tokens[at], return_inverse=True)
        node = np.full(len(tokens), -1)
        node[at] = found
        suffix = np.zeros(len(keys), int)
        suffix[found] = at_positions[-1][at]
        orders.append(NgramCounts(keys // vocab_size, keys % vocab_size, suffix, np.zeros(0)))
        at_positions.append(node)
    for n in range(1, order + 1):
        ends = at_positions[n - 1][counted & (place >= n - 1)]
        adjusted = np.bincount(ends, minlength=len(orders[n - 1].token))
        if n < order:  # the number of different tokens before it
            longer = np.unique(at_positions[n][counted & (place >= n)])
            adjusted = np.bincount(orders[n].suffix[longer], minlength=len(adjusted))
            begins = np.unique(at_positions[n - 1][counted & (place == n - 1)])
            adjusted[begins] += 1
        orders[n - 1] = orders[n - 1]._replace(adjusted=adjusted)
    return orders


def discount(adjusted: np.ndarray) -> float:
    """D = n1 / (n1 + 2 n2) for n1 n-grams seen once and n2 seen twice (Ney, Essen and Kneser 1994)."""
    once, twice = (int((adjusted == times).sum()) for times in (1, 2))
    return float(np.clip(once / max(once + 2 * twice, 1), LEAST_DISCOUNT, MOST_DISCOUNT))


def smoothed(orders: Sequence[NgramCounts]) -> Weights:
    """The trie of counted n-grams: `token`, `first`, `logp` and `backoff` of `drafters/rescored/ngram.py`."""
    vocab_size = len(orders[0].token)
    logp, backoff, below = [], [], np.full(1, 1.0 / vocab_size)
    for counts in orders:
        num_parents, own = len(below) if logp else 1, discount(counts.adjusted)
        total = np.bincount(counts.parent, counts.adjusted, minlength=num_parents)
        types = np.bincount(counts.parent, counts.adjusted > 0, minlength=num_parents)
        left = np.where(total > 0, own * types / np.maximum(total, 1), 1.0)
        seen = np.maximum(counts.adjusted - own, 0.0) / np.maximum(total, 1)[counts.parent]
        if logp:
            backoff.append(np.log(left))
        below = seen + left[counts.parent] * below[counts.suffix]
        logp.append(np.log(below))
    backoff.append(np.zeros(len(below)))
    sizes = np.cumsum([0, *(len(counts.token) for counts in orders)])
    parents = [counts.parent + start for counts, start in zip(orders[1:], sizes, strict=False)]
    num_children = np.bincount(np.concatenate([*parents, np.zeros(0, int)]), minlength=sizes[-1])
    first = np.append(vocab_size, vocab_size + np.cumsum(num_children))
    return {
        "token": np.concatenate([counts.token for counts in orders]).astype(np.int32),
        "first": first.astype(np.int32),
        "logp": np.concatenate(logp).astype(np.float32),
        "backoff": np.concatenate(backoff).astype(np.float32),
    }


def make_ngram(
    documents: Sequence[Encoded], order: int, vocab_size: int, vocabulary: str
) -> tuple[NgramConfig, Weights]:
    """The n-gram model of the labels of some documents."""
    if not sum(int(counted.sum()) for _, counted in documents):
        raise ValueError("an n-gram model is counted from tokens, and there are none")
    NgramConfig(order, vocab_size, vocab_size, 1, vocabulary)  # refuses the order before anything is counted
    weights = smoothed(count_ngrams(documents, order, vocab_size))
    most = int(np.diff(weights["first"]).max())
    return NgramConfig(order, vocab_size, len(weights["token"]), max(most, 1), vocabulary), weights


def train_ngram(
    source: Source,
    data_files: Sequence[str | Path],
    out: str | Path,
    order: int,
    loss_on: str,
    report: Report = print,
    skip_bad_lines: bool = False,
) -> None:
    """Counts the n-grams of some data and writes the model to the new folder `out`."""
    if Path(out).exists():
        raise ValueError(f"{out}: exists already; choose another folder")
    checkpoint = find(source)
    vocab_size, skip = checkpoint.config.vocab_size, report if skip_bad_lines else None
    documents = read_encoded(data_files, checkpoint, vocab_size, DataConfig(loss_on=loss_on), skip)
    assert checkpoint.tokenizer is not None, "it has encoded the documents"
    config, weights = make_ngram(documents, order, vocab_size, checkpoint.tokenizer.vocabulary_hash)
    replace_folder(Path(out), lambda new: save_ngram(new, config, weights))
    num_tokens = sum(int(counted.sum()) for _, counted in documents)
    size = sum(array.nbytes for array in weights.values())
    report(
        f"wrote {out}: {config.num_nodes:,} n-grams of up to {order} tokens from {num_tokens:,} tokens,"
        f" {size / 1e6:.1f} MB in memory"
    )
