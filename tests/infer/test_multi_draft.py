"""The rules `kseq`, `block_verification` and `optimal`: their distributions by enumeration, the compiled loop against
the target, and mutants to be found."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import distribution as distribution_oracle
from oracles import kseq as kseq_oracle
from oracles import optimal as optimal_oracle
from oracles import recursive as recursive_oracle
from support.rules import depths_of
from support.tiny_pairs import FALSE_ALARM, TREES, p_values, tiny_small_lm, tiny_texts

from hsd_jax.config import TreeConfig
from hsd_jax.infer import kseq as kseq_lib
from hsd_jax.infer.accept import check_legal, recursion
from hsd_jax.infer.block import block
from hsd_jax.infer.kseq import kseq
from hsd_jax.infer.optimal import chain_and_match
from hsd_jax.infer.rules import RULES, make_rule
from hsd_jax.types import Drafter, DraftTree, DrawScheme

ROOT, MOST = 0, 4
EXACT = 1e-12
"""In float64."""


def tables(vocab: int, seed: int) -> tuple[list, list]:
    """The target's and the drafter's."""
    return distribution_oracle.markov_table(vocab, seed % 100), distribution_oracle.markov_table(vocab, seed + 50)


def distance(target, parents, emitted) -> float | Fraction:
    """Total variation between texts that start with `emitted` and texts of the target alone."""
    return distribution_oracle.distance(target, ROOT, max(depths_of(parents)) + 1, emitted)


Trees = list[tuple[list[int], list[bool], Fraction]]
Judged = Callable[[int], tuple]


def judged_by_ours(rule, target, draft, parents, trees: Trees, scheme: DrawScheme) -> list[Judged]:
    """What a function of ours says of every tree, all in one batch, in float64: a `judged(node)` a tree."""
    tokens, valid = np.array([t for t, _, _ in trees], np.int32), np.array([v for _, v, _ in trees])
    interior = max(parents) + 1
    with np.errstate(divide="ignore"):
        logs = [np.log(np.array(t, float)) for t in (target, draft)]
    rows = functools.partial(np.broadcast_to, shape=tokens.shape)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        tree = DraftTree(
            jnp.asarray(tokens),
            jnp.asarray(rows(np.array(parents, np.int32))),
            jnp.asarray(rows(np.array(depths_of(parents), np.int32))),
            jnp.asarray(valid),
            jnp.asarray(logs[1][tokens[:, :interior]]),
            scheme,
        )
        chances, residual = map(np.asarray, jax.jit(lambda *args: rule(*args))(tree, logs[0][tokens]))
    assert chances.dtype == residual.dtype == np.float64
    residual = residual / residual.sum(-1, keepdims=True)

    def of(row: int) -> Judged:
        def judged(node):
            if node >= interior:
                return [], [float(p) for p in target[tokens[row, node]]]
            return [chances[row, c] for c in recursive_oracle.children_of(parents, valid[row], node)], residual[
                row, node
            ]

        return judged

    return [of(row) for row in range(len(trees))]


def emitted_one_by_one(parents, trees: Trees, judged: list[Judged]) -> dict:
    """The distribution of what is emitted over all trees and coins, where siblings are tried in their order."""
    emitted: dict = defaultdict(int)
    for (tokens, valid, mass), of in zip(trees, judged, strict=True):
        for text, p in recursive_oracle.verdict_distribution(tokens, parents, valid, of).items():
            emitted[text] += mass * p if isinstance(p, Fraction | int) else float(mass) * p
    assert abs(sum(emitted.values()) - 1) < EXACT
    return emitted


# --- K-SEQ ------------------------------------------------------------------------------------------------------------

KSEQ_LAYOUTS = {  # vocabulary, parents
    "chain": (4, [-1, 0, 1]),
    "two": (4, [-1, 0, 0]),
    "three": (4, [-1, 0, 0, 0]),
    "levels": (3, [-1, 0, 0, 1, 1, 2, 2]),
    "uneven": (3, [-1, 0, 0, 0, 2, 2]),
}


def independent_trees(draft, parents) -> Trees:
    return optimal_oracle.tree_draws(draft, ROOT, parents, optimal_oracle.INDEPENDENT)


def kseq_by_oracle(target, draft, parents, trees: Trees, rho_of) -> list[Judged]:
    def of(tokens) -> Judged:
        def judged(node):
            p, q = target[tokens[node]], draft[tokens[node]]
            children = [tokens[c] for c in recursive_oracle.children_of(parents, [True] * len(parents), node)]
            return kseq_oracle.kseq_node(p, q, children, rho_of(p, q, max(len(children), 1)))

        return judged

    return [of(tokens) for tokens, _, _ in trees]


@pytest.mark.parametrize("seed", [1, 101, 201])
@pytest.mark.parametrize("layout", KSEQ_LAYOUTS)
def test_kseq_emits_exactly_the_distribution_of_the_target(layout, seed):
    """In rational arithmetic at any admissible threshold, the largest included; ours in float64."""
    vocab, parents = KSEQ_LAYOUTS[layout]
    target, draft = tables(vocab, seed)
    trees = independent_trees(draft, parents)
    for rho_of in (kseq_oracle.least_rho, lambda p, q, count: Fraction(count)):
        judged = kseq_by_oracle(target, draft, parents, trees, rho_of)
        assert distance(target, parents, emitted_one_by_one(parents, trees, judged)) == 0
    ours = judged_by_ours(kseq, target, draft, parents, trees, DrawScheme.INDEPENDENT)
    assert distance(target, parents, emitted_one_by_one(parents, trees, ours)) < EXACT


def accepted_first(draws, judged_of) -> float:
    """The chance that a child of the root is accepted; `judged_of(children)`: odds and residual."""
    found = 0.0
    for children, mass in draws.items():
        odds, refused = judged_of(children)[0], 1.0
        for chance in odds:
            refused *= 1.0 - float(chance)
        found += float(mass) * (1.0 - refused)
    return found


def test_kseq_accepts_what_the_least_threshold_does_and_no_more_than_the_optimum():
    """On random pairs, children of the root; the bound that `theory` gives holds and is close."""
    for seed in range(12):
        target, draft = (t[0] for t in tables(4, seed))
        for count in (1, 2, 3):
            parents = [-1] + [0] * count
            trees = independent_trees([draft] * 4, parents)
            ours = judged_by_ours(kseq, [target] * 4, [draft] * 4, parents, trees, DrawScheme.INDEPENDENT)
            got = sum(
                float(m) * (1 - np.prod([1 - c for c in of(0)[0]])) for (_, _, m), of in zip(trees, ours, strict=True)
            )
            rho = kseq_oracle.least_rho(target, draft, count)
            draws = optimal_oracle.node_draws(draft, count, optimal_oracle.INDEPENDENT)
            wanted = accepted_first(draws, lambda x, rho=rho, p=target, q=draft: kseq_oracle.kseq_node(p, q, x, rho))
            assert abs(got - wanted) < 1e-5
            best = float(optimal_oracle.best_subset(target, draws))
            assert got <= best + EXACT and got >= (1 - 1 / np.e) * best


def test_a_threshold_may_be_too_large_but_not_too_small(monkeypatch):
    """rho = k costs acceptance alone; rho = 1, the chain rule for every child, is not lossless for two."""
    vocab, parents = KSEQ_LAYOUTS["three"]
    target, draft = tables(vocab, 1)
    trees = independent_trees(draft, parents)

    def ours() -> float:
        judged = judged_by_ours(kseq, target, draft, parents, trees, DrawScheme.INDEPENDENT)
        return distance(target, parents, emitted_one_by_one(parents, trees, judged))

    monkeypatch.setattr(kseq_lib, "threshold", lambda target, draft, num_children: num_children)
    assert ours() < EXACT
    monkeypatch.setattr(kseq_lib, "threshold", lambda target, draft, num_children: jnp.ones_like(num_children))
    assert ours() > 1e-3


def test_the_enumeration_finds_swapped_draws_for_kseq():
    """Drawn without replacement, judged as if independent."""
    vocab, parents = KSEQ_LAYOUTS["three"]
    target, draft = tables(vocab, 1)
    trees = optimal_oracle.tree_draws(draft, ROOT, parents, optimal_oracle.WITHOUT_REPLACEMENT)
    ours = judged_by_ours(kseq, target, draft, parents, trees, DrawScheme.INDEPENDENT)
    assert distance(target, parents, emitted_one_by_one(parents, trees, ours)) > 1e-3


# --- block verification -----------------------------------------------------------------------------------------------


def chains(draft, length: int) -> Trees:
    return independent_trees(draft, [-1, *range(length)])


def block_of_chain(target, draft, tokens) -> tuple[list, list]:
    return kseq_oracle.block_chain([target[t] for t in tokens], [draft[t] for t in tokens[:-1]], tokens[1:])


def emitted_by_blocks(trees: Trees, chance_and_residuals: list[tuple[list, list]]) -> dict:
    emitted: dict = defaultdict(int)
    for (tokens, _, mass), (chances, residuals) in zip(trees, chance_and_residuals, strict=True):
        for text, p in kseq_oracle.deepest_wins(tokens[1:], chances, residuals).items():
            emitted[text] += mass * p if isinstance(p, Fraction | int) else float(mass) * p
    return emitted


def our_blocks(target, draft, trees: Trees, length: int) -> list[tuple[list, list]]:
    parents = [-1, *range(length)]
    judged = judged_by_ours(block, target, draft, parents, trees, DrawScheme.WITHOUT_REPLACEMENT)
    return [([of(n)[0][0] for n in range(length)], [of(n)[1] for n in range(length + 1)]) for of in judged]


@pytest.mark.parametrize("seed", [1, 2, 101])
@pytest.mark.parametrize(("vocab", "length"), [(3, 1), (3, 2), (3, 3), (2, 3)])
def test_block_verification_emits_exactly_the_distribution_of_the_target(vocab, length, seed):
    """The whole text of a round and what the target says then; in rational arithmetic, and ours in float64."""
    target, draft = tables(vocab, seed)
    trees, parents = chains(draft, length), [-1, *range(length)]
    exact = emitted_by_blocks(trees, [block_of_chain(target, draft, tokens) for tokens, _, _ in trees])
    assert sum(exact.values()) == 1 and distance(target, parents, exact) == 0
    ours = emitted_by_blocks(trees, our_blocks(target, draft, trees, length))
    assert distance(target, parents, ours) < EXACT


def mean_length(emitted: dict) -> float:
    return float(sum(p * (len(text) - 1) for text, p in emitted.items()))


def test_a_block_never_accepts_less_than_a_chain_token_by_token():
    """The expected number of accepted drafts over 24 random pairs; more for most of them, and equal for one draft."""
    gains = []
    for seed in range(24):
        length = 1 + seed % 3
        target, draft = tables(3, seed)
        trees, parents = chains(draft, length), [-1, *range(length)]
        whole = mean_length(emitted_by_blocks(trees, our_blocks(target, draft, trees, length)))
        token_by_token = functools.partial(recursion, max_children=1)
        judged = judged_by_ours(token_by_token, target, draft, parents, trees, DrawScheme.INDEPENDENT)
        gains.append((length, whole - mean_length(emitted_one_by_one(parents, trees, judged))))
    assert min(gain for _, gain in gains) > -EXACT
    assert max(abs(gain) for length, gain in gains if length == 1) < EXACT
    assert np.mean([gain > 1e-4 for length, gain in gains if length > 1]) > 0.9


@pytest.mark.parametrize("mutant", ["bold", "plain rest"])
def test_the_enumeration_finds_wrong_blocks(mutant):
    """The weight of the last draft as the chance of all, and the rest of p in place of that of w p."""
    worst = 0.0
    for seed in (1, 2, 3):
        target, draft = tables(3, seed)
        trees, found = chains(draft, 2), []
        for tokens, _, _ in trees:
            chances, residuals = block_of_chain(target, draft, tokens)
            if mutant == "bold":
                chances = chances[-1:] * 2
            else:
                rests = [kseq_oracle.positive_part(target[t], draft[t]) for t in tokens[:2]]
                residuals = [*([r / sum(rest) for r in rest] for rest in rests), residuals[-1]]
            found.append((chances, residuals))
        worst = max(worst, distance(target, [-1, 0, 1], emitted_by_blocks(trees, found)))
    assert worst > 1e-3


def test_a_chain_that_is_cut_is_a_shorter_chain():
    """Levels without drafts, as reuse leaves them: the last draft there is is judged as the last."""
    target, draft = tables(3, 1)
    trees = [(tokens, [True, True, False, False], mass) for tokens, _, mass in chains(draft, 3)]
    judged = judged_by_ours(block, target, draft, [-1, 0, 1, 2], trees, DrawScheme.WITHOUT_REPLACEMENT)
    emitted: dict = defaultdict(float)
    for (tokens, _, mass), of in zip(trees, judged, strict=True):
        for text, p in kseq_oracle.deepest_wins(tokens[1:2], of(0)[0], [of(0)[1], of(1)[1]]).items():
            emitted[text] += float(mass) * p
    assert distance(target, [-1, 0], emitted) < EXACT


def test_block_verification_refuses_wider_trees():
    for tree in (TreeConfig(8, 5, 3), TreeConfig(branching=(2, 1))):
        with pytest.raises(ValueError, match=rf"block_verification'.*{tree.name}: .*chains"):
            make_rule("block_verification", tree)
    assert make_rule("block_verification", TreeConfig(branching=(1, 1))).name == "block_verification"


# --- likeliest tokens and one drawn child -----------------------------------------------------------------------------

TOP_LAYOUTS = {  # vocabulary, parents
    "one": (4, [-1, 0]),
    "chain": (3, [-1, 0, 1, 2]),
    "two": (4, [-1, 0, 0]),
    "three": (5, [-1, 0, 0, 0]),
    "levels": (4, [-1, 0, 0, 1, 1, 2, 2]),
    "uneven": (4, [-1, 0, 0, 0, 2, 2]),
    "whole vocabulary": (3, [-1, 0, 0, 0]),
}
ours_of_top = functools.partial(chain_and_match, max_children=3)


def top_trees(draft, parents) -> Trees:
    return optimal_oracle.tree_draws(draft, ROOT, parents, optimal_oracle.TOP_THEN_RANDOM)


def top_by_oracle(target, draft, parents, trees: Trees) -> list[Judged]:
    def of(tokens, valid) -> Judged:
        def judged(node):
            children = [tokens[c] for c in recursive_oracle.children_of(parents, valid, node)]
            if not children:
                return [], target[tokens[node]]
            count = parents.count(node)
            return optimal_oracle.chain_and_match(target[tokens[node]], draft[tokens[node]], children, count)

        return judged

    return [of(tokens, valid) for tokens, valid, _ in trees]


@pytest.mark.parametrize("seed", [1, 101, 201])
@pytest.mark.parametrize("layout", TOP_LAYOUTS)
def test_the_optimal_rule_emits_exactly_the_distribution_of_the_target(layout, seed):
    """On one level and on two, also where a node has fewer tokens to draft than children, or none off the top."""
    vocab, parents = TOP_LAYOUTS[layout]
    target, draft = tables(vocab, seed)
    trees = top_trees(draft, parents)
    assert sum(mass for _, _, mass in trees) == 1
    exact = emitted_one_by_one(parents, trees, top_by_oracle(target, draft, parents, trees))
    assert distance(target, parents, exact) == 0
    ours = judged_by_ours(ours_of_top, target, draft, parents, trees, DrawScheme.TOP_THEN_RANDOM)
    assert distance(target, parents, emitted_one_by_one(parents, trees, ours)) < EXACT


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_optimal_rule_accepts_what_no_rule_can_beat(count):
    for seed in (0, 1, 2, 3, 101, 201):
        target, draft = tables(5, seed)
        parents = [-1] + [0] * count
        trees = top_trees(draft, parents)
        ours = judged_by_ours(ours_of_top, target, draft, parents, trees, DrawScheme.TOP_THEN_RANDOM)
        got = sum(
            float(mass) * (1 - np.prod([1 - chance for chance in of(ROOT)[0]]))
            for (_, _, mass), of in zip(trees, ours, strict=True)
        )
        draws = optimal_oracle.node_draws(draft[ROOT], count, optimal_oracle.TOP_THEN_RANDOM)
        assert abs(got - float(optimal_oracle.best_subset(target[ROOT], draws))) < EXACT


def test_one_child_is_the_chain_rule():
    target, draft = tables(4, 1)
    trees = top_trees(draft, [-1, 0])
    ours = judged_by_ours(ours_of_top, target, draft, [-1, 0], trees, DrawScheme.TOP_THEN_RANDOM)
    chain = judged_by_ours(
        functools.partial(recursion, max_children=1), target, draft, [-1, 0], trees, DrawScheme.INDEPENDENT
    )
    for one, other in zip(ours, chain, strict=True):
        np.testing.assert_allclose(one(0)[0], other(0)[0], rtol=1e-12)
        np.testing.assert_allclose(one(0)[1], other(0)[1], rtol=1e-12)


def pruned(trees: Trees, parents, draft) -> Trees:
    """Without the random child of the root, where the drafter finds it unlikely: it was looked at."""
    return [
        (tokens, [v and not (n == 1 and draft[ROOT][tokens[1]] < Fraction(1, 5)) for n, v in enumerate(valid)], mass)
        for tokens, valid, mass in trees
    ]


@pytest.mark.parametrize("layout", ["two", "three", "levels"])
def test_the_enumeration_finds_mutants_of_top_then_random(layout):
    """The random child pruned after the draw; trees judged as drawn without replacement, or drawn so."""
    vocab, parents = TOP_LAYOUTS[layout]
    target, draft = tables(vocab, 2)
    trees = top_trees(draft, parents)

    def of(rule, trees, scheme=DrawScheme.TOP_THEN_RANDOM):
        judged = judged_by_ours(rule, target, draft, parents, trees, scheme)
        return distance(target, parents, emitted_one_by_one(parents, trees, judged))

    assert of(ours_of_top, trees) < EXACT
    if layout != "levels":  # there an invalid node has children
        assert of(ours_of_top, pruned(trees, parents, draft)) > 1e-3
    assert of(functools.partial(recursion, max_children=3), trees, DrawScheme.WITHOUT_REPLACEMENT) > 1e-3
    drawn = optimal_oracle.tree_draws(draft, ROOT, parents, optimal_oracle.WITHOUT_REPLACEMENT)
    assert of(ours_of_top, drawn) > 1e-3


# --- the compiled loop ------------------------------------------------------------------------------------------------

CHAIN = TreeConfig(nodes=4, depth=3, width=1)
LOOPS = {  # rule, scheme, tree
    "optimal": ("optimal", DrawScheme.TOP_THEN_RANDOM, TREES["branching"]),
    "kseq": ("kseq", DrawScheme.INDEPENDENT, TREES["branching"]),
    "block": ("block_verification", DrawScheme.WITHOUT_REPLACEMENT, CHAIN),
    "uneven": ("optimal", DrawScheme.TOP_THEN_RANDOM, TREES["deep"]),
    "chain": ("optimal", DrawScheme.TOP_THEN_RANDOM, CHAIN),
}


@pytest.mark.parametrize(
    "name", ["optimal", *(pytest.param(name, marks=pytest.mark.slow) for name in ("block", "kseq", "uneven", "chain"))]
)
def test_the_compiled_loop_follows_the_distribution_of_the_target(name):
    """Several rounds, filtered rows included. Eight chi-squares a case, each of which fires falsely once in 10^6."""
    accept, scheme, tree = LOOPS[name]
    assert min(p_values(tiny_texts(tree, scheme, accept=accept))) > FALSE_ALARM


@pytest.mark.slow
def test_block_verification_of_a_small_language_model_follows_the_target():
    texts = tiny_texts(CHAIN, DrawScheme.INDEPENDENT, pair=tiny_small_lm, accept="block_verification")
    assert min(p_values(texts)) > FALSE_ALARM


def without_unlikely(drafter: Drafter) -> Drafter:
    """The root's random child pruned after the draw where it is the token that the drafter finds least likely."""

    def draft(models, state, *rest):
        tree, state = drafter.draft(models, state, *rest)
        logp = jnp.take_along_axis(tree.draft_logp[:, 0], tree.tokens[:, 1:2], 1)[:, 0]
        is_likelier = logp > jnp.min(tree.draft_logp[:, 0], -1)
        return tree.replace(valid=tree.valid.at[:, 1].set(tree.valid[:, 1] & is_likelier)), state

    return drafter._replace(draft=draft)


