"""Draft trees against the oracle's plain loops, and what must hold of every tree."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import tree as oracle
from scipy import stats
from support import toy
from support.trees import assert_well_formed

from hsd_jax.config import TreeConfig
from hsd_jax.infer import levels
from hsd_jax.infer.tree import ancestor_mask
from hsd_jax.types import NO_PARENT, DraftTree, DrawScheme, SamplingParams

VOCAB = 7
CONFIGS = [
    TreeConfig(nodes=2, depth=1, width=1),
    TreeConfig(nodes=5, depth=4, width=1),
    TreeConfig(nodes=12, depth=5, width=3),
    TreeConfig(nodes=20, depth=3, width=VOCAB),
]
IDS = [f"nodes{c.nodes}-depth{c.depth}-width{c.width}" for c in CONFIGS]


mask_of = jax.jit(ancestor_mask, static_argnums=1)


@functools.partial(jax.jit, static_argnums=0)
def grow(config: TreeConfig, base, table, root) -> DraftTree:
    """`table[a]`: bias behind token a."""
    return toy.grow_beam(base, lambda tokens: table[tokens], root, config)


def random_inputs(config: TreeConfig, seed: int, batch: int = 4, scale: float = 2.0):
    rng = np.random.default_rng(seed)
    base = rng.normal(0, scale, (batch, config.depth, VOCAB)).astype(np.float32)
    table, root = rng.normal(0, scale, (VOCAB, VOCAB)).astype(np.float32), rng.integers(0, VOCAB, batch)
    return base, table, root.astype(np.int32)


def find_difference(grow_fn, config: TreeConfig, seed: int) -> str | None:
    """Where a tree and the oracle's differ, or None."""
    base, table, root = random_inputs(config, seed)
    tree = jax.tree.map(np.asarray, grow_fn(config, base, table, root))
    for row in range(len(root)):
        wanted = oracle.grow_beam(
            base[row], lambda token: table[token], int(root[row]), config.nodes, config.depth, config.width
        )
        found = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.depth[row].tolist()
        if found != wanted:
            return f"row {row}: {found} is not {wanted}"
    return None


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_beam_is_that_of_the_oracle(config):
    for seed in range(10):
        assert find_difference(grow, config, seed) is None


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_padding_sees_itself_alone_and_changes_nothing(data):
    num, padding = 6, 3
    parents = [NO_PARENT] + [data.draw(st.integers(0, node - 1)) for node in range(1, num)]
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    wide = jnp.array([[*parents, *[NO_PARENT] * padding]], jnp.int32)
    levels = jnp.array([[*depth, *[0] * padding]], jnp.int32)
    valid = jnp.arange(num + padding)[None] < num
    mask = np.asarray(mask_of(DraftTree(jnp.zeros_like(wide), wide, levels, valid), num - 1))[0]
    np.testing.assert_array_equal(mask[:num, :num], oracle.ancestor_mask(parents))
    np.testing.assert_array_equal(mask[num:, num:], np.eye(padding, dtype=bool))
    assert not mask[:num, num:].any() and not mask[num:, :num].any()


def mutant_without_root_bias(config, base, table, root):
    return grow(config, base, np.roll(table, 1, axis=0), root)


def test_the_comparison_finds_a_mutant():
    assert find_difference(mutant_without_root_bias, CONFIGS[2], 0) is not None


def test_a_beam_is_grown_for_the_temperature_of_its_row():
    """Sharper where the target's draw is surer: each row has the tree of its own scaled logits, temperature 0 of 3."""
    config, temperature = TreeConfig(nodes=7, depth=3, width=3), [0.0, 0.2, 0.5, 1.0, 2.0]
    base, table, root = random_inputs(config, 3, batch=1, scale=1.0)
    rows = len(temperature)
    base, root = np.repeat(base, rows, 0), np.repeat(root, rows)
    none = jnp.zeros(rows, jnp.int32)
    sampling = SamplingParams(jnp.asarray(temperature), none, jnp.ones(rows))
    grown = toy.grow_tree(config, DrawScheme.ARBITRARY, base, table, root, toy.keys_of(none), none, sampling)
    found = [(grown.tokens[row].tolist(), grown.parents[row].tolist()) for row in range(rows)]
    for row, scale in enumerate([3.0, 3.0, 2.0, 1.0, 0.5]):
        wanted = oracle.grow_beam(scale * base[row], lambda t, s=scale: s * table[t], int(root[row]), 7, 3, 3)
        assert found[row] == (wanted[0], wanted[1])
    assert found[0] != found[3] != found[4]


