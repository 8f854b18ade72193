"""The feature drafter: its trees against a beam in plain loops that computes every path anew.

That its cache holds what fresh passes compute is in `test_hidden.py`, the equality of texts in `test_exact.py`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import tree as oracle
from support import calls, setups, toy

from hsd_jax.infer.levels import inverse_temperature
from hsd_jax.infer.round import root_of
from hsd_jax.models.target import causal_mask
from hsd_jax.models.trunk import base_logits, embed_committed, trunk_features, trunk_pass
from hsd_jax.types import DrawScheme

LOUD = 10
"""A factor by which the layer's outputs grow, which are small in the toy drafter."""
ROOM = 64
"""Places of every text and path, so that texts of all lengths share a program; what lies behind is not seen."""


@functools.partial(jax.jit, static_argnums=(2, 3))
def causal_trunk(drafter, target, config, target_config, states, following):
    """The trunk over a whole row under a causal mask: no cache, no tree; and the logits behind every position."""
    batch, num = following.shape
    positions = jnp.broadcast_to(jnp.arange(num), (batch, num))
    embeddings = embed_committed(target, target_config, config, following)
    out, _ = trunk_pass(drafter, config, states, embeddings, positions, causal_mask(batch, num), None)
    return out, base_logits(drafter, config, target, target_config, out)


def remembering(models: dict) -> dict:
    """The models with a drafter that keeps half of the state before, which the toy drafter forgets, and whose layer is
    loud. So a draft depends on all its ancestors."""
    changed = jax.tree.map(lambda x: x, models)
    trunk = changed["drafter"]["trunk"]
    kernel = trunk["pair_in"]["kernel"]
    trunk["pair_in"]["kernel"] = kernel.at[:, : len(kernel)].multiply(0.5)
    for module, name in (("attn", "o"), ("mlp", "down")):
        trunk["layer_0"][module][name]["kernel"] *= LOUD
    return changed


def logits_of_paths(setup: setups.Setup, models: dict, text: np.ndarray):
    """`logits(path)` behind a path of drafted tokens that starts with the last token of `text`.

    EAGLE step by step: feature i and token i + 1 give the next state; behind the text the state before takes the place
    of the feature. Every path is computed from its beginning.
    """
    config = setup.drafter_config
    target, drafter = models["target"], models["drafter"]
    padded = np.pad(text, (0, ROOM - len(text)))[None]
    fresh = toy.causal_pass(target, setup.config, jnp.asarray(padded), feature_layers=config.feature_layers)
    features = np.asarray(trunk_features(drafter, config, fresh.hidden, fresh.features))[0]
    known = len(text) - 1  # features in use: that of the last token is not known to a drafter

    def logits(path: tuple[int, ...]) -> np.ndarray:
        states = np.zeros((1, ROOM, features.shape[-1]), np.float32)
        states[0, :known] = features[:known]
        following = np.zeros((1, ROOM), np.int32)
        following[0, : len(text) - 1 + len(path) - 1] = [*text[1:], *path[1:]]
        for step in range(len(path)):
            last = known - 1 + step
            passed = causal_trunk(drafter, target, config, setup.config, jnp.asarray(states), jnp.asarray(following))
            out, found = map(np.asarray, passed)
            states[0, last + 1] = out[0, last]
        return np.float64(found[0, last])

    return logits


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["eagle", pytest.param("eagle_layers", marks=pytest.mark.slow)])
def test_trees_are_those_of_a_beam_that_computes_every_path(proposer):
    """Mid-text, with pending features of several lengths; two levels and more make ancestors matter."""
    setup, call = setups.setup("llama", proposer, DrawScheme.ARBITRARY), calls.mixed_call()
    tree, models = setups.TREES[proposer], remembering(setup.models)
    state, pending = call.start(setup.decoder, models), np.zeros(0, int)
    while len(set(pending)) < 2:  # there are such rounds, or the loop would end with rows that are done
        state = call.resume(setup.decoder, models, state, 1)
        assert not bool(state.done.all())
        pending = np.asarray(state.drafter.num_pending)
        pending = pending[pending > 0]
    sampling = call.arrays()[-1]
    root, _ = root_of(state)
    scale = np.asarray(inverse_temperature(sampling.temperature, DrawScheme.ARBITRARY))
    drafted, _ = setups.draft(setup, state, sampling, models=models)
    for row in np.flatnonzero(np.asarray(state.drafter.num_pending))[:3]:
        text = np.asarray(state.tokens)[row, : int(state.length[row])]
        of_path = logits_of_paths(setup, models, text)
        scaled = lambda path, s=scale[row], of_path=of_path: s * of_path(path)  # noqa: E731
        wanted = oracle.grow_paths(scaled, int(root[row]), tree.nodes, tree.depth, tree.width)
        found = [np.asarray(x)[row].tolist() for x in (drafted.tokens, drafted.parents, drafted.depth)]
        assert found == [list(x) for x in wanted]