def as_if_without_replacement(drafter: Drafter) -> Drafter:
    """Says that its trees were drawn without replacement."""

    def draft(models, state, *rest):
        tree, state = drafter.draft(models, state, *rest)
        return tree.replace(scheme=DrawScheme.WITHOUT_REPLACEMENT), state

    return drafter._replace(draft=draft, scheme=DrawScheme.WITHOUT_REPLACEMENT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "accept"), [(without_unlikely, "optimal"), (as_if_without_replacement, "recursive")]
)
def test_the_chi_square_finds_mutants(mutant, accept):
    tree = TreeConfig(branching=(3,))
    assert min(p_values(tiny_texts(tree, DrawScheme.TOP_THEN_RANDOM, mutant, accept=accept))) < FALSE_ALARM


# --- which rule may judge what ----------------------------------------------------------------------------------------

LEGAL = {
    "match": set(DrawScheme),
    "recursive": {DrawScheme.INDEPENDENT, DrawScheme.WITHOUT_REPLACEMENT},
    "optimal": {DrawScheme.TOP_THEN_RANDOM},
    "kseq": {DrawScheme.INDEPENDENT},
    "block_verification": {DrawScheme.INDEPENDENT, DrawScheme.WITHOUT_REPLACEMENT},
}


@pytest.mark.parametrize("name", RULES)
def test_illegal_pairs_are_refused(name):
    assert name in LEGAL, f"LEGAL does not say for which schemes the rule {name!r} is lossless"
    rule = make_rule(name, TreeConfig(3, 2, 1))
    for scheme in DrawScheme:
        if scheme in LEGAL[name]:
            check_legal(rule, scheme)
            continue
        with pytest.raises(ValueError, match=rf"accept='{name}'.*draw='{scheme.value}'"):
            check_legal(rule, scheme)
