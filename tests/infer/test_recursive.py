"""The recursive rule: its distribution by enumeration, the compiled loop against that distribution, and mutants to be
found."""

from __future__ import annotations

import functools
from collections import defaultdict
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import distribution as distribution_oracle
from oracles import recursive as oracle
from oracles import sampling as sampling_oracle
from support import calls, setups
from support.cases import cases
from support.rules import depths_of
from support.texts import first_difference
from support.tiny_pairs import FALSE_ALARM, TREES, p_values, tiny_small_lm, tiny_texts

from hsd_jax.config import ReuseConfig, TreeConfig
from hsd_jax.infer import accept as accept_lib
from hsd_jax.infer import draw
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.accept import coins_of, recursion, recursive_rule
from hsd_jax.infer.tree import ancestor_mask
from hsd_jax.types import Drafter, DraftTree, DrawScheme, SamplingParams

SCHEMES = {x: DrawScheme(x) for x in (oracle.INDEPENDENT, oracle.WITHOUT_REPLACEMENT)}

# --- enumeration ------------------------------------------------------------------------------------------------------


LAYOUTS = {  # vocabulary, parents, valid
    "chain": (5, [-1, 0, 1, 2], [True] * 4),
    "fork": (3, [-1, 0, 0, 1, 1, 2, 2], [True] * 7),
    "wide": (4, [-1, 0, 0, 0, 2, 2], [True] * 6),
    "five": (5, [-1, 0, 0, 2, 2], [True] * 5),
    "whole vocabulary": (3, [-1, 0, 0, 0, 1], [True] * 5),
    "padding behind siblings": (4, [-1, 0, 0, 1, 0], [True, True, True, True, False]),
    "padding between siblings": (4, [-1, 0, 0, 0, 1], [True, True, False, True, True]),
}
ROOT = 0


@functools.cache
def enumerated(layout: str, draws: str, seed: int):
    """Both tables, and every tree that drawing can give with its probability."""
    vocab, parents, valid = LAYOUTS[layout]
    target, draft = (distribution_oracle.markov_table(vocab, s) for s in (seed, seed % 100 + 50))
    return target, draft, parents, valid, list(oracle.tree_draws(draft, ROOT, parents, draws))


def oracle_distance(layout: str, draws: str, judged_as: str, seed: int, prune=None) -> Fraction:
    """The oracle's distance, in rational arithmetic, over all trees and all coins."""
    target, draft, parents, valid, trees = enumerated(layout, draws, seed)
    emitted: dict = defaultdict(Fraction)
    for tokens, mass in trees:
        kept = valid if prune is None else prune(tokens, parents, valid, draft)

        def judged(node, tokens=tokens, kept=kept):
            children = [tokens[c] for c in oracle.children_of(parents, kept, node)]
            return oracle.judge_node(target[tokens[node]], draft[tokens[node]], children, judged_as)

        for text, p in oracle.verdict_distribution(tokens, parents, kept, judged).items():
            emitted[text] += mass * p
    assert sum(emitted.values()) == 1
    return distribution_oracle.distance(target, ROOT, max(depths_of(parents)) + 1, emitted)


def interior(parents) -> int:
    return max(parents) + 1


def jitted_recursion(tree: DraftTree, target_logp: np.ndarray):
    """Traced anew each time, so that a mutant is seen."""
    return jax.jit(lambda tree, target_logp: recursion(tree, target_logp, max_children=3))(tree, target_logp)


