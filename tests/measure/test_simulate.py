"""Simulated tau is the tau of real decoding, round by round, for greedy and for sampled texts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import setups, toy

import hsd_jax
from hsd_jax.config import PARALLEL, TreeConfig
from hsd_jax.measure import simulate
from hsd_jax.measure import texts as texts_lib
from hsd_jax.pair import Params
from hsd_jax.types import DraftTree

TREE = TreeConfig(nodes=6, depth=3, width=2)
PROMPTS = [np.arange(3, 3 + n) % toy.VOCAB for n in (2, 5, 9, 4)]
"""The same in all tests, in batches of two: what decodes and simulates them compiles once."""


def make_params(**changes) -> Params:
    config = setups.VARIANTS["llama"]
    weights = setups.weights("llama")
    drafter_config = toy.drafter_config(config, **changes)
    drafter = toy.make_drafter(drafter_config, config, weights)
    return Params(weights, drafter, config, drafter_config, max_len=128, precision="exact")


@pytest.mark.slow
@pytest.mark.parametrize(
    "temperature, changes, is_hot",
    [
        (1.0, {}, True),
        (0.0, {"trunk": PARALLEL}, False),
        (1.0, {"kind": "eagle"}, False),
        (1.0, {"kind": "medusa"}, True),
    ],
    ids=str,
)
def test_simulated_tau_is_that_of_decoding(temperature, changes, is_hot):
    params = make_params(**changes)
    if is_hot:
        params = hsd_jax.restrict(params, setups.DRAFT_TO_TARGET)
    options = {"max_new_tokens": 24, "temperature": temperature}
    texts = texts_lib.write_texts(params, PROMPTS, seed=5, batch=2, **options)
    found = simulate.simulate(params, texts, TREE, temperature)
    out = hsd_jax.decode(params, PROMPTS, seed=[5, 6, 7, 8], tree=TREE, accept="match", **options)
    assert found["tau"] == pytest.approx(out.stats.tau)
    reached = np.cumsum(out.stats.accepted_histogram[::-1])[::-1]
    np.testing.assert_allclose(found["acceptance"], reached[1:] / np.maximum(reached[:-1], 1))
    assert 1 < found["tau"] < TREE.depth + 1  # else the test would say nothing


def test_a_child_of_a_wrong_node_counts_for_nothing():
    """Text 5 6 7 8; the tree of root 5 holds 6, a wrong 9, and behind the wrong one a 7."""
    tree = DraftTree(
        tokens=jnp.array([[5, 9, 6, 7, 7, 8]]),
        parents=jnp.array([[-1, 0, 0, 1, 2, 4]]),
        depth=jnp.array([[0, 1, 1, 2, 2, 3]]),
        valid=jnp.ones((1, 6), bool),
    )
    text = jnp.array([[5, 6, 7, 8, 0]])
    follow = lambda tree, length: int(simulate.accepted_nodes(tree, text, jnp.array([0]), jnp.array([length]), 3)[0])  # noqa: E731
    assert follow(tree, 4) == 3
    assert follow(tree, 3) == 2  # the text ends
    assert follow(tree.replace(parents=jnp.array([[-1, 0, 0, 1, 1, 4]])), 4) == 1
    assert follow(tree.replace(valid=jnp.array([[True, True, False, True, True, True]])), 4) == 0


def test_a_walk_counts_what_decoding_counts():
    """Prompt of 2, text of 9: rounds of 3 + 1 tokens, 0 + 1, and one cut by the end."""
    texts = texts_lib.Texts(np.zeros((1, 9), np.int32), np.array([2]), np.array([9]), np.zeros(1, np.uint32))
    counts = np.array([[3, 9, 9, 9, 0, 3, 9]])  # at the last token of the prompt and those behind it
    fate = simulate.accepted_along(counts, texts, depth=3)
    assert (fate.num_passes, fate.histogram, fate.tau) == (3, (1, 1, 0, 1), pytest.approx(7 / 3))
    assert fate.acceptance == [pytest.approx(2 / 3), 0.5, 1.0]
    assert fate.rounds == (3,)
