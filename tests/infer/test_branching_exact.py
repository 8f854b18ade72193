"""Trees that branch at every level keep the target's distribution: by enumeration, by chi-square, and with mutants."""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import branching as oracle
from oracles import distribution as distribution_oracle
from oracles import recursive as recursive_oracle
from scipy import stats
from support import toy

from hsd_jax.config import TreeConfig
from hsd_jax.infer import draw
from hsd_jax.infer.accept import recursion, recursive_rule
from hsd_jax.infer.tree import Grower, ancestor_mask
from hsd_jax.types import DraftTree, DrawScheme, RoundInputs, SamplingParams

SCHEMES = {x: DrawScheme(x) for x in (recursive_oracle.INDEPENDENT, recursive_oracle.WITHOUT_REPLACEMENT)}
INDEPENDENT, WITHOUT_REPLACEMENT = SCHEMES
ROOT, EXACT = 0, 1e-12

# --- enumeration ------------------------------------------------------------------------------------------------------


def tables(vocab: int, seed: int):
    return tuple(distribution_oracle.markov_table(vocab, s) for s in (seed, seed % 100 + 50))


def oracle_distance(branching, vocab: int, draws: str, judged_as: str, seed: int) -> Fraction:
    """Total variation between texts of the round and of the target, in rational arithmetic, all trees and coins."""
    target, draft = tables(vocab, seed)
    emitted = oracle.emitted(target, draft, branching, ROOT, draws, judged_as)
    assert sum(emitted.values()) == 1
    return distribution_oracle.distance(target, ROOT, len(branching) + 1, emitted)


def every_tree(draft: np.ndarray, branching, draws: str) -> tuple[np.ndarray, np.ndarray]:
    """All trees that drawing can give [trees, N], and their probabilities: the children of one node after another."""
    nodes, vocab = oracle.layout(branching), len(draft)
    tokens, mass = np.full((1, 1), ROOT), np.ones(1)
    for node, depth in enumerate(nodes.depths):
        if depth == len(branching):
            break
        count = branching[depth]
        orders = itertools.product(range(vocab), repeat=count)
        if draws != INDEPENDENT:
            orders = itertools.permutations(range(vocab), count)
        children = np.array(list(orders))
        own = np.ones((len(tokens), len(children)))
        for rank in range(count):
            q = draft[tokens[:, node]]
            left = 1.0 if draws == INDEPENDENT else 1.0 - sum(q[:, children[:, r]] for r in range(rank))
            own = own * q[:, children[:, rank]] / left
        mass = (mass[:, None] * own).ravel()
        tokens = np.concatenate([np.repeat(tokens, len(children), 0), np.tile(children, (len(tokens), 1))], 1)
        tokens, mass = tokens[mass > 0], mass[mass > 0]
    return tokens.astype(np.int32), mass


def our_distance(branching, vocab: int, draws: str, judged_as: str, seed: int, prune=None) -> float:
    """The same distance of the rule under test: `recursion` judges every tree, whole, in float64."""
    target, draft = (np.array(t, float) for t in tables(vocab, seed))
    tokens, mass = every_tree(draft, branching, draws)
    np.testing.assert_allclose(mass.sum(), 1.0, rtol=1e-12)
    nodes = oracle.layout(branching)
    interior = max(nodes.parents) + 1
    valid = np.ones(tokens.shape, bool) if prune is None else prune(tokens, nodes, draft)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), np.errstate(divide="ignore"):
        rows = functools.partial(np.broadcast_to, shape=tokens.shape)
        parents, depths = (jnp.asarray(rows(np.array(x, np.int32))) for x in (nodes.parents, nodes.depths))
        draft_logp = jnp.asarray(np.log(draft[tokens[:, :interior]]))
        tree = DraftTree(jnp.asarray(tokens), parents, depths, jnp.asarray(valid), draft_logp, SCHEMES[judged_as])
        judge = jax.jit(functools.partial(recursion, max_children=max(branching)))
        acceptance, residual = map(np.asarray, judge(tree, np.log(target[tokens])))
    assert acceptance.dtype == residual.dtype == np.float64
    residual = residual / np.maximum(residual.sum(-1, keepdims=True), 1e-300)  # as drawing by Gumbel-max does
    found = oracle.emitted_by_trees(tokens, mass, nodes, valid, acceptance, residual, target)
    wanted = oracle.text_distribution(target, ROOT, len(branching) + 1)
    return float(np.abs(found - wanted).sum() / 2)