def our_distance(layout: str, draws: str, judged_as: str, seed: int, prune=None) -> float:
    """The same distance of the rule under test: its acceptance and residuals for all trees in one batch, in float64."""
    target, draft, parents, valid, trees = enumerated(layout, draws, seed)
    tokens = np.array([t for t, _ in trees], np.int32)
    kept = np.array([valid if prune is None else prune(t, parents, valid, draft) for t, _ in trees])
    with np.errstate(divide="ignore"):
        logs = [np.log(np.array(t, float)) for t in (target, draft)]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        rows = functools.partial(np.broadcast_to, shape=tokens.shape)
        tree = DraftTree(
            jnp.asarray(tokens),
            jnp.asarray(rows(np.array(parents, np.int32))),
            jnp.asarray(rows(np.array(depths_of(parents), np.int32))),
            jnp.asarray(kept),
            jnp.asarray(logs[1][tokens[:, : interior(parents)]]),
            SCHEMES[judged_as],
        )
        acceptance, residual = map(np.asarray, jitted_recursion(tree, logs[0][tokens]))
    assert acceptance.dtype == residual.dtype == np.float64
    residual = residual / np.maximum(residual.sum(-1, keepdims=True), 1e-300)  # as drawing by Gumbel-max does
    emitted: dict = defaultdict(float)
    for row, (drawn, mass) in enumerate(trees):

        def judged(node, row=row, drawn=drawn):
            if node >= interior(parents):
                return [], [float(p) for p in target[drawn[node]]]
            return [acceptance[row, c] for c in oracle.children_of(parents, kept[row], node)], residual[row, node]

        for text, p in oracle.verdict_distribution(drawn, parents, kept[row], judged).items():
            emitted[text] += float(mass) * p
    return float(distribution_oracle.distance(target, ROOT, max(depths_of(parents)) + 1, emitted))


EXACT = 1e-12
CASES = [(layout, draws, seed) for layout in LAYOUTS for draws in SCHEMES for seed in (1, 101)]
# A sibling missing from the middle: drawn without replacement, the next one would not follow the distribution without
# it.
CASES = [case for case in CASES if case[:2] != ("padding between siblings", oracle.WITHOUT_REPLACEMENT)]


@pytest.mark.parametrize(("layout", "draws", "seed"), cases(CASES, slow=[case for case in CASES if case[2] == 101]))
def test_legal_pairs_emit_exactly_the_distribution_of_the_target(layout, draws, seed):
    """The recursion of the papers in rational arithmetic, where the distance is zero, and ours in float64."""
    assert oracle_distance(layout, draws, draws, seed) == 0
    assert our_distance(layout, draws, draws, seed) < EXACT


def prune_to_likeliest(tokens, parents, valid, draft):
    """Of siblings only the one the drafter likes best: a choice that looks at what was drawn."""
    kept = list(valid)
    for node in range(1, len(tokens)):
        distribution = draft[tokens[parents[node]]]
        others = [n for n in oracle.children_of(parents, valid, parents[node]) if n != node]
        if any((distribution[tokens[n]], -n) > (distribution[tokens[node]], -node) for n in others):
            kept[node] = False
    return [k and (p < 1 or kept[p]) for k, p in zip(kept, parents, strict=True)]


def prune_to_first(tokens, parents, valid, draft):
    """Of siblings only the first: a choice that does not look."""
    return [v and parents.index(p) == n for n, (v, p) in enumerate(zip(valid, parents, strict=True))]


@pytest.mark.parametrize("draws", SCHEMES)
def test_enumeration_finds_swapped_distributions(draws):
    """Children drawn under one distribution and judged under the other: off by at least 1 in 1,000, in both
    implementations."""
    (other,) = set(SCHEMES) - {draws}
    for layout in ("fork", "wide", "five"):
        assert oracle_distance(layout, draws, other, 1) > 1e-3
        assert our_distance(layout, draws, other, 1) > 1e-3


@pytest.mark.parametrize("draws", SCHEMES)
@pytest.mark.parametrize("layout", ["fork", "five"])
def test_enumeration_finds_pruned_trees(layout, draws):
    assert our_distance(layout, draws, draws, 1, prune_to_first) < EXACT
    assert our_distance(layout, draws, draws, 1, prune_to_likeliest) > 0.01


