"""The hidden-state drafter: what its trunk may read, and that both caches hold what a fresh pass computes.

Checks 1, 3 and 4 of methods.md 1.9; the equality of texts (check 6) is `test_exact.py`. The cache checks run under
the oracle's trees ("steered"), so that every number of accepted tokens goes through commit and pending features.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import calls, setups, toy

from hsd_jax.config import RECURRENT
from hsd_jax.drafters.trunk_state import trunk_states
from hsd_jax.kernels.ops import rms_norm
from hsd_jax.models.target import causal_mask, forward_sequence
from hsd_jax.models.trunk import trunk_features, trunk_pass

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@functools.cache
def jitted_states(proposer: str = "beam", num_states: int = setups.TREES["beam"].depth, window: int | None = None):
    """The trunk alone: `num_states` states of a round, and the cache it leaves."""
    setup = setups.setup("llama", proposer)
    config = dataclasses.replace(setup.drafter_config, window=window)
    return jax.jit(lambda models, state: trunk_states(models, setup.config, config, num_states, state))


@pytest.mark.parametrize("window", [None, 8])
def test_states_are_those_of_one_long_causal_pass(window):
    """The recurrence with caches against the same recurrence without: one pass a step over all there is so far.

    Behind a window a round reads a part of its cache, whose slots are not their positions.
    """
    setup = setups.setup("llama", "beam")
    models, state = setup.models, setup.after(3)
    assert (np.asarray(state.drafter.cache.length) > 8).any()
    states, _ = jitted_states(window=window)(models, state.drafter)
    config = dataclasses.replace(setup.drafter_config, window=window)
    target, drafter = models["target"], models["drafter"]
    tokens = jnp.maximum(state.tokens, 0)
    hidden = toy.causal_pass(target, setup.config, tokens).hidden
    embeddings = target["embedding"][jnp.roll(tokens, -1, 1)] * setup.config.embed_scale
    inputs = trunk_inputs(drafter, config, hidden, embeddings)
    blocks = jax.jit(lambda x: plain_trunk(drafter, config, x))
    row = np.flatnonzero(state.drafter.num_pending)  # a finished row keeps its query
    known = np.asarray(state.length)[row] - 1  # features of all committed tokens but the last
    assert len(row) == 6
    for step in range(states.shape[1]):
        out = blocks(inputs)[row, known - 1 + step]
        np.testing.assert_allclose(states[row, step], out, rtol=1e-3, atol=1e-4)
        inputs = inputs.at[row, known + step].set(trunk_inputs(drafter, config, out, None))


def test_slots_are_those_of_one_long_causal_pass():
    """The parallel trunk with a cache against one pass over features and slots in a row, masked by nothing but
    order."""
    setup = setups.setup("llama", "block")
    models, state = setup.models, setup.after(3)
    states, _ = jitted_states("block")(models, state.drafter)
    target, drafter, config = models["target"], models["drafter"], setup.drafter_config
    tokens = jnp.maximum(state.tokens, 0)
    hidden = toy.causal_pass(target, setup.config, tokens).hidden
    embeddings = target["embedding"][jnp.roll(tokens, -1, 1)] * setup.config.embed_scale
    inputs = trunk_inputs(drafter, config, hidden, embeddings)
    row = np.flatnonzero(state.drafter.num_pending)
    last = np.asarray(state.length)[row] - 2  # the feature of the last committed token but one
    num_states = states.shape[1]
    for depth in range(1, num_states):
        inputs = inputs.at[row, last + depth].set(inputs[row, last] + drafter["trunk"]["slots"][depth - 1])
    out = jax.jit(lambda x: plain_trunk(drafter, config, x))(inputs)
    for depth in range(num_states):
        np.testing.assert_allclose(states[row, depth], out[row, last + depth], rtol=1e-3, atol=1e-4)


def trunk_inputs(drafter, config, states, embeddings):
    """What the trunk's first layer reads: states plus embeddings, or plus the vector that says there is none."""
    trunk = drafter["trunk"]
    if embeddings is None:
        return states + trunk["no_token"]
    normed = rms_norm(embeddings, trunk["embedding_norm"]["weight"], config.norm_eps)
    return states + normed @ trunk["embedding_in"]["kernel"].T


def plain_trunk(drafter, config, x):
    """The blocks of the trunk over whole rows under a causal mask, fed with inputs that are summed already."""
    bare = dataclasses.replace(config, committed_embeddings=False, trunk=RECURRENT)
    weights = {"trunk": {k: v for k, v in drafter["trunk"].items() if k.startswith("layer_")}}
    batch, num = x.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(num), (batch, num))
    return trunk_pass(weights, bare, x, None, positions, causal_mask(batch, num), None)[0]


