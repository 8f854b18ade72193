"""Rescored beams cost what their arcs cost: against the form that scans the vocabulary, and counted in the program.

What the trees should be is shown by enumeration in `test_rescored.py`.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.rescored.draft import ArcExpander, weighed
from hsd_jax.drafters.rescored.scorers import ngram_scorer
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.tree import Grower, token_free
from hsd_jax.kernels import ops
from hsd_jax.models.draft_vocab import draft_columns, to_tokens
from hsd_jax.train.ngram import make_ngram
from hsd_jax.types import DraftTree, DrawScheme, Inject, RoundInputs, SamplingParams

slow = pytest.mark.slow
VOCAB, DEPTH, ARCS, BATCH = 300, 3, 16, 6
BEAM = TreeConfig(nodes=13, depth=DEPTH, width=4)
TREES = {"beam": BEAM, "chain": TreeConfig.chain(DEPTH), "branching": TreeConfig(branching=(3, 2, 1))}
HOT = np.flatnonzero(np.arange(VOCAB) % 3 != 1).astype(np.int32)
FILTERED = 4
"""The first of the rows with top-k and top-p."""


@functools.cache
def counted() -> tuple[Any, Any]:
    """A 2-gram model of texts that repeat themselves, with its alpha."""
    rng = np.random.default_rng(5)
    texts = (rng.integers(0, VOCAB, (40, 60)) ** 2 // VOCAB).astype(np.int32)
    config, weights = make_ngram([(text, np.ones(60, bool)) for text in texts], 2, VOCAB, "0" * 64)
    return config, {name: jnp.asarray(value) for name, value in weights.items()} | {"alpha": jnp.full(1, 0.7)}


def over_all(lattice: ArcExpander, base: Any, inject: Inject | None, scorer: Any, weights: Any):
    """An `Expand` of the whole vocabulary, -inf but for arcs, which every node chooses for itself at every level."""
    whole, hot = token_free(base, inject), lattice.draft_to_target

    def expand(level: int, tokens: Any, parents: Any, carry: Any):
        own, others = carry
        logits, own = whole(level, tokens, parents, own)
        ranked = logits
        if lattice.noise is not None:
            noise = draft_columns(hot, lattice.noise[:, level, None])
            ranked = sampling_lib.perturb(noise, logits, lattice.sampling)
        _, columns, _ = ops.top_k(ranked, lattice.num_arcs)
        best = jnp.take_along_axis(logits, columns, 2)
        scores, others = scorer.score(weights, level, tokens, parents, to_tokens(hot, columns), others)
        row, node = jnp.ogrid[: logits.shape[0], : logits.shape[1]]
        kept = jnp.full(logits.shape, -jnp.inf).at[row[..., None], node[..., None], columns]
        return kept.set(best + weights["alpha"] * scores), (own, others)

    return expand


def inputs_of(seed: int) -> RoundInputs:
    """Two greedy rows, two at temperature 1 and 0.6, two that are filtered."""
    temperature, top_k = jnp.float32([0, 0, 1, 0.6, 0.8, 1]), jnp.int32([0, 0, 0, 0, 1, 0])
    sampling = SamplingParams(temperature, top_k, jnp.float32([1, 1, 1, 1, 1, 0.7]))
    rng = np.random.default_rng(seed)
    root, position = (jnp.asarray(rng.integers(0, VOCAB, BATCH), jnp.int32) for _ in range(2))
    return RoundInputs(root, position, sampling_lib.row_keys([(seed, i) for i in range(BATCH)]), sampling)


def grower_of(shape: str, scheme: DrawScheme, is_hot: bool, has_injector: bool, sees_all: bool):
    """Trees of base logits [B, D, C], and of a table [V, C] where drafted tokens add something."""
    config, weights = counted()
    scorer, hot = ngram_scorer(config), jnp.asarray(HOT) if is_hot else None

    def grow(base, table, inputs: RoundInputs) -> DraftTree:
        begun, _ = scorer.root_carry(weights, inputs.root[:, None])
        inject = toy.of_tokens(lambda tokens: table[tokens]) if has_injector else None
        noise = None
        if scheme is DrawScheme.COUPLED:
            noise = sampling_lib.round_noise(inputs.keys, inputs.position, DEPTH, VOCAB, inputs.sampling)
        lattice = ArcExpander(ARCS, hot, inputs.sampling, noise)
        if sees_all:
            expand = over_all(lattice, base, inject, scorer, weights)
        else:
            expand = weighed(lattice.expand(base, inject), scorer, weights)
        grower = Grower(TREES[shape], scheme, VOCAB)
        return grower.grow(expand, (None, begun), inputs, hot if sees_all else None)[0]

    return grow


def numbers(seed: int, is_hot: bool):
    rng, num = np.random.default_rng(seed), len(HOT) if is_hot else VOCAB
    shapes = (BATCH, DEPTH, num), (VOCAB, num)
    base, table = (jnp.asarray(rng.normal(0, 2, shape), jnp.float32) for shape in shapes)
    return jnp.round(base, 1) if seed % 2 else base, table  # rounded: many arcs are equally likely


LATTICES = itertools.product(
    ("beam", "chain", "branching"),
    (DrawScheme.ARBITRARY, DrawScheme.COUPLED, DrawScheme.WITHOUT_REPLACEMENT),
    (False, True),
    (False, True),
)


def is_quick(shape: str, scheme: DrawScheme, is_hot: bool, has_injector: bool) -> bool:
    """Beams that go through every part of each scheme."""
    return shape == "beam" and is_hot and has_injector


@pytest.mark.parametrize(
    ("shape", "scheme", "is_hot", "has_injector"),
    [pytest.param(*case, marks=[slow] * (not is_quick(*case))) for case in LATTICES],
)
def test_trees_are_those_of_a_scan_of_the_vocabulary(shape, scheme, is_hot, has_injector):
    """Nodes to the bit; scores but for the order in which 16 numbers are summed. Nodes that the filters of a row leave
    no token for, score -inf, hold arcs in place of the first tokens of the vocabulary."""
    both = (grower_of(shape, scheme, is_hot, has_injector, sees_all) for sees_all in (False, True))
    of_arcs, of_all = (jax.jit(grow) for grow in both)
    for seed in range(4):
        given = *numbers(seed, is_hot), inputs_of(seed)
        found, wanted = of_arcs(*given), of_all(*given)
        for name in ("parents", "depth", "valid"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
        if scheme is DrawScheme.WITHOUT_REPLACEMENT:
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
            continue
        np.testing.assert_allclose(found.score, wanted.score, rtol=1e-5, atol=1e-5)
        has_token = np.asarray(wanted.score) > -np.inf
        np.testing.assert_array_equal(np.asarray(found.tokens)[has_token], np.asarray(wanted.tokens)[has_token])
        assert has_token[:FILTERED].all()
        assert has_token[FILTERED].all() == (scheme is DrawScheme.ARBITRARY or shape == "chain")