RIGHT_RESIDUAL = accept_lib.after_rejection
WRONG_RESIDUALS = {
    "not normalised": lambda residual, proposal: jnp.maximum(residual - proposal, 0.0),
    "the target again": lambda residual, proposal: residual,
    "other way round": lambda residual, proposal: RIGHT_RESIDUAL(proposal, residual),
}


@pytest.mark.parametrize("name", WRONG_RESIDUALS)
@pytest.mark.parametrize("draws", SCHEMES)
def test_enumeration_finds_wrong_residuals(monkeypatch, name, draws):
    monkeypatch.setattr(accept_lib, "after_rejection", WRONG_RESIDUALS[name])
    for layout in ("fork", "five"):
        assert our_distance(layout, draws, draws, 1) > 1e-3


# --- one tree, one set of coins ---------------------------------------------------------------------------------------

NUM, MAX_DEPTH, BATCH, VOCAB = 9, 3, 200, 5
MAX_CHILDREN = 4


def random_trees(draws: str, seed: int):
    """Trees of any layout with distributions of any sharpness, their children truly drawn; target logits; settings."""
    rng = np.random.default_rng(seed)
    rows = []
    while len(rows) < BATCH:
        tokens, parents, depth = [int(rng.integers(VOCAB))], [-1], [0]
        logits = rng.normal(0, rng.choice([0.3, 1.0, 3.0]), (2, NUM, VOCAB)).astype(np.float32)
        draft = np.exp(logits[0]) / np.exp(logits[0]).sum(-1, keepdims=True)
        for parent in sorted(rng.integers(0, NUM - 1, NUM - 1)):
            elder = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
            if parent < len(tokens) and depth[parent] < MAX_DEPTH and len(elder) < MAX_CHILDREN:
                whole = draft[parent]
                distribution = whole if draws == oracle.INDEPENDENT else oracle.without(whole, elder)
                tokens.append(
                    int(rng.choice(VOCAB, p=np.array(distribution, float) / np.sum(distribution, dtype=float)))
                )
                parents.append(int(parent))
                depth.append(depth[parent] + 1)
        room = NUM - len(tokens)
        valid = [True] * len(tokens) + [False] * room
        rows.append((tokens + [0] * room, parents + [-1] * room, depth + [0] * room, valid, logits))
    columns = [np.array(x) for x in zip(*rows, strict=True)]
    tokens, parents, depth = (jnp.asarray(x, jnp.int32) for x in columns[:3])
    draft_logp = jax.nn.log_softmax(jnp.asarray(columns[4][:, 0]))
    tree = DraftTree(tokens, parents, depth, jnp.asarray(columns[3]), draft_logp, SCHEMES[draws])
    temperature = rng.choice([0.0, 0.5, 1.0, 1.3], BATCH)
    sampling = SamplingParams(
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(rng.choice([0, 0, 2, 3], BATCH), jnp.int32),
        jnp.asarray(rng.choice([1.0, 1.0, 0.7], BATCH), jnp.float32),
    )
    return rows, tree, jnp.asarray(columns[4][:, 1]), sampling


@functools.cache
def jitted_judge():
    rule = recursive_rule(MAX_DEPTH, MAX_CHILDREN)

    def judge(keys, tree, logits, sampling, position):
        return rule.judge(keys, tree, ancestor_mask(tree, MAX_DEPTH), logits, sampling, position)

    return jax.jit(judge)


def settings_of(sampling: SamplingParams, row: int) -> tuple[float, int | None, float | None]:
    top_k, top_p = int(sampling.top_k[row]), float(sampling.top_p[row])
    return float(sampling.temperature[row]), top_k or None, None if top_p == 1.0 else top_p


