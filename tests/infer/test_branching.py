"""Trees of `TreeConfig.branching`: their layout and their draws."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import branching as oracle
from oracles import tree as tree_oracle
from support import toy

from hsd_jax import validation
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.medusa import static_tree
from hsd_jax.measure.speeds import parse_trees
from hsd_jax.types import DRAWN_SCHEMES, DraftTree, DrawScheme, SamplingParams

VOCAB = 7
VECTORS = [(3, 2), (2, 2), (3, 2, 1), (1, 3, 2), (4,), (1, 1, 1), (VOCAB, 2)]

# --- the shape --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("branching", VECTORS)
def test_the_shape_is_counted(branching):
    """Nodes, depth and width of the layout in plain loops; names and records are read back."""
    config, layout = TreeConfig(branching=branching), oracle.layout(branching)
    assert config.nodes == len(layout.parents) and config.depth == max(layout.depths)
    children = [layout.parents.count(node) for node in range(config.nodes)]
    assert config.width == max(children)
    assert config.level_widths() == tuple(layout.depths.count(depth + 1) for depth in range(config.depth))
    inner = [layout.depths[node] for node, count in enumerate(children) if count]
    assert config.most_expanded == max(inner.count(depth) for depth in range(config.depth))
    assert TreeConfig.parse(config.name) == config and hash(config) == hash(TreeConfig.parse(config.name))
    assert validation.read(TreeConfig, json.loads(json.dumps(dataclasses.asdict(config))), "record") == config
    assert dataclasses.replace(config) == config


def test_names_of_both_kinds():
    wanted = [TreeConfig(8, 5, 3), TreeConfig(branching=(3, 2, 1)), TreeConfig(branching=(4,))]
    assert parse_trees("8x5x3, 3.2.1,4.") == wanted
    assert TreeConfig(branching=(3, 2, 1)).name == "3.2.1" and TreeConfig(branching=(4,)).name == "4."
    assert TreeConfig() == TreeConfig(8, 5, 3) and TreeConfig().branching is None


@pytest.mark.parametrize("text", ["3.2.x", ".", "3..2", "-1.2", "8x5", "8x5x3.2", ""])
def test_names_of_no_tree_are_refused(text):
    with pytest.raises(ValueError, match="branching"):
        TreeConfig.parse(text)


# --- growing ----------------------------------------------------------------------------------------------------------


def grown(
    branching, scheme: DrawScheme, temperature=1.0, top_k=0, rows: int = 64, levels=None, **shape
) -> tuple[DraftTree, np.ndarray, np.ndarray]:
    """Trees of one drafter distribution under many keys, and the tables they are drawn from."""
    config = TreeConfig(branching=branching) if branching else TreeConfig(**shape)
    rng = np.random.default_rng(5)
    base = rng.normal(0, 1, (1, config.depth, VOCAB)).astype(np.float32)
    table = rng.normal(0, 1, (VOCAB, VOCAB)).astype(np.float32)
    ints = jnp.full(rows, 2, jnp.int32)
    warm = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (rows,))
    sampling = SamplingParams(warm, jnp.full(rows, top_k, jnp.int32), jnp.ones(rows))
    tree = toy.grow_tree(
        config,
        scheme,
        jnp.broadcast_to(base, (rows, *base.shape[1:])),
        table,
        ints,
        toy.keys_of(range(rows)),
        ints,
        sampling,
        None if levels is None else jnp.asarray(levels, jnp.int32),
    )
    return jax.tree.map(np.asarray, tree), base[0], table


def likeliest(base: np.ndarray, table: np.ndarray, branching) -> list[int]:
    """Of the tables of `grown`."""
    return oracle.likeliest_tree(lambda depth, token: base[depth] + table[token], 2, branching)


SCHEMES = sorted(DrawScheme, key=lambda scheme: scheme.value)


@pytest.mark.parametrize(
    ("scheme", "branching"),
    [(scheme, branching) for scheme in SCHEMES for branching in [(1, 3, 2), (VOCAB, 2)]]
    + [(DrawScheme.WITHOUT_REPLACEMENT, branching) for branching in [(3, 2), (3, 2, 1), (4,)]],
)
def test_the_layout_is_fixed_before_anything_is_drawn(scheme, branching):
    """Level by level, children of a node together; the same in every row, whatever the tokens. Siblings differ unless
    they are independent, and distributions stand for every node that has children."""
    tree, base, table = grown(branching, scheme)
    layout = oracle.layout(branching)
    assert tree.scheme is scheme and tree.valid.all()
    np.testing.assert_array_equal(tree.parents, np.broadcast_to(layout.parents, tree.parents.shape))
    np.testing.assert_array_equal(tree.depth, np.broadcast_to(layout.depths, tree.depth.shape))
    shape = static_tree(TreeConfig(branching=branching))  # the heads of medusa know theirs beforehand
    assert (shape.parents.tolist(), shape.depths.tolist(), shape.ranks.tolist()) == layout
    if scheme is not DrawScheme.INDEPENDENT:
        for row in range(8):
            assert len({(layout.parents[n], tree.tokens[row, n]) for n in range(1, len(layout.parents))}) == (
                len(layout.parents) - 1
            )
    if scheme in DRAWN_SCHEMES:
        assert tree.score is None and tree.draft_logp.shape[1] == max(layout.parents) + 1
        for node in range(max(layout.parents) + 1):
            logits = base[layout.depths[node]] + table[tree.tokens[0, node]]
            np.testing.assert_allclose(tree.draft_logp[0, node], tree_oracle.log_softmax(logits), rtol=1e-4, atol=1e-5)
    else:
        assert tree.draft_logp is None and (tree.score[:, 0] == 0).all()
        assert (np.take_along_axis(tree.score, np.maximum(tree.parents, 0), 1) >= tree.score)[:, 1:].all()


@pytest.mark.slow
def test_rows_without_noise_have_the_likeliest_children():
    """Greedy rows of a drawn tree, beside rows that draw."""
    temperature = np.array([0.0, 1.0, 0.0, 0.7])
    for scheme in SCHEMES:
        tree, base, table = grown((3, 2), scheme, temperature, rows=4)
        wanted = likeliest(base, table, (3, 2))
        if scheme is DrawScheme.INDEPENDENT:  # each the likeliest, whatever its siblings are
            first = int(np.argmax(base[0] + table[2]))
            wanted = [2, *[first] * 3, *[int(np.argmax(base[1] + table[first]))] * 6]
        if scheme is DrawScheme.TOP_THEN_RANDOM:  # the place of the random child, with the last of them, comes first
            best = np.argsort(-(base[0] + table[2]))[:3].tolist()
            wanted = [2, best[-1], *best[:-1]]
            assert tree.tokens[0, :4].tolist() == tree.tokens[2, :4].tolist() == wanted
            assert tree.tokens[1, :4].tolist() != wanted and (tree.tokens[1, 2:4] == wanted[2:]).all()
            continue
        assert tree.tokens[0].tolist() == tree.tokens[2].tolist() == wanted
        if scheme in DRAWN_SCHEMES:
            assert tree.tokens[1].tolist() != wanted


@pytest.mark.parametrize("scheme", SCHEMES)
def test_places_without_mass_stay_empty(scheme):
    """Filters that leave one or two tokens: no more siblings than that, the first ones, and none below an empty
    place."""
    if scheme in (DrawScheme.ARBITRARY, DrawScheme.INDEPENDENT):  # no filter is asked, or siblings may be alike
        assert grown((3, 2), scheme, top_k=1)[0].valid.all()
        return
    layout = oracle.layout((3, 2))
    for top_k in (1, 2):
        tree, _, _ = grown((3, 2), scheme, top_k=top_k)
        has_token = np.array(layout.ranks) < top_k
        if scheme is DrawScheme.TOP_THEN_RANDOM:  # the random child stands first, and needs a token off the others
            widths = np.array([1, 3, 2])[layout.depths]
            has_token = np.where(np.array(layout.ranks) == 0, top_k >= widths, np.array(layout.ranks) <= top_k)
        wanted = [has_token[n] and (n == 0 or has_token[max(layout.parents[n], 0)]) for n in range(10)]
        np.testing.assert_array_equal(tree.valid, np.broadcast_to(wanted, tree.valid.shape))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_levels_without_logits_are_left_out(scheme):
    """What is left has the tokens and the distributions of the whole tree: no token decides whether a node stays."""
    for branching in [(3, 2), *([None] if scheme in DRAWN_SCHEMES else [])]:
        whole, cut = (
            grown(branching, scheme, rows=3, levels=levels, nodes=7, depth=2, width=3)[0]
            for levels in ([2, 2, 2], [0, 1, 2])
        )
        assert whole.valid.all()
        np.testing.assert_array_equal(cut.valid, whole.depth <= np.arange(3)[:, None])
        jax.tree.map(np.testing.assert_array_equal, dataclasses.replace(cut, valid=whole.valid), whole)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_child_a_node_is_the_chain_to_the_bit(scheme, temperature):
    """The same noise, tokens and distributions under every scheme."""
    found, wanted = (
        grown(branching, scheme, temperature, nodes=4, depth=3, width=1)[0] for branching in ((1, 1, 1), None)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
