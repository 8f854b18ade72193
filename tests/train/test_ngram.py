"""n-gram models against counts by hand and an oracle in fractions; their files, and what is refused."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.ngram import Ngrams

from hsd_jax.drafters.rescored.ngram import NgramConfig, contexts_of, log_probabilities, read_ngram, save_ngram
from hsd_jax.train import ngram
from hsd_jax.types import NO_TOKEN

VOCABULARY = "f" * 64
A, B, C = range(3)


def made(documents, order: int, vocab_size: int):
    documents = [(np.asarray(ids, np.int32), np.asarray(counted, bool)) for ids, counted in documents]
    return ngram.make_ngram(documents, order, vocab_size, VOCABULARY)


def probabilities(config: NgramConfig, weights, contexts) -> np.ndarray:
    """p of every token after each context [rows, order - 1], NO_TOKEN where a text begins."""
    tokens = jnp.arange(config.vocab_size)

    @jax.jit
    def look_up(weights, contexts):
        rows = jnp.broadcast_to(tokens, (len(contexts), config.vocab_size))
        return log_probabilities(weights, config, contexts_of(weights, config, contexts), rows)

    logp = np.asarray(look_up(jax.tree.map(jnp.asarray, weights), jnp.asarray(contexts, jnp.int32)))
    assert np.isfinite(logp).all()
    return np.exp(logp.astype(np.float64))


def test_probabilities_are_those_counted_by_hand():
    """a b a b c: bigrams ab twice, ba and bc once; before a stand b and the beginning, before b a, before c b.

    Both discounts are 2 / (2 + 2 * 1) = 1/2. Single tokens: a (2 - 1/2) / 4 + 1/2 * 3/4 * 1/3 = 1/2, b and c 1/4.
    """
    config, weights = made([([A, B, A, B, C], [True] * 5)], 2, 3)
    assert (config.num_nodes, config.most_children) == (3 + 3, 2)
    found = probabilities(config, weights, [[NO_TOKEN], [A], [B], [C]])
    wanted = [
        [1 / 2, 1 / 4, 1 / 4],
        [1 / 4 * 1 / 2, 3 / 4 + 1 / 4 * 1 / 4, 1 / 4 * 1 / 4],
        [1 / 4 + 1 / 2 * 1 / 2, 1 / 2 * 1 / 4, 1 / 4 + 1 / 2 * 1 / 4],
        [1 / 2, 1 / 4, 1 / 4],
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def some_documents(seed: int, vocab_size: int, num: int = 4):
    """Prompts that are not counted before responses that are; some documents are shorter than an n-gram."""
    rng = np.random.default_rng(seed)
    lengths = [1, 2, *rng.integers(5, 30, num)]
    documents = [rng.integers(0, vocab_size, n) for n in lengths]
    return [(ids.tolist(), (np.arange(len(ids)) >= rng.integers(0, 4)).tolist()) for ids in documents]


@pytest.mark.parametrize("order", [2, 3, 4])
def test_probabilities_are_those_of_the_oracle(order):
    """After every context that there is, seen or not; each is a distribution without a zero."""
    vocab_size, documents = 4, some_documents(order, 4)
    oracle, (config, weights) = Ngrams(documents, order, vocab_size), made(documents, order, vocab_size)
    contexts = [
        [*[NO_TOKEN] * (order - 1 - n), *tokens]
        for n in range(order)
        for tokens in itertools.product(range(vocab_size), repeat=n)
    ]
    found = probabilities(config, weights, contexts)
    for context, row in zip(contexts, found, strict=True):
        known = tuple(token for token in context if token != NO_TOKEN)
        wanted = [oracle.p(token, known) for token in range(vocab_size)]
        assert sum(wanted) == 1
        np.testing.assert_allclose(row, [float(p) for p in wanted], rtol=1e-5)


def test_files_hold_what_was_written(tmp_path):
    config, weights = made(some_documents(3, 6), 3, 6)
    save_ngram(tmp_path, config, weights)
    found, read = read_ngram(tmp_path)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, read, weights)
    (tmp_path / "ngram.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="ngram"):
        read_ngram(tmp_path)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match=r"order=9: .*8"):
        made(some_documents(0, 4), 9, 4)
    with pytest.raises(ValueError, match="none"):
        made([([1, 2], [False, False])], 2, 4)
