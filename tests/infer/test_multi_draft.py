"""The rules for drawn trees: their distributions by enumeration, the compiled loop against the target, and mutants to
be found."""

from __future__ import annotations

import functools
from collections import defaultdict
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import distribution as distribution_oracle
from oracles import kseq as kseq_oracle
from oracles import optimal as optimal_oracle
from oracles import recursive as recursive_oracle
from support.cases import cases
from support.rules import Judged, Trees, depths_of, emitted_one_by_one, judged_by_ours
from support.tiny_pairs import FALSE_ALARM, TREES, p_values, tiny_pair, tiny_small_lm, tiny_texts

from hsd_jax.config import NO_REUSE, ReuseConfig, TreeConfig
from hsd_jax.infer.round import make_step
from hsd_jax.infer.rules import accept as accept_lib
from hsd_jax.infer.rules import kseq as kseq_lib
from hsd_jax.infer.rules.accept import recursion
from hsd_jax.infer.rules.block import block
from hsd_jax.infer.rules.kseq import kseq
from hsd_jax.infer.rules.optimal import chain_and_match
from hsd_jax.infer.rules.table import RULES, make_rule
from hsd_jax.types import Drafter, DrawScheme

ROOT, EXACT = 0, 1e-12
INDEPENDENT, WITHOUT_REPLACEMENT, TOP_THEN_RANDOM = (
    DrawScheme.INDEPENDENT,
    DrawScheme.WITHOUT_REPLACEMENT,
    DrawScheme.TOP_THEN_RANDOM,
)

# --- enumeration ------------------------------------------------------------------------------------------------------

LAYOUTS = {  # vocabulary, parents
    "chain": (5, [-1, 0, 1, 2]),
    "two": (4, [-1, 0, 0]),
    "three": (4, [-1, 0, 0, 0]),
    "fork": (3, [-1, 0, 0, 1, 1, 2, 2]),
    "wide": (4, [-1, 0, 0, 0, 2, 2]),
    "whole vocabulary": (3, [-1, 0, 0, 0, 1]),
}
MOST = 3
"""Children of a node."""
SEEDS = [(1, 51), *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in ((101, 51), (1, 151), (1, 251)))]
"""Of the target's and the drafter's table; from 100 on a token has no mass, from 200 on only two tokens have any."""
CHAIN_SEEDS = [(1, 51), *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in ((2, 52), (101, 51)))]

OURS = {
    "recursive": functools.partial(recursion, max_children=MOST),
    "kseq": kseq,
    "optimal": functools.partial(chain_and_match, max_children=MOST),
}
PAPERS = {
    "recursive": lambda p, q, children, count, scheme: recursive_oracle.judge_node(p, q, children, scheme.value),
    "kseq": lambda p, q, children, *_: kseq_oracle.kseq_node(
        p, q, children, kseq_oracle.least_rho(p, q, len(children))
    ),
    "optimal": lambda p, q, children, count, _: optimal_oracle.chain_and_match(p, q, children, count),
}
CASES = [
    (rule, scheme, layout)
    for rule, schemes in (
        ("recursive", (INDEPENDENT, WITHOUT_REPLACEMENT)),
        ("kseq", (INDEPENDENT,)),
        ("optimal", (TOP_THEN_RANDOM,)),
    )
    for scheme in schemes
    for layout in LAYOUTS
]


def tables(vocab: int, seeds: tuple[int, int]) -> tuple[list, list]:
    """The target's and the drafter's."""
    return distribution_oracle.markov_table(vocab, seeds[0]), distribution_oracle.markov_table(vocab, seeds[1])


def trees_of(draft, parents, scheme: DrawScheme) -> Trees:
    return optimal_oracle.tree_draws(draft, ROOT, parents, scheme.value)


def distance(target, parents, emitted) -> float | Fraction:
    """Total variation between texts that start with `emitted` and texts of the target alone."""
    return distribution_oracle.distance(target, ROOT, max(depths_of(parents)) + 1, emitted)


def judged_by_paper(rule: str, target, draft, parents, trees: Trees, scheme: DrawScheme) -> list[Judged]:
    def of(tokens, valid) -> Judged:
        def judged(node):
            p, children = target[tokens[node]], recursive_oracle.children_of(parents, valid, node)
            if not children:
                return [], p
            count = parents.count(node)
            return PAPERS[rule](p, draft[tokens[node]], [tokens[c] for c in children], count, scheme)

        return judged

    return [of(tokens, valid) for tokens, valid, _ in trees]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("rule", "scheme", "layout"), CASES)
def test_a_rule_emits_exactly_the_distribution_of_the_target(rule, scheme, layout, seeds):
    """The paper's algorithm in rational arithmetic, where the distance is zero, and ours in float64, with its odds.

    On one level and on several, also where a node has fewer tokens to draft than children.
    """
    vocab, parents = LAYOUTS[layout]
    target, draft = tables(vocab, seeds)
    trees = trees_of(draft, parents, scheme)
    papers = judged_by_paper(rule, target, draft, parents, trees, scheme)
    exact = emitted_one_by_one(parents, trees, papers)
    assert sum(exact.values()) == 1 and distance(target, parents, exact) == 0
    ours = judged_by_ours(OURS[rule], target, draft, parents, trees, scheme)
    assert distance(target, parents, emitted_one_by_one(parents, trees, ours)) < EXACT
    for one, other in zip(ours, papers, strict=True):  # the thresholds of K-SEQ are halved 20 times
        np.testing.assert_allclose(
            one(ROOT)[0], np.array(other(ROOT)[0], float), atol=1e-5 if rule == "kseq" else EXACT
        )


