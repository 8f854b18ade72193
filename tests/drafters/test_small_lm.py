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
from support.tiny_pairs import FEW, FEW_SLOTS

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.small_lm.draft import small_lm_drafter
from hsd_jax.infer.accept import recursive_rule
from hsd_jax.infer.decode import Decoder
from hsd_jax.infer.step import make_step
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import find
from hsd_jax.params import default_tree, with_drafter
from hsd_jax.types import DrawScheme, RoundInputs

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
        for found, wanted in zip(
            (*drafter.cache.keys, *drafter.cache.values), (*fresh.keys, *fresh.values), strict=True
        ):
            if not np.allclose(found[row, :, :cached], wanted[row, :, :cached], rtol=1e-4, atol=1e-5):
                return f"cache, row {row}"
        count = int(drafter.num_pending[row])
        if drafter.pending[row, :count].tolist() != state.tokens[row, cached : length[row]].tolist():
            return f"pending tokens, row {row}"
    return None


@pytest.mark.parametrize(
    ("proposer", "wanted"),
    [
        ("small_lm", {1, 2}),
        ("small_lm_branching", {1, 2, 3, 4}),
    ],
)
def test_the_cache_is_consistent_after_every_round(proposer, wanted):
    """Whatever was refused, through growing buckets, and for finished rows that are carried along."""
    setup, call = setups.setup("llama", proposer), calls.mixed_call()
    state = call.start(setup.decoder, setup.models, capacity=calls.OUTGROWN)
    assert find_stale_slot(setup, state) is None
    pending = set()
    while not bool(state.done.all()):
        state = call.resume(setup.decoder, setup.models, state, 1)
        assert find_stale_slot(setup, state) is None
        pending |= set(np.asarray(state.drafter.num_pending).tolist())
    histogram = np.asarray(state.stats.accepted_histogram).sum(0)
    assert (histogram > 0).all(), histogram
    assert pending == wanted  # of a tree all that a round committed


# --- what it drafts, and what becomes of it ---------------------------------------------------------------------------

VOCAB, ROWS, FALSE_ALARM = 5, 4096, 1e-6


def rolled(distribution: np.ndarray) -> np.ndarray:
    """A Markov table whose row a is `scheme` moved by a: every node has these probabilities."""
    return np.stack([np.roll(distribution, a) for a in range(len(distribution))])


def markov_decoder(target: np.ndarray, draft: np.ndarray):
    """The decoder of two Markov models with these logits, whose chains are drawn, and their weights."""
    config, weights = toy.markov_target(target)
    _, small = toy.markov_target(draft)
    tree = TreeConfig(DEPTH + 1, DEPTH, 1)
    drafter = small_lm_drafter(config, SmallLMConfig(**vars(config)), tree, scheme=DrawScheme.WITHOUT_REPLACEMENT)
    step = make_step(config, drafter, recursive_rule(DEPTH, 1))
    decoder = Decoder(config, step, drafter, precision="highest", use_native=False)
    return decoder, {"target": weights, "drafter": small}


def call_of(temperature: float, rows: int) -> calls.Call:
    prompts = [np.array([row % VOCAB, (row // VOCAB) % VOCAB], np.int32) for row in range(rows)]
    return calls.Call(prompts, [20] * rows, [temperature] * rows, [0] * rows, [1.0] * rows, list(range(rows)), **FEW)


def test_a_tree_has_the_likeliest_children_of_every_node():
    """Of a model that attends: behind each path, what one causal pass over the text and that path says."""
    setup, call = setups.setup("llama", "small_lm_branching"), calls.mixed_call()
    drafter = small_lm_drafter(setup.config, setup.drafter_config, setups.BRANCHING)
    state = call.start(setup.decoder, setup.models, capacity=calls.OUTGROWN)
    state = call.resume(setup.decoder, setup.models, state, 2)
    _, _, keys, _, sampling = call.arrays()
    length = np.asarray(state.length)
    root = jnp.asarray(np.asarray(state.tokens)[np.arange(call.batch), length - 1])
    tree, _ = jax.jit(drafter.draft)(setup.models, state.drafter, RoundInputs(root, state.length - 1, keys, sampling))
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


def test_acceptance_is_that_of_speculative_sampling():
    """Two tables of one overlap at every node: accepted counts are geometric, in the first rounds and in later ones.

    Three chi-squares, each of which fires falsely once in 10^6.
    """
    p, q = np.random.default_rng(1).dirichlet(np.ones(VOCAB), 2)
    decoder, models = markov_decoder(np.log(rolled(p)), np.log(rolled(q)))
    call = call_of(1.0, ROWS)
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
