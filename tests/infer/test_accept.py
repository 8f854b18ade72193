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
from scipy import stats
from support.rules import DEPTH, depths_of, keyed

from hsd_jax.config import ModelConfig
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.accept import check_legal, match_path, match_rule
from hsd_jax.infer.step import make_step
from hsd_jax.infer.tree import ancestor_mask
from hsd_jax.types import NO_PARENT, AcceptRule, Drafter, DraftTree, DrawScheme, SamplingParams, Verdict

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
    return match_fn(tree, ancestor_mask(tree, MAX_DEPTH), draws, MAX_DEPTH)


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
            if int(verdict.next_token[i]) != emitted[-1]:
                return f"tree {i}: next token {verdict.next_token[i]}, not {emitted[-1]}"
            if has_twins(tokens, parents, valid):
                continue
            if verdict.path[i, : found + 1].tolist() != path:
                return f"tree {i}: path {verdict.path[i]}, not {path}"
    return None


def test_walk_is_that_of_the_oracle():
    assert find_difference(match_path) is None


def walk_to_likeliest_child(tree, ancestors, draws, max_depth):
    """Follows the first child whatever was drawn."""
    first = jnp.argmax((tree.parents[:, None, :] == jnp.arange(NUM)[:, None]) & tree.valid[:, None, :], -1)
    has_child = jnp.any((tree.parents[:, None, :] == jnp.arange(NUM)[:, None]) & tree.valid[:, None, :], -1)
    child_token = jnp.take_along_axis(tree.tokens, first, 1)
    return match_path(tree, ancestors, jnp.where(has_child, child_token, draws), max_depth)


@pytest.mark.parametrize("mutant", [walk_to_likeliest_child])
def test_the_comparison_finds_wrong_walks(mutant):
    assert find_difference(mutant) is not None


# --- the distribution of what is emitted
# ---------------------------------------------------------------------------------------

TABLES = {
    3: distribution_oracle.random_table([5, 2, 1, 1, 1, 6, 3, 4, 1], 3),
    4: distribution_oracle.random_table([7, 1, 1, 3, 2, 2, 5, 1, 1, 8, 1, 2, 4, 1, 3, 3], 4),
}
TREES = {  # tokens, parents, valid; as deep as three edges
    "chain": ([0, 0, 2, 1], [-1, 0, 1, 2], [True] * 4),
    "siblings": ([1, 2, 1, 0, 2], [-1, 0, 0, 2, 2], [True] * 5),
    "twins": ([0, 0, 0, 2, 0], [-1, 0, 0, 1, 3], [True] * 5),
    "padding": ([0, 0, 1, 2, 0], [-1, 0, 1, -1, 0], [True, True, True, False, False]),
}
CASES = [(vocab, name) for vocab in TABLES for name in TREES]
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


@pytest.mark.parametrize(("vocab", "name"), CASES)
def test_match_emits_exactly_the_distribution_of_the_target(vocab, name):
    """In rational arithmetic: the total variation is zero, not small."""
    table = TABLES[vocab]
    found = distribution_oracle.completed_distribution(
        table, distribution_oracle.emitted_distribution(table, *TREES[name]), LENGTH
    )
    wanted = distribution_oracle.text_distribution(table, TREES[name][0][0], LENGTH)
    assert sum(found.values()) == sum(wanted.values()) == 1
    assert distribution_oracle.total_variation(found, wanted) == 0


@pytest.mark.parametrize("mutant", [judge_likeliest_child])
@pytest.mark.parametrize("name", ["siblings"])
def test_enumeration_finds_wrong_rules(mutant, name):
    table = TABLES[4]
    found = distribution_oracle.completed_distribution(
        table, distribution_oracle.emitted_distribution(table, *TREES[name], mutant), LENGTH
    )
    assert (
        distribution_oracle.total_variation(
            found, distribution_oracle.text_distribution(table, TREES[name][0][0], LENGTH)
        )
        > 0.01
    )


FALSE_ALARM = 1e-6
ROWS = 50_000