def our_distance(rule: str, layout: str, drawn: DrawScheme, judged_as: DrawScheme) -> float:
    vocab, parents = LAYOUTS[layout]
    target, draft = tables(vocab, (1, 51))
    trees = trees_of(draft, parents, drawn)
    ours = judged_by_ours(OURS[rule], target, draft, parents, trees, judged_as)
    return float(distance(target, parents, emitted_one_by_one(parents, trees, ours)))


@pytest.mark.parametrize(
    ("rule", "drawn", "judged_as"),
    [
        ("recursive", INDEPENDENT, WITHOUT_REPLACEMENT),
        ("recursive", WITHOUT_REPLACEMENT, INDEPENDENT),
        ("kseq", WITHOUT_REPLACEMENT, INDEPENDENT),
        ("optimal", WITHOUT_REPLACEMENT, TOP_THEN_RANDOM),
    ],
)
def test_the_enumeration_finds_draws_under_another_scheme(rule, drawn, judged_as):
    assert our_distance(rule, "three", drawn, judged_as) > 1e-3


def test_the_enumeration_finds_a_residual_that_is_not_normalised(monkeypatch):
    monkeypatch.setattr(accept_lib, "normalised", lambda rest, otherwise: rest)
    assert our_distance("recursive", "fork", INDEPENDENT, INDEPENDENT) > 1e-3


def test_a_threshold_of_kseq_may_be_too_large_but_not_too_small(monkeypatch):
    """rho = k costs acceptance alone; rho = 1, the chain rule for every child, is not lossless for two."""
    monkeypatch.setattr(kseq_lib, "threshold", lambda target, draft, num_children: jnp.maximum(num_children, 1.0))
    assert our_distance("kseq", "three", INDEPENDENT, INDEPENDENT) < EXACT
    monkeypatch.setattr(kseq_lib, "threshold", lambda target, draft, num_children: jnp.ones_like(num_children))
    assert our_distance("kseq", "three", INDEPENDENT, INDEPENDENT) > 1e-3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_optimal_rule_accepts_what_no_rule_can_beat(count):
    for seeds in ((0, 50), (1, 51), (1, 151), (1, 251)):
        target, draft = tables(5, seeds)
        parents = [-1] + [0] * count
        trees = trees_of(draft, parents, TOP_THEN_RANDOM)
        ours = judged_by_ours(OURS["optimal"], target, draft, parents, trees, TOP_THEN_RANDOM)
        got = sum(
            float(mass) * (1 - np.prod([1 - chance for chance in of(ROOT)[0]]))
            for (_, _, mass), of in zip(trees, ours, strict=True)
        )
        draws = optimal_oracle.node_draws(draft[ROOT], count, optimal_oracle.TOP_THEN_RANDOM)
        assert abs(got - float(optimal_oracle.best_subset(target[ROOT], draws))) < EXACT


# --- block verification -----------------------------------------------------------------------------------------------


def emitted_by_blocks(trees: Trees, chance_and_residuals: list[tuple[list, list]]) -> dict:
    emitted: dict = defaultdict(int)
    for (tokens, valid, mass), (chances, residuals) in zip(trees, chance_and_residuals, strict=True):
        for text, p in kseq_oracle.deepest_wins(tokens[1 : sum(valid)], chances, residuals).items():
            emitted[text] += mass * p if isinstance(p, Fraction | int) else float(mass) * p
    return emitted


def blocks_by_paper(target, draft, trees: Trees) -> list[tuple[list, list]]:
    return [
        kseq_oracle.block_chain([target[t] for t in tokens], [draft[t] for t in tokens[:-1]], tokens[1:])
        for tokens, _, _ in trees
    ]


def blocks_by_ours(target, draft, trees: Trees) -> list[tuple[list, list]]:
    parents = [-1, *range(len(trees[0][0]) - 1)]
    judged = judged_by_ours(block, target, draft, parents, trees, WITHOUT_REPLACEMENT)
    lengths = [sum(valid) - 1 for _, valid, _ in trees]
    return [
        ([of(n)[0][0] for n in range(length)], [of(n)[1] for n in range(length + 1)])
        for of, length in zip(judged, lengths, strict=True)
    ]


