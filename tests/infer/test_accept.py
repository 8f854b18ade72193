"""The match rule: its walk against plain loops, its distribution by enumeration, and mutants that these checks must
find."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import distribution as distribution_oracle
from oracles import tree as oracle

from hsd_jax.infer.rules.accept import match_path
from hsd_jax.types import NO_PARENT, DraftTree, Verdict

NUM, MAX_DEPTH, BATCH, VOCAB = 9, 4, 256, 3


def random_tree(rng: np.random.Generator) -> tuple[list[int], list[int], list[int], list[bool]]:
    """Tokens, parents, depths, valid; with invalid nodes anywhere but at the root, and siblings that may be alike."""
    tokens, parents, depth = [int(rng.integers(VOCAB))], [NO_PARENT], [0]
    while len(tokens) < NUM:
        parent = int(rng.integers(len(tokens)))
        if depth[parent] < MAX_DEPTH:
            tokens.append(int(rng.integers(VOCAB)))
            parents.append(parent)
            depth.append(depth[parent] + 1)
    valid = (rng.random(NUM) < 0.85) | (np.arange(NUM) == 0)
    for node in range(1, NUM):  # some padding as drafters write it
        if not valid[node] and node not in parents and rng.random() < 0.5:
            parents[node], depth[node] = NO_PARENT, 0
    return tokens, parents, depth, valid.tolist()


def draws_by_context(tokens: list[int], parents: list[int], seed: int) -> list[int]:
    """A draw a node that depends on the tokens on the way to it alone, as the target's logits and the noise do."""
    draws = []
    for node in range(len(tokens)):
        context, up = [], node
        while up != NO_PARENT:
            context.append(tokens[up])
            up = parents[up]
        draws.append(int(np.random.default_rng([seed, *context]).integers(VOCAB)))
    return draws


def batch_of_trees(seed: int):
    rng = np.random.default_rng(seed)
    rows = [random_tree(rng) for _ in range(BATCH)]
    draws = [draws_by_context(tokens, parents, seed + i) for i, (tokens, parents, _, _) in enumerate(rows)]
    tokens, parents, depth, valid = (jnp.asarray(np.array(x)) for x in zip(*rows, strict=True))
    return rows, draws, DraftTree(*(x.astype(jnp.int32) for x in (tokens, parents, depth)), valid)


@functools.partial(jax.jit, static_argnums=2)
def jitted_match(tree: DraftTree, draws: jax.Array, match_fn) -> Verdict:
    return match_fn(tree, draws, MAX_DEPTH)


def has_twins(tokens, parents, valid) -> bool:
    siblings = [(p, t) for p, t, v in zip(parents, tokens, valid, strict=True) if v]
    return len(set(siblings)) < len(siblings)


def find_difference(match_fn) -> str | None:
    """Where a walk and the oracle's differ, or None. Alike siblings may swap the path, never the tokens."""
    for seed in range(3):
        rows, draws, tree = batch_of_trees(seed * BATCH)
        verdict = jax.tree.map(np.asarray, jitted_match(tree, jnp.asarray(draws, jnp.int32), match_fn))
        for i, (tokens, parents, _, valid) in enumerate(rows):
            path, emitted, _ = oracle.walk(tokens, parents, valid, draws[i])
            found = int(verdict.num_accepted[i])
            if found != len(path) - 1 or verdict.emitted[i, : found + 1].tolist() != emitted:
                return f"tree {i}: emitted {verdict.emitted[i]}, {found} accepted, not {emitted}"
            if has_twins(tokens, parents, valid):
                continue
            if verdict.path[i, : found + 1].tolist() != path:
                return f"tree {i}: path {verdict.path[i]}, not {path}"
    return None


def test_walk_is_that_of_the_oracle():
    assert find_difference(match_path) is None


def walk_to_likeliest_child(tree, draws, max_depth):
    """Follows the first child whatever was drawn."""
    first = jnp.argmax((tree.parents[:, None, :] == jnp.arange(NUM)[:, None]) & tree.valid[:, None, :], -1)
    has_child = jnp.any((tree.parents[:, None, :] == jnp.arange(NUM)[:, None]) & tree.valid[:, None, :], -1)
    child_token = jnp.take_along_axis(tree.tokens, first, 1)
    return match_path(tree, jnp.where(has_child, child_token, draws), max_depth)


def test_the_comparison_finds_a_wrong_walk():
    assert find_difference(walk_to_likeliest_child) is not None


# --- the distribution of what is emitted ------------------------------------------------------------------------------

TABLE = distribution_oracle.random_table([7, 1, 1, 3, 2, 2, 5, 1, 1, 8, 1, 2, 4, 1, 3, 3], 4)
TREES = {  # tokens, parents, valid; as deep as three edges
    "chain": ([0, 0, 2, 1], [-1, 0, 1, 2], [True] * 4),
    "siblings": ([1, 2, 1, 0, 2], [-1, 0, 0, 2, 2], [True] * 5),
    "twins": ([0, 0, 0, 2, 0], [-1, 0, 0, 1, 3], [True] * 5),
    "padding": ([0, 0, 1, 2, 0], [-1, 0, 1, -1, 0], [True, True, True, False, False]),
}
LENGTH = 4


def judge_likeliest_child(tokens, parents, valid, draws, table):
    """Accepts the child the target likes best, if there is one, instead of the drawn one."""
    emitted, node = [], 0
    while True:
        children = [n for n in range(1, len(tokens)) if parents[n] == node and valid[n]]
        if not children:
            return [*emitted, draws[node]]
        best = max(children, key=lambda n: table[tokens[node]][tokens[n]])
        if table[tokens[node]][tokens[best]] < max(table[tokens[node]]):
            return [*emitted, draws[node]]
        emitted.append(tokens[best])
        node = best


def variation(name: str, *judge):
    """Total variation of the texts of a tree, judged by the match rule or another, from the target's."""
    emitted = distribution_oracle.emitted_distribution(TABLE, *TREES[name], *judge)
    found = distribution_oracle.completed_distribution(TABLE, emitted, LENGTH)
    assert judge or sum(found.values()) == 1
    wanted = distribution_oracle.text_distribution(TABLE, TREES[name][0][0], LENGTH)
    return distribution_oracle.total_variation(found, wanted)


@pytest.mark.parametrize("name", TREES)
def test_match_emits_exactly_the_distribution_of_the_target(name):
    """In rational arithmetic: the total variation is zero, not small."""
    assert variation(name) == 0


def test_enumeration_finds_a_wrong_rule():
    assert variation("siblings", judge_likeliest_child) > 0.01