@pytest.mark.parametrize("draws", SCHEMES)
def test_verdicts_are_those_of_plain_loops(draws):
    """With the coins and the noise of the rule, filters and greedy rows included."""
    rows, tree, logits, sampling = random_trees(draws, 0)
    keys = jax.vmap(jax.random.key)(jnp.arange(BATCH, dtype=jnp.uint32))
    position = jnp.arange(BATCH, dtype=jnp.int32) % 50
    verdict = jax.tree.map(np.asarray, jitted_judge()(keys, tree, logits, sampling, position))
    coins = np.asarray(jax.jit(coins_of)(keys, tree, position))
    predicted = position[:, None] + jnp.arange(1, MAX_DEPTH + 2, dtype=jnp.int32)
    noise = np.asarray(sampling_lib.position_noise(keys, predicted, VOCAB))
    seen = set()
    for row, (tokens, parents, _, valid, _) in enumerate(rows):

        def judged(node, row=row, tokens=tokens, parents=parents, valid=valid):
            target = sampling_oracle.distribution(np.asarray(logits)[row, node], *settings_of(sampling, row))
            children = [tokens[c] for c in oracle.children_of(parents, valid, node)]
            return oracle.judge_node(target, np.exp(np.float64(tree.draft_logp[row, node])), children, draws)

        path, residual = oracle.walk(tokens, parents, valid, judged, coins[row])
        with np.errstate(divide="ignore"):
            next_token = int(np.argmax(np.log(residual) + noise[row, len(path) - 1]))
        found = int(verdict.num_accepted[row])
        assert verdict.path[row, : found + 1].tolist() == path
        assert verdict.emitted[row, : found + 1].tolist() == [*(tokens[n] for n in path[1:]), next_token]
        assert int(verdict.next_token[row]) == next_token
        seen.add((found, not oracle.children_of(parents, valid, path[-1])))
    assert {(0, False), (1, False), (2, False), (1, True), (2, True), (3, True)} <= seen


def test_one_child_a_node_is_standard_speculative_sampling():
    """min(1, p / q) and the normalised positive part of p - q (Leviathan et al., algorithm 1; Chen et al., 2)."""
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(VOCAB), (64, 3)) for _ in range(2))
    tokens = rng.integers(0, VOCAB, (64, 4)).astype(np.int32)
    line = np.broadcast_to(np.arange(4, dtype=np.int32), (64, 4))
    accept = np.minimum(1.0, np.take_along_axis(p / q, tokens[:, 1:, None], 2)[..., 0])
    rest = np.maximum(p - q, 0.0)
    rest /= rest.sum(-1, keepdims=True)
    target_logp = jnp.asarray(np.log(np.concatenate([p, p[:, :1]], 1)), jnp.float32)
    for scheme in SCHEMES.values():
        tree = DraftTree(
            *(jnp.asarray(x, jnp.int32) for x in (tokens, line - 1, line)),
            jnp.ones((64, 4), bool),
            jnp.asarray(np.log(q), jnp.float32),
            scheme,
        )
        acceptance, residual = jax.jit(functools.partial(recursion, max_children=1))(tree, target_logp)
        np.testing.assert_allclose(acceptance[:, 1:], accept, rtol=1e-5)
        np.testing.assert_allclose(residual, rest, atol=1e-5)
        assert not np.asarray(acceptance[:, 0]).any()


def test_twins_keep_their_own_children():
    """Of independent siblings with one token the accepted one goes on, not the one with the longer path."""
    tokens = jnp.array([[0, 1, 1, 2]], jnp.int32)  # two children hold 1; the second has a child
    parents, depth = jnp.array([[-1, 0, 0, 2]], jnp.int32), jnp.array([[0, 1, 1, 2]], jnp.int32)
    even = jnp.log(jnp.full((1, 3, 3), 1 / 3))
    tree = DraftTree(tokens, parents, depth, jnp.ones((1, 4), bool), even, DrawScheme.INDEPENDENT)
    ones = jnp.ones(1)
    sampling = SamplingParams(ones, jnp.zeros(1, jnp.int32), ones)
    rule = recursive_rule(2, 2)
    keys = jax.vmap(jax.random.key)(jnp.zeros(1, jnp.uint32))

    @jax.jit
    def judge(tree):
        position = jnp.zeros(1, jnp.int32)
        return rule.judge(keys, tree, ancestor_mask(tree, 2), jnp.zeros((1, 4, 3)), sampling, position)

    verdict = judge(tree)
    assert verdict.path[0, :2].tolist() == [0, 1] and int(verdict.num_accepted[0]) == 1


