"""Prompt lookup against plain loops, its copy of the context, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import lookup as oracle
from support import calls, setups, toy

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.lookup import LookupConfig, LookupState, copied_chain
from hsd_jax.drafters.table import make_drafter

BATCH, ROOM, DEPTH = 300, 24, 6


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(3, 1), (5, 3)])
def test_drafts_are_those_of_plain_loops(max_ngram, min_ngram):
    """Contexts of 1 to 24 tokens over 2 to 6 values, with anything at all behind their ends."""
    rng = np.random.default_rng(max_ngram)
    length = rng.integers(1, ROOM + 1, BATCH).astype(np.int32)
    tokens = np.array([rng.integers(0, rng.integers(2, 7), ROOM) for _ in range(BATCH)], np.int32)
    config = LookupConfig(max_ngram, min_ngram)
    root = tokens[np.arange(BATCH), length - 1]
    state = LookupState(jnp.asarray(tokens), jnp.asarray(length))
    tree = jax.jit(lambda state, root: copied_chain(state, root, config, DEPTH))(state, jnp.asarray(root))
    seen = set()
    for row in range(BATCH):
        wanted = oracle.draft(tokens[row, : length[row]], max_ngram, min_ngram, DEPTH)
        seen.add(wanted is None)
        assert tree.valid[row].tolist() == [True] + [wanted is not None] * DEPTH
        assert int(tree.tokens[row, 0]) == root[row]
        if wanted is not None:
            assert tree.tokens[row, 1:].tolist() == wanted, tokens[row, : length[row]]
    assert seen == {True, False}
    assert tree.parents[0].tolist() == list(range(-1, DEPTH)) and tree.depth[0].tolist() == list(range(DEPTH + 1))


def test_the_copy_of_the_context_is_the_text():
    """After every round, from caches so small that they grow on the way."""
    for state in setups.setup("llama", "lookup").rounds(calls.OUTGROWN):
        length, copied, tokens = map(np.asarray, (state.length, state.drafter.tokens, state.tokens))
        np.testing.assert_array_equal(state.drafter.length, length)
        for row in np.flatnonzero(~np.asarray(state.done)):
            np.testing.assert_array_equal(copied[row, : length[row]], tokens[row, : length[row]])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("lookup", LookupConfig(3, 1)),
        ("lookup:5", LookupConfig(5, 1)),
        ("lookup:2-4", LookupConfig(4, 2)),
        ("runs/lookup:2", None),
    ],
)
def test_names(text, wanted):
    assert LookupConfig.parse(text) == wanted


def test_only_chains_that_are_not_drawn():
    """Refused before anything compiles, by `decode` too."""
    with pytest.raises(ValueError, match=r"TreeConfig\.width=2: .*1"):
        make_drafter(toy.target_config(), LookupConfig(), TreeConfig(5, 3, 2))
    params = hsd_jax.Params(setups.weights("llama"), {}, toy.target_config(), LookupConfig(), tree=TreeConfig(4, 3, 1))
    with pytest.raises(ValueError, match="arbitrary"):
        hsd_jax.decode(params, [1, 2], accept="recursive")