# --- caches -----------------------------------------------------------------------------------------------------------


def assert_lengths(state) -> None:
    """Both caches stand one token behind the text, the trunk's with its pending features."""
    np.testing.assert_array_equal(state.cache.length, state.length - 1)
    np.testing.assert_array_equal(state.drafter.cache.length + state.drafter.num_pending, state.length - 1)


@functools.partial(jax.jit, static_argnums=(2, 3))
def fresh_passes(target, drafter, target_config, config, tokens):
    """Entries of target and trunk for whole rows, the trunk's features, and the token behind each of them."""
    batch, num = tokens.shape
    fresh = forward_sequence(target, target_config, tokens, feature_layers=config.feature_layers)
    features = trunk_features(drafter, config, fresh.hidden, fresh.features)
    following = jnp.roll(tokens, -1, 1)
    embeddings = target["embedding"][following] * target_config.embed_scale
    positions = jnp.broadcast_to(jnp.arange(num), (batch, num))
    _, trunk = trunk_pass(drafter, config, features, embeddings, positions, causal_mask(batch, num), None)
    return fresh.new_kv, trunk, features, following


def find_stale_slot(setup: setups.Setup, state) -> str | None:
    """Where a cache or a pending feature is not what one fresh causal pass over the text gives, or None."""
    models, tokens = setup.models, jnp.maximum(state.tokens, 0)
    found = fresh_passes(models["target"], models["drafter"], setup.config, setup.drafter_config, tokens)
    target, trunk, features, following = jax.tree.map(np.asarray, found)
    state = jax.tree.map(np.asarray, state.replace(keys=None))  # so that no slice of any length is compiled
    for row in range(len(tokens)):
        for name, cache, wanted in (("target", state.cache, target), ("trunk", state.drafter.cache, trunk)):
            if not setups.is_cached(cache, row, wanted):
                return f"{name}, row {row}"
        first, count = int(state.drafter.cache.length[row]), int(state.drafter.num_pending[row])
        place = slice(first, first + count)
        if not np.allclose(state.drafter.pending[row, :count], features[row, place], **TOLERANCE):
            return f"pending features, row {row}"
        if state.drafter.next_tokens[row, :count].tolist() != following[row, place].tolist():
            return f"tokens behind the pending features, row {row}"
    return None


@pytest.mark.parametrize(
    ("variant", "proposer"),
    [
        ("llama", "steered"),
        pytest.param("llama", "steered_block_skip", marks=pytest.mark.slow),
        pytest.param("llama", "steered_eagle", marks=pytest.mark.slow),
        pytest.param("llama", "layers", marks=pytest.mark.slow),
        pytest.param("llama", "eagle_layers", marks=pytest.mark.slow),
        pytest.param("gemma", "steered_block", marks=pytest.mark.slow),
        pytest.param("llama", "steered_skip", marks=pytest.mark.slow),
        pytest.param("llama", "steered_ahead", marks=pytest.mark.slow),
    ],
)
def test_caches_hold_what_fresh_passes_compute(variant, proposer):
    """After prefill and after every round, until all rows are done and have been carried along for some rounds.

    Caches grow on the way; under SKIP a trunk run writes more slots than a tree is deep. Drafters that read fused
    layers have their own trees: prefill and every round tap these layers.
    """
    setup, rounds = setups.setup(variant, proposer), 0
    for rounds, state in enumerate(setup.rounds(calls.OUTGROWN)):
        assert_lengths(state)
        if rounds in (0, 1, 2, 5) or bool(state.done.all()):
            assert find_stale_slot(setup, state) is None
    assert rounds > 6
    histogram = np.asarray(state.stats.accepted_histogram).sum(0)
    assert (histogram > 0).all() or setups.PROPOSERS[proposer].oracle is None, histogram
    assert state.cache.keys[0].shape[2] == state.drafter.cache.keys[0].shape[2] == calls.GROWN


def test_the_comparison_finds_a_stale_slot():
    """A committed slot of one row is moved a little."""
    setup = setups.setup("llama", "steered")
    state = setup.after(2)
    cache = state.drafter.cache
    keys = cache.keys[0].at[3, 0, int(cache.length[3]) - 1].add(0.01)
    moved = state.drafter.replace(cache=cache.replace(keys=(keys, *cache.keys[1:])))
    assert find_stale_slot(setup, state.replace(drafter=moved)) is not None