@pytest.mark.parametrize("seeds", CHAIN_SEEDS)
@pytest.mark.parametrize(("vocab", "length"), [(3, 1), (3, 2), (3, 3), (2, 3)])
def test_block_verification_emits_exactly_the_distribution_of_the_target(vocab, length, seeds):
    """The whole text of a round and what the target says then; in rational arithmetic, and ours in float64.

    A chain that is cut, as reuse leaves it, is a shorter chain.
    """
    target, draft = tables(vocab, seeds)
    parents = [-1, *range(length)]
    trees = trees_of(draft, parents, INDEPENDENT)
    papers = blocks_by_paper(target, draft, trees)
    exact = emitted_by_blocks(trees, papers)
    assert sum(exact.values()) == 1 and distance(target, parents, exact) == 0
    ours = blocks_by_ours(target, draft, trees)
    assert distance(target, parents, emitted_by_blocks(trees, ours)) < EXACT
    for (one, _), (other, _) in zip(ours, papers, strict=True):
        np.testing.assert_allclose(one, np.array(other, float), atol=EXACT)
    cut = [(tokens, [True] * length + [False], mass) for tokens, _, mass in trees]
    assert distance(target, parents, emitted_by_blocks(cut, blocks_by_ours(target, draft, cut))) < EXACT


def test_the_enumeration_finds_blocks_whose_residual_lacks_the_weight():
    """The rest of p in place of that of w p; whether it shows depends on the tables."""
    worst = 0.0
    for seeds in ((1, 51), (2, 52), (3, 53)):
        target, draft = tables(3, seeds)
        rests = [kseq_oracle.positive_part(p, q) for p, q in zip(target, draft, strict=True)]
        trees = trees_of(draft, [-1, 0, 1], INDEPENDENT)
        mutants = [
            (chances, [[r / sum(rests[t]) for r in rests[t]] for t in tokens[:-1]] + residuals[-1:])
            for (tokens, _, _), (chances, residuals) in zip(trees, blocks_by_paper(target, draft, trees), strict=True)
        ]
        worst = max(worst, distance(target, [-1, 0, 1], emitted_by_blocks(trees, mutants)))
    assert worst > 1e-3


# --- the compiled loop ------------------------------------------------------------------------------------------------

CHAIN = TreeConfig(nodes=4, depth=3, width=1)
LOOPS = [  # rule, scheme, tree, pair, reuse
    ("recursive", WITHOUT_REPLACEMENT, TREES["wide"], tiny_pair, NO_REUSE),
    ("recursive", WITHOUT_REPLACEMENT, TREES["branching"], tiny_pair, NO_REUSE),
    ("optimal", TOP_THEN_RANDOM, TREES["branching"], tiny_pair, NO_REUSE),
    ("recursive", WITHOUT_REPLACEMENT, TREES["deep"], tiny_pair, NO_REUSE),
    ("recursive", WITHOUT_REPLACEMENT, TREES["deep"], tiny_pair, ReuseConfig("sum")),
    ("recursive", WITHOUT_REPLACEMENT, TREES["deep"], tiny_pair, ReuseConfig("skip")),
    ("recursive", INDEPENDENT, TREES["wide"], tiny_pair, NO_REUSE),
    ("recursive", INDEPENDENT, TREES["branching"], tiny_pair, NO_REUSE),
    ("recursive", WITHOUT_REPLACEMENT, CHAIN, tiny_small_lm, NO_REUSE),
    ("optimal", TOP_THEN_RANDOM, TREES["deep"], tiny_pair, NO_REUSE),
    ("kseq", INDEPENDENT, TREES["branching"], tiny_pair, NO_REUSE),
    ("block_verification", WITHOUT_REPLACEMENT, CHAIN, tiny_pair, NO_REUSE),
    ("block_verification", INDEPENDENT, CHAIN, tiny_small_lm, NO_REUSE),
]


@pytest.mark.parametrize(
    ("accept", "scheme", "tree", "pair", "reuse"),
    cases(LOOPS, slow=LOOPS[1:]),
)
def test_the_compiled_loop_follows_the_distribution_of_the_target(accept, scheme, tree, pair, reuse):
    """Several rounds, filtered rows included. Eight chi-squares a case, each of which fires falsely once in 10^6."""
    assert min(p_values(tiny_texts(tree, scheme, pair=pair, reuse=reuse, accept=accept))) > FALSE_ALARM


# --- which rule may judge what ----------------------------------------------------------------------------------------

LEGAL = {
    "match": set(DrawScheme),
    "recursive": {INDEPENDENT, WITHOUT_REPLACEMENT},
    "optimal": {TOP_THEN_RANDOM},
    "kseq": {INDEPENDENT},
    "block_verification": {INDEPENDENT, WITHOUT_REPLACEMENT},
}


@pytest.mark.parametrize("name", RULES)
def test_other_schemes_and_trees_are_refused(name):
    rule, config = make_rule(name, TreeConfig(3, 2, 1)), tiny_pair()[0]
    for scheme in DrawScheme:
        drafter = Drafter(*[lambda *_: None] * 4, scheme, 2)
        if scheme in LEGAL[name]:
            make_step(config, drafter, rule)
            continue
        with pytest.raises(ValueError, match=rf"accept='{name}'.*draw='{scheme.value}'"):
            make_step(config, drafter, rule)
    if name == "block_verification":
        with pytest.raises(ValueError, match="chains"):
            make_rule(name, TreeConfig(branching=(2, 1)))