# --- noise ------------------------------------------------------------------------------------------------------------


def test_no_noise_serves_twice():
    """Keys of the target's draws, of drafting and of judging (three places each), and of single rounds, over rows and
    positions: all different."""
    positions = jnp.arange(40, dtype=jnp.int32)
    seen = []
    for seed in range(3):
        keys = jnp.broadcast_to(jax.random.key(seed), positions.shape)
        of_rounds = sampling_lib.round_row_keys(keys, positions)
        seen += [jax.vmap(jax.random.fold_in)(keys, positions), of_rounds]
        for rows in (keys, of_rounds):
            for tag in (sampling_lib.DRAFT_NOISE, sampling_lib.JUDGE_NOISE):
                seen.append(sampling_lib.place_keys(rows, tag, jnp.stack([positions] * 3, 1), jnp.arange(3)).ravel())
    data = np.concatenate([np.asarray(jax.random.key_data(k)) for k in seen])
    assert len(np.unique(data, axis=0)) == len(data)


def test_coins_and_drafts_are_those_of_their_absolute_position():
    """A token is drawn with the same noise and judged with the same coin whatever root its round started from; rules
    that look ahead see noise of their round alone."""
    depth = jnp.arange(4, dtype=jnp.int32)[None]
    tree = DraftTree(jnp.zeros_like(depth), depth - 1, depth, depth >= 0)
    keys, at = jax.vmap(jax.random.key)(jnp.arange(1)), lambda position: jnp.full(1, position, jnp.int32)
    here, later = (np.asarray(coins_of(keys, tree, at(position)))[0] for position in (7, 8))
    np.testing.assert_array_equal(here[2:], later[1:3])
    assert len(set(here)) == 4
    noise = [np.asarray(draw.level_noise(keys, (1, 1), at(position), 5, jnp.ones(1, bool)))[0] for position in (7, 8)]
    np.testing.assert_array_equal(noise[0][1], noise[1][0])
    rounds = [sampling_lib.round_row_keys(keys, at(position)) for position in (7, 8)]
    assert coins_of(rounds[0], tree, at(7))[0, 2] != coins_of(rounds[1], tree, at(8))[0, 1]


# --- the compiled loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "draws"),
    [
        ("wide", oracle.WITHOUT_REPLACEMENT),
        pytest.param("deep", oracle.INDEPENDENT, marks=pytest.mark.slow),
        pytest.param("deep", oracle.WITHOUT_REPLACEMENT, marks=pytest.mark.slow),
        pytest.param("wide", oracle.INDEPENDENT, marks=pytest.mark.slow),
        pytest.param("branching", oracle.WITHOUT_REPLACEMENT, marks=pytest.mark.slow),
        pytest.param("branching", oracle.INDEPENDENT, marks=pytest.mark.slow),
    ],
)
def test_the_compiled_loop_follows_the_distribution_of_the_target(tree, draws):
    """Sampled trees of the hidden-state drafter through several rounds, filtered rows included.

    Eight chi-squares a case, each of which fires falsely once in 10^6.
    """
    assert min(p_values(tiny_texts(TREES[tree], SCHEMES[draws]))) > FALSE_ALARM


@pytest.mark.slow
def test_standard_speculative_sampling_follows_the_distribution_of_the_target():
    """Chains of a small language model, drawn from its own distribution; eight chi-squares as above.

    `drafters/test_small_lm.py` counts what is accepted of such chains in every run, `drafters/test_stack.py` holds
    their texts to the target.
    """
    texts = tiny_texts(TreeConfig(nodes=4, depth=3, width=1), DrawScheme.WITHOUT_REPLACEMENT, pair=tiny_small_lm)
    assert min(p_values(texts)) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sum", "skip"])
