"""The block drafter: its heads against plain loops, its static tree, and the one feature it keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import coupled as coupled_oracle
from oracles import heads as oracle
from oracles.tree import paths_of
from support import calls, setups, toy

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.medusa import FIRST_RANK, NEXT_RANK, static_tree
from hsd_jax.drafters.table import init_drafter
from hsd_jax.infer.sampling import position_noise
from hsd_jax.models.target import forward_sequence


@pytest.mark.parametrize("shape", [(16, 3, 6), (5, 4, 1), (40, 4, 8)])
def test_the_static_tree_is_the_likeliest(shape):
    config = TreeConfig(*shape)
    tree = static_tree(config)
    paths = [path[1:] for path in paths_of(tree.ranks, tree.parents)]
    assert set(paths[1:]) == oracle.static_tree(*shape, FIRST_RANK, NEXT_RANK)
    assert [len(path) for path in paths] == tree.depths.tolist()
    assert (tree.parents[1:] < np.arange(1, config.nodes)).all()


def head_logits(setup: setups.Setup, feature: np.ndarray, head: int) -> np.ndarray:
    """Logits of one head in float64: residual block, norm, the target's head (tied, without softcap)."""
    models = jax.tree.map(lambda x: np.asarray(x, np.float64), setup.models)
    drafter, width = models["drafter"], len(feature)
    rows = slice(head * width, (head + 1) * width)
    x = drafter["heads"]["kernel"][rows] @ feature + drafter["heads"]["bias"][rows]
    state = feature + x / (1 + np.exp(-x))
    normed = state / np.sqrt((state**2).mean() + setup.drafter_config.norm_eps)
    return models["target"]["embedding"] @ (normed * drafter["output_norm"]["weight"])


def test_drafts_are_the_best_guesses_of_each_head():
    """After every round the feature is that of the last token but one; finished rows keep theirs.

    Coupled guesses are in the order of log q + g; filters would leave fewer than a tree asks for.
    """
    setup, call = setups.setup("llama", "medusa"), calls.mixed_call().replace(top_k=[0] * 6, top_p=[1.0] * 6)
    shape = static_tree(setups.TREES["medusa"])
    state = call.start(setup.decoder, setup.models)
    noise_at = jax.jit(position_noise, static_argnums=2)
    target_pass = jax.jit(lambda tokens: forward_sequence(setup.models["target"], setup.config, tokens).hidden)
    _, _, keys, _, sampling = call.arrays()
    for _ in range(3):
        hidden = np.asarray(target_pass(jnp.maximum(state.tokens, 0)))
        position = np.asarray(state.length) - 1
        root = jnp.take_along_axis(state.tokens, position[:, None], 1)[:, 0]
        tree, _ = setups.draft(setup, state, sampling)
        for row in np.flatnonzero(position >= 1):
            feature = hidden[row, position[row] - 1]
            np.testing.assert_allclose(state.drafter.feature[row], feature, rtol=1e-4, atol=1e-5)
            logits = [head_logits(setup, np.float64(feature), k) for k in range(setups.TREES["medusa"].depth)]
            places = position[:, None] + 1 + np.arange(len(logits), dtype=np.int32)
            noise = np.asarray(noise_at(keys, jnp.asarray(places), toy.VOCAB))[row]
            setting = call.temperature[row], None, None
            pairs = zip(logits, noise, strict=True)
            best = [np.argsort(-coupled_oracle.scores(x, g, setting, None, toy.VOCAB)) for x, g in pairs]
            wanted = [best[d - 1][r] for d, r in zip(shape.depths[1:], shape.ranks[1:], strict=True)]
            assert tree.tokens[row].tolist() == [int(root[row]), *wanted]
        state = call.resume(setup.decoder, setup.models, state, 1)


def test_untrained_heads_say_what_the_feature_says():
    """Zero weights: every head starts as the target's own head on its own feature."""
    config = setups.setup("llama", "medusa").drafter_config
    weights = init_drafter(jax.random.key(0), config)
    assert config.kind == "medusa" and not any(np.asarray(x).any() for x in jax.tree.leaves(weights["heads"]))
    assert set(weights) == {"heads", "output_norm"}
