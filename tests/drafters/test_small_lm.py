"""A small language model as drafter: its cache after any refusal, its trees, and the distribution of what is
accepted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import branching as branching_oracle
from oracles import chain as oracle
from scipy import stats
from support import calls, setups, toy
from support.tiny_pairs import FEW_SLOTS, decoder_of, many_rows

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.drafters.table import make_drafter
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.pair import default_tree, with_drafter

DEPTH = setups.TREES["chain"].depth

# --- the cache --------------------------------------------------------------------------------------------------------


def find_stale_slot(setup: setups.Setup, state) -> str | None:
    """Where cache or pending tokens are not what one causal pass over the committed text gives, or None."""
    state = jax.tree.map(np.asarray, state.replace(keys=None))  # so that no slice of any length is compiled
    drafter, length = state.drafter, state.length
    np.testing.assert_array_equal(drafter.cache.length + drafter.num_pending, length)
    assert drafter.num_pending.min() >= 1 and drafter.num_pending.max() <= drafter.pending.shape[1]
    fresh = toy.causal_pass(setup.models["drafter"], setup.config, np.maximum(state.tokens, 0)).new_kv
    fresh = jax.tree.map(np.asarray, fresh)
    for row, cached in enumerate(drafter.cache.length):
        if not setups.is_cached(drafter.cache, row, fresh):
            return f"cache, row {row}"
        count = int(drafter.num_pending[row])
        if drafter.pending[row, :count].tolist() != state.tokens[row, cached : length[row]].tolist():
            return f"pending tokens, row {row}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("proposer", "wanted"), [("small_lm", {1, 2}), ("small_lm_branching", {1, 2, 3, 4})])
def test_the_cache_is_consistent_after_every_round(proposer, wanted):
    """Whatever was refused, through growing buckets, and for finished rows that are carried along."""
    setup, pending = setups.setup("llama", proposer), set()
    for state in setup.rounds(calls.OUTGROWN):
        assert find_stale_slot(setup, state) is None
        pending |= set(np.asarray(state.drafter.num_pending).tolist())
    histogram = np.asarray(state.stats.accepted_histogram).sum(0)
    assert (histogram > 0).all(), histogram
    assert pending == wanted  # of a tree all that a round committed


# --- what it drafts, and what becomes of it ---------------------------------------------------------------------------

VOCAB, ROWS, FALSE_ALARM = 5, 4096, 1e-6


def test_a_tree_has_the_likeliest_children_of_every_node():
    """Of a model that attends: behind each path, what one causal pass over the text and that path says."""
    setup, call = setups.setup("llama", "small_lm_branching"), calls.mixed_call()
    drafter = make_drafter(setup.config, setup.drafter_config, setups.BRANCHING)
    state = setup.after(2, calls.OUTGROWN)
    tree, _ = setups.draft(setup, state, call.arrays()[-1], drafter)
    length = np.asarray(state.length)
    layout = branching_oracle.layout((3, 2, 1))
    texts = np.zeros((len(layout.parents), 60), np.int32)
    row = 3  # sampled: an arbitrary tree reads no noise
    for node, (parent, depth) in enumerate(zip(layout.parents, layout.depths, strict=True)):
        if parent >= 0:
            texts[node] = texts[parent]
        else:
            texts[node, : length[row]] = state.tokens[row, : length[row]]
        texts[node, length[row] - 1 + depth] = tree.tokens[row, node]
    logits = np.asarray(toy.causal_pass(setup.models["drafter"], setup.config, jnp.asarray(texts)).logits)
    for node, (parent, rank) in enumerate(zip(layout.parents, layout.ranks, strict=True)):
        if parent >= 0:
            behind = logits[parent, length[row] - 1 + layout.depths[parent]]
            assert int(tree.tokens[row, node]) == np.argsort(-behind, kind="stable")[rank]


@pytest.mark.slow
def test_acceptance_is_that_of_speculative_sampling():
    """Two tables of one overlap at every node: accepted counts are geometric, in the first rounds and in later ones.

    Three chi-squares, each of which fires falsely once in 10^6.
    """
    p, q = np.random.default_rng(1).dirichlet(np.ones(VOCAB), 2)
    (config, target), (_, small) = (toy.markov_target(np.log(toy.rolled(x))) for x in (p, q))
    decoder = decoder_of(config, SmallLMConfig(**vars(config)), TreeConfig.chain(DEPTH))
    models, call = {"target": target, "drafter": small}, many_rows(rows=ROWS, new_tokens=20)
    distribution = oracle.accepted_distribution(p, q, DEPTH)
    state, before = call.start(decoder, models, FEW_SLOTS), 0
    for _ in range(3):
        state = call.resume(decoder, models, state, 1)
        histogram = np.asarray(state.stats.accepted_histogram).sum(0)
        assert stats.chisquare(histogram - before, ROWS * distribution).pvalue > FALSE_ALARM
        before = histogram


# --- folders ----------------------------------------------------------------------------------------------------------


def test_any_target_folder_of_the_same_vocabulary_drafts(tmp_path):
    """Also one with a head of its own, which is not taken for the rows of a reduced draft vocabulary."""
    config, weights = toy.target_config(), setups.weights("llama")
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24}
    small_config = toy.target_config(**sizes, tie_embeddings=False)
    convert.save_target(tmp_path / "target", config, weights)
    convert.save_target(tmp_path / "small", small_config, toy.make_target(small_config))
    params = hsd_jax.load(target=tmp_path / "target", drafter=tmp_path / "small", precision="exact")
    assert isinstance(params.drafter_config, SmallLMConfig) and default_tree(params.drafter_config) == TreeConfig(
        5, 4, 1
    )
    prompts, settings = [[3, 1, 4], [1, 5]], {"max_new_tokens": 20, "temperature": [0.0, 0.9]}
    head = find(tmp_path / "small").weights()["head"]
    for own in (params, with_drafter(params, tmp_path / "small")):
        np.testing.assert_array_equal(own.drafter["head"], head)
    plain = hsd_jax.decode(params, prompts, speculate=False, **settings)
    for drafter in (tmp_path / "small", "lookup:2"):
        params = hsd_jax.load(target=tmp_path / "target", drafter=drafter, precision="exact")
        found = hsd_jax.decode(params, prompts, **settings)
        np.testing.assert_array_equal(found.tokens, plain.tokens)