def test_reuse_follows_the_distribution_of_the_target(form):
    """What earlier rounds left changes the distributions drawn from, and which levels are drawn at all, not the text's
    distribution."""
    assert (
        min(p_values(tiny_texts(TREES["deep"], DrawScheme.WITHOUT_REPLACEMENT, reuse=ReuseConfig(form)))) > FALSE_ALARM
    )


def pruned(drafter: Drafter) -> Drafter:
    """Of the root's children only the one the drafter likes best."""

    def draft(models, state, *rest):
        tree, state = drafter.draft(models, state, *rest)
        logp = jnp.take_along_axis(tree.draft_logp[:, 0], tree.tokens, 1)
        best = jnp.argmax(jnp.where(tree.depth == 1, logp, -jnp.inf), -1)
        is_best = jnp.arange(tree.tokens.shape[1]) == best[:, None]
        return tree.replace(valid=tree.valid & ((tree.depth != 1) | is_best)), state

    return drafter._replace(draft=draft)


def swapped(drafter: Drafter) -> Drafter:
    """Says that its trees were drawn under the other distribution."""
    (other,) = set(SCHEMES.values()) - {drafter.scheme}

    def draft(models, state, *rest):
        tree, state = drafter.draft(models, state, *rest)
        return tree.replace(scheme=other), state

    return drafter._replace(draft=draft, scheme=other)


@pytest.mark.slow
@pytest.mark.parametrize("draws", SCHEMES)
@pytest.mark.parametrize("mutant", [pruned, swapped])
def test_the_chi_square_finds_mutants(mutant, draws):
    assert min(p_values(tiny_texts(TREES["wide"], SCHEMES[draws], mutant))) < FALSE_ALARM


def forgetful(drafter: Drafter) -> Drafter:
    """Says that the last token of the chain was drawn from the distribution behind the root."""

    def draft(models, state, *rest):
        tree, state = drafter.draft(models, state, *rest)
        return tree.replace(draft_logp=tree.draft_logp.at[:, -1].set(tree.draft_logp[:, 0])), state

    return drafter._replace(draft=draft)


@pytest.mark.slow
def test_the_chi_square_finds_a_chain_with_wrong_distributions():
    tree, scheme = TreeConfig(nodes=4, depth=3, width=1), DrawScheme.WITHOUT_REPLACEMENT
    assert min(p_values(tiny_texts(tree, scheme, forgetful, tiny_small_lm))) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_RESIDUALS)
def test_the_chi_square_finds_wrong_residuals(monkeypatch, name):
    monkeypatch.setattr(accept_lib, "after_rejection", WRONG_RESIDUALS[name])
    assert min(p_values(tiny_texts(TREES["wide"], DrawScheme.WITHOUT_REPLACEMENT))) < FALSE_ALARM


# --- conformance ------------------------------------------------------------------------------------------------------


def test_rows_rounds_and_buckets_do_not_show():
    """Permuted rows, rounds one at a time and growing caches give the same texts; another seed another."""
    call, setup, order = calls.mixed_call(), setups.sampled(DrawScheme.WITHOUT_REPLACEMENT), [4, 2, 0, 5, 3, 1]
    wanted = calls.generated(call, call.run(setup.decoder, setup.models))
    other = call.rows(order)
    permuted = calls.generated(other, other.run(setup.decoder, setup.models))
    assert first_difference(permuted, [wanted[i] for i in order]) is None
    state = call.start(setup.decoder, setup.models, capacity=calls.OUTGROWN)
    while not bool(state.done.all()):
        state = call.resume(setup.decoder, setup.models, state, 1)
    assert first_difference(calls.generated(call, state), wanted) is None
    reseeded = call.replace(seeds=[s ^ 1 for s in call.seeds])
    texts = calls.generated(reseeded, reseeded.run(setup.decoder, setup.models))
    assert texts[:2] == wanted[:2] and all(a != b for a, b in zip(texts[2:4], wanted[2:4], strict=True))