# --- sampled trees ----------------------------------------------------------------------------------------------------

SCHEMES = [DrawScheme.INDEPENDENT, DrawScheme.WITHOUT_REPLACEMENT]
SAMPLED = TreeConfig(nodes=9, depth=3, width=4)  # 4, 3 and 1 nodes a level


ROWS = 40_000


def grow_many(scheme: DrawScheme, temperature: float = 1.0, top_k: int = 0, rows: int = ROWS) -> DraftTree:
    """Trees of one drafter distribution under many keys, the first `rows`; always as many are grown, by one
    compilation."""
    base, table, _ = random_inputs(SAMPLED, 5, batch=1, scale=1.0)
    ints = jnp.full(ROWS, 2, jnp.int32)
    sampling = SamplingParams(jnp.full(ROWS, temperature), jnp.full(ROWS, top_k, jnp.int32), jnp.ones(ROWS))
    base = jnp.broadcast_to(jnp.asarray(base), (ROWS, *base.shape[1:]))
    tree = toy.grow_tree(SAMPLED, scheme, base, table, ints, toy.keys_of(range(ROWS)), ints, sampling)
    return jax.tree.map(lambda x: np.asarray(x)[:rows], tree)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sampled_trees_are_well_formed(scheme):
    """Level by level; distributions stand for all nodes that have children, and are those of the drafter there."""
    tree = grow_many(scheme, temperature=0.7, rows=64)
    mask = np.asarray(mask_of(tree, SAMPLED.depth))
    assert tree.scheme is scheme and tree.valid.all()
    assert (tree.depth == [0, 1, 1, 1, 1, 2, 2, 2, 3]).all()
    assert tree.draft_logp.shape == (64, 8, VOCAB) and tree.parents.max() < 8
    base, table, _ = random_inputs(SAMPLED, 5, batch=1, scale=1.0)
    for row in range(64):
        for node in range(8):
            logits = (base[0, tree.depth[row, node]] + table[tree.tokens[row, node]]) / 0.7
            np.testing.assert_allclose(tree.draft_logp[row, node], oracle.log_softmax(logits), rtol=1e-4, atol=1e-5)
    if scheme is DrawScheme.WITHOUT_REPLACEMENT:
        assert_well_formed(tree, mask)
    else:
        siblings = tree.tokens[:, 1:5]
        assert any(len(set(row)) < 4 for row in siblings.tolist())
        np.testing.assert_array_equal(tree.parents[0], [NO_PARENT, 0, 0, 0, 0, 1, 2, 3, 5])


FALSE_ALARM = 1e-6


def p_value(cells: np.ndarray, scheme: np.ndarray) -> float:
    return float(stats.chisquare(np.bincount(cells, minlength=len(scheme)), scheme / scheme.sum() * len(cells)).pvalue)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_children_follow_the_distribution_they_were_drawn_from(scheme):
    """Ordered pairs of the root's first children, and first children below; false alarm 10^-6 each."""
    tree = grow_many(scheme)
    first, second = tree.tokens[:, 1], tree.tokens[:, 2]
    q = np.exp(np.float64(tree.draft_logp[0, 0]))
    pairs = np.outer(q, q)
    if scheme is DrawScheme.WITHOUT_REPLACEMENT:
        pairs = np.where(np.eye(VOCAB, dtype=bool), 0.0, pairs / (1 - q)[:, None])
        assert (first != second).all()
    is_possible = pairs.ravel() > 0
    cells = (np.cumsum(is_possible) - 1)[first * VOCAB + second]
    assert p_value(cells, pairs.ravel()[is_possible] / pairs.sum()) > FALSE_ALARM
    # The first survivor below each of the first two nodes, where the beam left one.
    for parent in (1, 2):
        has_child = (tree.parents == parent).any(1)
        child = np.argmax(tree.parents == parent, 1)
        token = tree.tokens[np.arange(len(child)), child]
        likeliest = np.bincount(tree.tokens[:, parent]).argmax()
        rows = has_child & (tree.tokens[:, parent] == likeliest)
        q = np.exp(np.float64(tree.draft_logp[np.flatnonzero(rows)[0], parent]))
        assert rows.sum() > 2_000
        assert p_value(token[rows], q) > FALSE_ALARM


