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

from hsd_jax.config import TreeConfig
from hsd_jax.infer.tree import ancestor_mask, grow_beam
from hsd_jax.types import NO_PARENT, DraftTree

VOCAB = 7
CONFIGS = [
    TreeConfig(nodes=2, depth=1, width=1),
    TreeConfig(nodes=5, depth=4, width=1),
    TreeConfig(nodes=4, depth=1, width=3),
    TreeConfig(nodes=9, depth=4, width=2),
    TreeConfig(nodes=12, depth=5, width=3),
    TreeConfig(nodes=20, depth=3, width=VOCAB),
]
IDS = [f"nodes{c.nodes}-depth{c.depth}-width{c.width}" for c in CONFIGS]


@functools.cache
def jitted(config: TreeConfig):
    return jax.jit(lambda base, table, root: grow_beam(base, lambda tokens: table[tokens], root, config))


def grow(config: TreeConfig, base: np.ndarray, table: np.ndarray, root: np.ndarray) -> DraftTree:
    """`table[a]`: bias behind token a."""
    tree = jitted(config)(jnp.asarray(base, jnp.float32), jnp.asarray(table, jnp.float32), jnp.asarray(root, jnp.int32))
    return jax.tree.map(np.asarray, tree)


def random_inputs(config: TreeConfig, seed: int, batch: int = 4, scale: float = 2.0):
    rng = np.random.default_rng(seed)
    base = rng.normal(0, scale, (batch, config.depth, VOCAB)).astype(np.float32)
    return base, rng.normal(0, scale, (VOCAB, VOCAB)).astype(np.float32), rng.integers(0, VOCAB, batch)


def assert_well_formed(tree: DraftTree, mask: np.ndarray) -> None:
    """Parents first, closed under ancestors, no two siblings alike; the mask is a reflexive, transitive order."""
    for row in range(tree.tokens.shape[0]):
        tokens, parents, depth = tree.tokens[row], tree.parents[row], tree.depth[row]
        assert parents[0] == NO_PARENT and depth[0] == 0
        for node in range(1, len(tokens)):
            assert 0 <= parents[node] < node
            assert depth[node] == depth[parents[node]] + 1
        siblings = list(zip(parents.tolist(), tokens.tolist(), strict=True))
        assert len(set(siblings)) == len(siblings)
        assert mask[row].diagonal().all()
        assert not np.triu(mask[row], 1).any()
        assert (mask[row] == (mask[row].astype(int) @ mask[row].astype(int) > 0)).all()
        assert (mask[row].sum(1) == depth + 1).all()
        np.testing.assert_array_equal(mask[row], oracle.ancestor_mask(parents.tolist()))


def find_difference(grow_fn, config: TreeConfig, seed: int) -> str | None:
    """Where a tree and the oracle's differ, or None."""
    base, table, root = random_inputs(config, seed)
    tree = grow_fn(config, base, table, root)
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
    for seed in range(20):
        assert find_difference(grow, config, seed) is None


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.0, 0.1, 3.0, 100.0]))
def test_beam_is_well_formed(config, seed, scale):
    """Also where scores tie: scale 0 makes all logits equal, scale 100 makes most paths certain."""
    tree = grow(config, *random_inputs(config, seed, scale=scale))
    assert tree.valid.all()
    mask = ancestor_mask(jax.tree.map(jnp.asarray, tree), config.depth)
    assert_well_formed(tree, np.asarray(mask))


def test_rows_grow_alone():
    """Each row of a batch is the tree it would be alone, and rows differ."""
    config = CONFIGS[4]
    base, table, root = random_inputs(config, 3)
    together = grow(config, base, table, root)
    assert len({tuple(row) for row in together.parents.tolist()}) > 1
    for row in range(len(root)):
        alone = grow(config, base[row : row + 1], table, root[row : row + 1])
        jax.tree.map(lambda a, b, row=row: np.testing.assert_array_equal(a[0], b[row]), alone, together)


def test_of_equal_scores_the_shallower_node_is_kept():
    """Token 3 is certain at every level (score 0), token 4 costs the same at every level.

    So 3 ties with 3-3, and 4 with 3-4 and 4-3: of the last three one has room, the shallowest.
    """
    base = np.full((1, 2, VOCAB), -2e4, np.float32)
    base[:, :, 3], base[:, :, 4] = 0.0, -1e4
    tree = grow(TreeConfig(nodes=4, depth=2, width=2), base, np.zeros((VOCAB, VOCAB)), np.array([0]))
    assert tree.tokens.tolist() == [[0, 3, 3, 4]]
    assert tree.depth.tolist() == [[0, 1, 2, 1]]
    assert tree.parents.tolist() == [[NO_PARENT, 0, 1, 0]]


def test_ties_within_a_level_go_to_the_smaller_token():
    config = TreeConfig(nodes=4, depth=2, width=3)
    tree = grow(config, np.zeros((1, 2, VOCAB)), np.zeros((VOCAB, VOCAB)), np.array([6]))
    assert tree.tokens.tolist() == [[6, 0, 1, 2]]
    assert tree.depth.tolist() == [[0, 1, 1, 1]]


def test_bias_is_that_of_the_parent():
    """With flat base logits and a table that points to one successor, the chain follows the table from the root."""
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[np.arange(VOCAB), (3 * np.arange(VOCAB) + 1) % VOCAB] = 50.0
    tree = grow(TreeConfig(nodes=5, depth=4, width=1), np.zeros((2, 4, VOCAB)), table, np.array([0, 2]))
    assert tree.tokens.tolist() == [[0, 1, 4, 6, 5], [2, 0, 1, 4, 6]]


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
    mask = np.asarray(ancestor_mask(DraftTree(jnp.zeros_like(wide), wide, levels, valid), num - 1))[0]
    np.testing.assert_array_equal(mask[:num, :num], oracle.ancestor_mask(parents))
    np.testing.assert_array_equal(mask[num:, num:], np.eye(padding, dtype=bool))
    assert not mask[:num, num:].any() and not mask[num:, :num].any()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": 1}, ["nodes=1", "2", "256"]),
        ({"nodes": 257}, ["nodes=257", "256"]),
        ({"nodes": 4, "depth": 4}, ["depth=4", "1 to nodes - 1 = 3"]),
        ({"depth": 0}, ["depth=0"]),
        ({"width": 0}, ["width=0"]),
        ({"nodes": 4, "depth": 2, "width": 4}, ["width=4", "3"]),
        ({"nodes": 9, "depth": 2, "width": 2}, ["nodes=9", "at most 6", "lower nodes to 7"]),
        ({"nodes": 2.5}, ["nodes=2.5", "int"]),
        ({"width": True}, ["width=True", "int"]),
    ],
)
def test_impossible_shapes_are_refused(values, words):
    with pytest.raises(ValueError) as error:
        TreeConfig(**values)
    for word in words:
        assert word in str(error.value)


def mutant_without_root_bias(config, base, table, root):
    return grow(config, base, np.roll(table, 1, axis=0), root)


def mutant_last_levels_first(config, base, table, root):
    return grow(config, base[:, ::-1], table, root)


@pytest.mark.parametrize("mutant", [mutant_without_root_bias, mutant_last_levels_first])
def test_the_comparison_finds_mutants(mutant):
    assert find_difference(mutant, CONFIGS[4], 0) is not None