def emitted_texts(rule: AcceptRule, vocab: int, name: str) -> list[tuple[int, ...]]:
    """What the jitted rule emits for one tree under many keys."""
    tokens, parents, valid = TREES[name]
    columns = (tokens, parents, depths_of(parents))
    tree = DraftTree(*(jnp.broadcast_to(jnp.array(c, jnp.int32), (ROWS, len(c))) for c in columns), jnp.ones(0))
    tree = tree.replace(valid=jnp.broadcast_to(jnp.array(valid), (ROWS, len(valid))))
    logits = jnp.log(jnp.array([[float(p) for p in TABLES[vocab][t]] for t in tokens], jnp.float32))
    logits = jnp.broadcast_to(logits, (ROWS, *logits.shape))
    ones = jnp.ones(ROWS)
    sampling = SamplingParams(ones, jnp.zeros(ROWS, jnp.int32), ones)
    keys = jax.vmap(jax.random.key)(jnp.arange(ROWS, dtype=jnp.uint32))
    position = jnp.arange(ROWS, dtype=jnp.int32) % 100

    @jax.jit
    def judge(tree, logits):
        return rule.judge(keys, tree, ancestor_mask(tree, DEPTH), logits, sampling, position)

    verdict = jax.tree.map(np.asarray, judge(tree, logits))
    return [tuple(row[: n + 1].tolist()) for row, n in zip(verdict.emitted, verdict.num_accepted, strict=True)]


def p_value(rule: AcceptRule, vocab: int, name: str) -> float:
    """Chi-square of the emitted texts of the jitted rule against their enumerated distribution."""
    texts = emitted_texts(rule, vocab, name)
    distribution = distribution_oracle.emitted_distribution(TABLES[vocab], *TREES[name])
    if not set(texts) <= set(distribution):
        return 0.0
    counts = {text: 0 for text in distribution}
    for text in texts:
        counts[text] += 1
    expected = [float(distribution[t]) * ROWS for t in distribution]
    assert min(expected) > 5
    return float(stats.chisquare([counts[t] for t in distribution], expected).pvalue)


@pytest.mark.parametrize(("vocab", "name"), CASES)
def test_jitted_rule_follows_the_enumerated_distribution(vocab, name):
    """Ties the compiled rule to the enumeration; each case fires falsely once in 10^6."""
    assert p_value(match_rule(DEPTH), vocab, name) > FALSE_ALARM


@pytest.mark.parametrize("name", ["chain"])
def test_chi_square_finds_noise_that_is_used_twice(name):
    """All nodes draw with the noise of one position: each draw follows its distribution, the text does not."""
    assert p_value(keyed(lambda root, depth: root + 1 + 0 * depth), 4, name) < FALSE_ALARM


def uses_noise_of_the_predicted_position(rule: AcceptRule) -> bool:
    """Whether each node draws what plain decoding draws at the position it predicts."""
    num, vocab, root = 4, 16, 11
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 1, (1, num, vocab)), jnp.float32)
    keys = jax.vmap(jax.random.key)(jnp.array([5], jnp.uint32))
    one = jnp.ones(1)
    sampling = SamplingParams(one, jnp.zeros(1, jnp.int32), one)
    position = jnp.arange(root + 1, root + 1 + num, dtype=jnp.int32)[None]
    draw = jax.jit(sampling_lib.draw)
    wanted = [int(draw(keys, logits[:, n : n + 1], position[:, n : n + 1], sampling)[0, 0]) for n in range(num)]
    line = jnp.array([[0, *wanted[: num - 1]]], jnp.int32)
    depth = jnp.arange(num, dtype=jnp.int32)[None]
    tree = DraftTree(line, depth - 1, depth, jnp.ones((1, num), bool))

    @jax.jit
    def judge(tree):
        return rule.judge(keys, tree, ancestor_mask(tree, DEPTH), logits, sampling, jnp.array([root], jnp.int32))

    verdict = judge(tree)
    return verdict.num_accepted.tolist() == [DEPTH] and verdict.emitted.tolist() == [wanted]


def test_noise_is_that_of_the_predicted_position():
    assert uses_noise_of_the_predicted_position(match_rule(DEPTH))


def test_wrong_noise_positions_are_found():
    assert not uses_noise_of_the_predicted_position(keyed(lambda root, depth: root + depth))


# --- legality ---------------------------------------------------------------------------------------------------------


def test_a_rule_refuses_schemes_it_is_not_exact_for():
    nothing = match_rule(1)._replace(name="chain", schemes=frozenset())
    with pytest.raises(ValueError, match=r"accept='chain'.*draw='arbitrary'"):
        check_legal(nothing, DrawScheme.ARBITRARY)
    drafter = Drafter(*[lambda *_: None] * 4, DrawScheme.ARBITRARY, 2, 1)
    with pytest.raises(ValueError, match="arbitrary"):
        make_step(ModelConfig(4, 8, 1, 1, 1, 8, 8), drafter, nothing)
    for scheme in DrawScheme:
        check_legal(match_rule(1), scheme)