def test_places_without_mass_stay_empty():
    """Filters that leave one or two tokens: no more siblings than that, and no child below an empty place."""
    for top_k in (1, 2):
        tree = grow_many(DrawScheme.WITHOUT_REPLACEMENT, top_k=top_k, rows=64)
        parents = np.where(tree.valid, tree.parents, NO_PARENT)
        assert (tree.valid[:, 1:5].sum(1) == top_k).all()
        assert np.take_along_axis(tree.valid, np.maximum(parents, 0), 1).all()
        assert all((parents == node).sum(1).max() <= top_k for node in range(9))
        children = np.take_along_axis(tree.draft_logp, np.maximum(tree.parents, 0)[:, :, None], 1)
        assert np.isfinite(np.take_along_axis(children, tree.tokens[:, :, None], 2)[:, 1:, 0])[tree.valid[:, 1:]].all()


def test_beam_scores_are_gumbels_under_their_parents():
    """The form that does not cancel against the direct one; the best child has its parent's score; no NaN."""
    rng = np.random.default_rng(0)
    logp = np.log(rng.dirichlet(np.ones(VOCAB), (1, 2))).astype(np.float32)
    logp[0, 1, 2:] = -np.inf
    above = levels.Level(*(jnp.asarray(x) for x in ([[0, 1]], [[0, 0]], [[-0.5, -1.5]], [[-0.2, -2.0]])))
    noise = jax.random.gumbel(jax.random.key(0), (1, 2, VOCAB))
    level = jax.jit(levels.stochastic_beam, static_argnums=3)(noise, jnp.asarray(logp), above, VOCAB, jnp.ones(1, bool))
    noise = np.asarray(noise[0], np.float64)
    noisy = np.array([[-0.5], [-1.5]]) + np.float64(logp[0]) + noise
    parent, best = np.array([[-0.2], [-2.0]]), noisy.max(1, keepdims=True)
    direct = -np.log(np.exp(-parent) - np.exp(-best) + np.exp(-noisy))
    order = np.argsort(-direct.ravel())[:VOCAB]
    np.testing.assert_array_equal(np.asarray(level.parents[0]) * VOCAB + np.asarray(level.tokens[0]), order)
    np.testing.assert_allclose(level.score[0], direct.ravel()[order], rtol=1e-4)
    assert float(level.score[0, 0]) == np.float32(-0.2)


@pytest.mark.parametrize("path", [0.0, -1e7])
def test_children_of_an_unlikely_path_follow_their_own_distribution(path):
    """Behind e^-10,000,000 the sum of path and child has no bits left for the child; false alarm 10^-6."""
    scheme = np.array([0.1, 0.2, 0.3, 0.4])
    column = jnp.full((ROWS, 1), path, jnp.float32)
    above = levels.Level(jnp.zeros((ROWS, 1), jnp.int32), jnp.full((ROWS, 1), NO_PARENT), column, column)
    is_sampled = jnp.ones(ROWS, bool)
    keys, zero = jax.vmap(jax.random.key)(jnp.arange(ROWS)), jnp.zeros(ROWS, jnp.int32)
    noise = jax.jit(levels.level_noise, static_argnums=(1, 3))(keys, (1,), zero, 4, is_sampled)
    logp = jnp.broadcast_to(jnp.log(jnp.asarray(scheme, jnp.float32)), (ROWS, 1, 4))
    level = jax.jit(levels.stochastic_beam, static_argnums=3)(noise, logp, above, 1, is_sampled)
    assert p_value(np.asarray(level.tokens[:, 0]), scheme) > FALSE_ALARM