@pytest.mark.parametrize("seed", [1, 101])
@pytest.mark.parametrize("draws", SCHEMES)
@pytest.mark.parametrize(("branching", "vocab"), [((3, 2), 5), ((2, 2), 5), ((2, 2), 3), ((3, 2, 1), 4)])
def test_the_recursion_of_the_paper_emits_exactly_the_distribution_of_the_target(branching, vocab, draws, seed):
    """In rational arithmetic, where the distance is zero."""
    assert oracle_distance(branching, vocab, draws, draws, seed) == 0


CASES = [(branching, vocab, draws) for branching, vocab in (((2, 2), 4), ((3, 2), 3)) for draws in SCHEMES]
CASES += [((3, 2), 4, WITHOUT_REPLACEMENT), ((2, 1, 2), 3, INDEPENDENT)]
SLOW = [((3, 2), 4, INDEPENDENT), ((2, 2), 5, INDEPENDENT), ((2, 2), 5, WITHOUT_REPLACEMENT)]


@pytest.mark.parametrize(
    ("branching", "vocab", "draws"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_every_tree_judged_whole_emits_the_distribution_of_the_target(branching, vocab, draws):
    """By the function that decodes; all its trees together, so that a node mistaken for another would show."""
    for seed in (1, 101):
        assert our_distance(branching, vocab, draws, draws, seed) < EXACT


@pytest.mark.parametrize("draws", SCHEMES)
def test_enumeration_finds_swapped_distributions(draws):
    """Children drawn under one distribution and judged under the other: off by at least 1 in 1,000."""
    (other,) = set(SCHEMES) - {draws}
    for branching, vocab in (((2, 2), 4), ((3, 2), 3)):
        assert oracle_distance(branching, vocab, draws, other, 1) > 1e-3
        assert our_distance(branching, vocab, draws, other, 1) > 1e-3


def cut_to_likeliest(tokens: np.ndarray, nodes: oracle.Layout, draft: np.ndarray, count: int = 2) -> np.ndarray:
    """Of the root's children those `count` that the drafter likes best, and what is below them: a choice that looks."""
    first = [n for n, depth in enumerate(nodes.depths) if depth == 1]
    best = np.argsort(-draft[ROOT][tokens[:, first]], axis=1, kind="stable")[:, :count]
    return below(tokens, nodes, [(best == rank).any(1) for rank in range(len(first))])


def cut_to_first(tokens: np.ndarray, nodes: oracle.Layout, draft: np.ndarray, count: int = 2) -> np.ndarray:
    """Of the root's children the first `count`: a choice that does not look."""
    num = nodes.depths.count(1)
    return below(tokens, nodes, [np.full(len(tokens), rank < count) for rank in range(num)])


def below(tokens: np.ndarray, nodes: oracle.Layout, kept: list[np.ndarray]) -> np.ndarray:
    valid = np.ones(tokens.shape, bool)
    for node in range(1, tokens.shape[1]):
        parent = nodes.parents[node]
        valid[:, node] = kept[nodes.ranks[node]] if parent == 0 else valid[:, parent]
    return valid


@pytest.mark.parametrize("draws", SCHEMES)
def test_enumeration_finds_children_cut_by_likelihood(draws):
    assert our_distance((3, 2), 3, draws, draws, 1, cut_to_first) < EXACT
    assert our_distance((3, 2), 3, draws, draws, 1, cut_to_likeliest) > 1e-3


# --- draws ------------------------------------------------------------------------------------------------------------

VOCAB, FALSE_ALARM = 5, 1e-6


def chi_square(cells: np.ndarray, distribution: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells of fewer than five expected counts are one."""
    counts, expected = np.bincount(cells, minlength=distribution.size), distribution.ravel() * len(cells)
    assert not counts[expected == 0].any()
    is_rare = expected < 5
    counts, expected = (np.append(x[~is_rare], x[is_rare].sum()) for x in (counts, expected))
    is_there = expected > 0
    return float(((counts - expected)[is_there] ** 2 / expected[is_there]).sum()), int(is_there.sum()) - 1


def test_gumbel_top_k_draws_without_replacement():
    """Ordered triples, of two nodes at once, against draws one after the other; false alarm 10^-6 each."""
    rows = 60_000
    q = np.random.default_rng(0).dirichlet(np.ones(VOCAB), 2)
    zero = jnp.zeros((rows, 2))
    above = draw.Level(zero.astype(jnp.int32), zero.astype(jnp.int32), zero, zero)
    keys = jax.vmap(jax.random.key)(jnp.arange(rows, dtype=jnp.uint32))
    noise = draw.level_noise(keys, (2,), jnp.zeros(rows, jnp.int32), VOCAB, jnp.ones(rows, bool))
    logp = jnp.broadcast_to(jnp.log(jnp.asarray(q, jnp.float32)), noise.shape)
    level = draw.gumbel_top_k(noise, logp, above, 3)
    np.testing.assert_array_equal(level.parents[0], [0, 0, 0, 1, 1, 1])
    for node in range(2):
        tokens = np.asarray(level.tokens)[:, 3 * node : 3 * node + 3]
        wanted = np.zeros((VOCAB,) * 3)
        for a, b, c in itertools.permutations(range(VOCAB), 3):
            p = q[node]
            wanted[a, b, c] = p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b])
        statistic, free = chi_square(np.ravel_multi_index(tuple(tokens.T), wanted.shape), wanted)
        assert stats.chi2.sf(statistic, free) > FALSE_ALARM


# --- RSD-S and RSD-C, from the draws to the text ----------------------------------------------------------------------

PAIRS, TREES, SMALL = 12, 10_000, 3


def pooled_p_value(config: TreeConfig, pairs: int = PAIRS) -> float:
    """The chi-square of three tokens of text, over random pairs of Markov models, TREES trees each.

    Grown by the `Grower` and judged by the rule of the library; the target writes what a round did not emit.
    """
    rule = recursive_rule(config.depth, config.width)

    def emit(draft, target, seeds):
        keys, zero = jax.vmap(jax.random.key)(seeds), jnp.zeros(TREES, jnp.int32)
        sampling = SamplingParams(jnp.ones(TREES), zero, jnp.ones(TREES))
        inputs = RoundInputs(zero, zero, keys, sampling)
        base = jnp.zeros((TREES, config.depth, SMALL))
        grower = Grower(config, DrawScheme.WITHOUT_REPLACEMENT, SMALL)
        tree = grower.grow_token_free(base, toy.of_tokens(lambda tokens: draft[tokens]), inputs)
        verdict = rule.judge(keys, tree, ancestor_mask(tree, config.depth), target[tree.tokens], sampling, zero)
        return verdict.emitted, verdict.num_accepted

    jitted, rng, statistic, free = jax.jit(emit), np.random.default_rng(7), 0.0, 0
    for pair in range(pairs):
        target, draft = rng.dirichlet(np.ones(SMALL), (2, SMALL))
        logs = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (draft, target))
        seeds = jnp.arange(pair * TREES, (pair + 1) * TREES, dtype=jnp.uint32)
        emitted, num_accepted = map(np.array, jitted(*logs, seeds))
        for place in range(1, config.depth + 1):
            own = (rng.random(TREES)[:, None] > np.cumsum(target[emitted[:, place - 1]], 1)[:, :-1]).sum(1)
            emitted[:, place] = np.where(place > num_accepted, own, emitted[:, place])
        wanted = oracle.text_distribution(target, ROOT, config.depth + 1)
        added = chi_square(np.ravel_multi_index(tuple(emitted.T), wanted.shape), wanted)
        statistic, free = statistic + added[0], free + added[1]
    return float(stats.chi2.sf(statistic, free))


@pytest.mark.parametrize(
    "config",
    [
        TreeConfig(nodes=5, depth=2, width=2),
        TreeConfig(branching=(2, 2)),
        pytest.param(TreeConfig(branching=(3, 2)), marks=pytest.mark.slow),
    ],
    ids=["rsd-s", "rsd-c", "whole vocabulary"],
)
def test_drawn_trees_emit_the_distribution_of_the_target(config):
    """Twelve pairs pooled; fires falsely once in 10^6."""
    assert pooled_p_value(config) > FALSE_ALARM


def test_the_chi_square_finds_a_beam_cut_by_likelihood(monkeypatch):
    """RSD-S may cut by perturbed scores, which say nothing of the token; by likelihood it would be off."""

    def mutant(noise, draft_logp, above, width, is_sampled):
        level = draw.gumbel_top_k(noise, draft_logp, above, width)
        _, kept = jax.lax.top_k(jnp.where(jnp.isfinite(level.score), level.logp, -jnp.inf), width)
        return draw.Level(*(jnp.take_along_axis(x, kept, 1) for x in level))

    monkeypatch.setattr(draw, "stochastic_beam", mutant)
    assert pooled_p_value(TreeConfig(nodes=5, depth=2, width=2), pairs=4) < FALSE_ALARM


def test_the_chi_square_finds_draws_judged_as_independent(monkeypatch):
    real = Grower.grow

    def mutant(self, *args):
        tree, carry = real(self, *args)
        return tree.replace(scheme=DrawScheme.INDEPENDENT), carry

    monkeypatch.setattr(Grower, "grow", mutant)
    assert pooled_p_value(TreeConfig(branching=(2, 2)), pairs=4) < FALSE_ALARM
