"""Penalties under the rules for drawn trees: exact distributions by enumeration, the compiled loop, and the mutant that
forgets the path."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import controls as oracle
from oracles import distribution as distribution_oracle
from oracles import optimal as optimal_oracle
from oracles import recursive as recursive_oracle
from oracles.controls import Asked
from scipy import stats
from support.cases import cases
from support.rules import Judged, Trees, depths_of, emitted_one_by_one
from support.tiny_pairs import FALSE_ALARM, TINY, TREES, tiny_pair, tiny_small_lm

import hsd_jax
from hsd_jax import inputs
from hsd_jax import setup as setup_lib
from hsd_jax.config import TreeConfig
from hsd_jax.infer import controls, round, sampling, tree
from hsd_jax.infer.rules.accept import recursion
from hsd_jax.infer.rules.kseq import kseq
from hsd_jax.infer.rules.optimal import chain_and_match
from hsd_jax.pair import Params
from hsd_jax.settings import Sampling
from hsd_jax.types import NO_TOKEN, DraftTree, DrawScheme, Past

MOST, EXACT = 3, 1e-12
INDEPENDENT, WITHOUT_REPLACEMENT, TOP_THEN_RANDOM = (
    DrawScheme.INDEPENDENT,
    DrawScheme.WITHOUT_REPLACEMENT,
    DrawScheme.TOP_THEN_RANDOM,
)
RULES = {
    "recursive": (functools.partial(recursion, max_children=MOST), WITHOUT_REPLACEMENT),
    "kseq": (kseq, INDEPENDENT),
    "optimal": (functools.partial(chain_and_match, max_children=MOST), TOP_THEN_RANDOM),
}
LAYOUTS = {"chain": (4, [-1, 0, 1, 2]), "fork": (3, [-1, 0, 0, 1, 1, 2, 2]), "wide": (4, [-1, 0, 0, 0, 2, 2])}
"""Vocabulary and parents."""
PROMPT, NEW = [1, 0], [1, 0]
"""Of a row; the last new token is the root. Token 2 is new on a path."""
SETTINGS = {
    "repetition": Asked(1.0, repetition_penalty=1.6),
    "frequency": Asked(1.0, frequency_penalty=0.9),
    "all": Asked(0.8, None, None, 0.05, 1.3, 0.4, -0.6, 4, {1: 0.5}, ((1, 2), (0, 1, 0)), (0,)),
}

# --- enumeration ------------------------------------------------------------------------------------------------------


def records_of(asked: Asked) -> tuple[sampling.SamplingParams, Past]:
    """The settings and the past of a row, as the loop reads them, in float64."""
    own = {field.name: getattr(asked, field.name) for field in dataclasses.fields(Asked)}
    row = inputs.Row(PROMPT, Sampling(max_new_tokens=9, **own))
    found = dataclasses.replace(inputs.sampling_arrays([row.asked]), controls=inputs.controls_of([row], 4))
    as_given = [np.float64(getattr(asked, name)) for name in ("repetition_penalty", "frequency_penalty")]
    as_given += [np.float64(asked.presence_penalty), np.float64(asked.min_p)]
    names = "repetition", "frequency", "presence", "min_p"
    own = {name: value[None] for name, value in zip(names, as_given, strict=True)}
    exact = dataclasses.replace(found.controls, **own)  # what float32 rounds
    temperature = np.array([asked.temperature], np.float64)
    found = dataclasses.replace(found, controls=exact, temperature=temperature, unfiltered=True)  # bisects float32
    text = np.array([[*PROMPT, *NEW, NO_TOKEN, NO_TOKEN]], np.int32)
    counts = np.bincount(NEW, minlength=4)[None].astype(np.int32)
    ends = np.array([[*asked.eos, *[NO_TOKEN] * (4 - len(asked.eos))]], np.int32)
    return found, Past(text, np.array([len(PROMPT) + len(NEW)], np.int32), counts, ends)


def judged_by_ours(rule: Callable, target, draft, parents, trees: Trees, scheme, asked: Asked) -> list[Judged]:
    """What a rule of ours says of every tree, one a row, where each node has the logits of its path."""
    vocab, num, interior = len(target), len(trees), max(parents) + 1
    tokens, valid = np.array([t for t, _, _ in trees], np.int32), np.array([v for _, v, _ in trees])
    with np.errstate(divide="ignore"):
        logs = [np.log(np.array(table, float)) for table in (target, draft)]
    settings, past = jax.tree.map(lambda x: np.repeat(x, num, 0), records_of(asked))
    cut = dataclasses.replace(settings.controls, bias=settings.controls.bias[:, :vocab].astype(float))
    settings = dataclasses.replace(settings, controls=dataclasses.replace(cut, prompt=cut.prompt[:, :vocab]))
    past = dataclasses.replace(past, counts=past.counts[:, :vocab])
    rows = functools.partial(np.broadcast_to, shape=tokens.shape)

    def judge(tokens, logits, settings, past, rule=rule):  # traced anew, so that a mutant is in it
        drafts = DraftTree(
            tokens,
            jnp.asarray(rows(np.array(parents, np.int32))),
            jnp.asarray(rows(np.array(depths_of(parents), np.int32))),
            jnp.asarray(valid),
            jnp.asarray(logs[1])[tokens[:, :interior]],
            scheme,
        )
        path = tree.path_tokens(drafts, max(depths_of(parents)))
        changed = controls.transformed(logits, settings, past, path)
        logp = sampling.target_distribution(changed, settings)
        return *rule(drafts, logp), jnp.exp(logp)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = jax.jit(judge)(tokens, logs[0][tokens], settings, past)
        chances, residual, target_p = map(np.asarray, found)
    assert chances.dtype == residual.dtype == np.float64
    residual = residual / np.maximum(residual.sum(-1, keepdims=True), 1e-300)

    def of(row: int) -> Judged:
        def judged(node):
            if node >= interior:
                return [], target_p[row, node].tolist()
            children = recursive_oracle.children_of(parents, valid[row], node)
            return [chances[row, child] for child in children], residual[row, node]

        return judged

    return [of(row) for row in range(num)]


def text_distribution(target, asked: Asked, length: int, begun: tuple[int, ...] = ()) -> dict:
    """Of the tokens of a row up to `length`, of which some are there, under the target alone."""
    found = {begun: 1.0}
    for _ in range(length - len(begun)):
        longer: dict = defaultdict(float)
        for text, mass in found.items():
            with np.errstate(divide="ignore"):
                logits = np.log(np.array(target[(*NEW, *text)[-1]], float))
            for token, p in enumerate(oracle.distribution(logits, PROMPT, (*NEW, *text), asked)):
                if p > 0:
                    longer[(*text, token)] += mass * p
        found = longer
    return found


def distance(rule: str, layout: str, asked: Asked) -> float:
    """Total variation between texts that a round of ours begins and those of the target alone."""
    vocab, parents = LAYOUTS[layout]
    target, draft = distribution_oracle.markov_table(vocab, 1), distribution_oracle.markov_table(vocab, 51)
    own, scheme = RULES[rule]
    trees = optimal_oracle.tree_draws(draft, NEW[-1], parents, scheme.value)
    emitted = emitted_one_by_one(parents, trees, judged_by_ours(own, target, draft, parents, trees, scheme, asked))
    length, found = max(depths_of(parents)) + 1, defaultdict(float)
    for begun, mass in emitted.items():
        for text, p in text_distribution(target, asked, length, begun).items():
            found[text] += float(mass) * p
    wanted = text_distribution(target, asked, length)
    return sum(abs(found[text] - wanted.get(text, 0.0)) for text in {*found, *wanted}) / 2


CASES = [(rule, layout, name) for rule in RULES for layout in LAYOUTS for name in SETTINGS]
QUICK = [("recursive", "fork", "all"), ("recursive", "chain", "repetition"), ("kseq", "wide", "frequency")]
QUICK += [("optimal", "fork", "repetition")]


@pytest.mark.parametrize(("rule", "layout", "name"), cases(CASES, slow=[case for case in CASES if case not in QUICK]))
def test_a_rule_emits_exactly_the_changed_distribution_of_the_target(rule, layout, name):
    assert distance(rule, layout, SETTINGS[name]) < EXACT


def forgets_path(drafts: DraftTree, max_depth: int) -> jax.Array:
    """The mutant: as if every node stood directly below the committed text."""
    return jnp.full((*drafts.tokens.shape, max_depth), NO_TOKEN, jnp.int32)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_enumeration_finds_a_forgotten_path(monkeypatch, name):
    monkeypatch.setattr(tree, "path_tokens", forgets_path)
    assert distance("recursive", "fork", SETTINGS[name]) > 1e-2


# --- the compiled loop ------------------------------------------------------------------------------------------------

ROWS, NEW_TOKENS, MIXED = 4096, 4, Asked(1.0, repetition_penalty=1.5, frequency_penalty=0.6)
CHAIN = TreeConfig(nodes=4, depth=3, width=1)
LOOPS = [  # rule, scheme, tree, pair
    ("recursive", WITHOUT_REPLACEMENT, TREES["branching"], tiny_pair),
    ("recursive", INDEPENDENT, TREES["wide"], tiny_pair),
    ("recursive", WITHOUT_REPLACEMENT, CHAIN, tiny_small_lm),
    ("optimal", TOP_THEN_RANDOM, TREES["branching"], tiny_pair),
    ("kseq", INDEPENDENT, TREES["branching"], tiny_pair),
    ("block_verification", WITHOUT_REPLACEMENT, CHAIN, tiny_pair),
    ("match", DrawScheme.COUPLED, TREES["branching"], tiny_pair),
]


def p_value(accept: str, scheme: DrawScheme, shape: TreeConfig, pair: Callable) -> float:
    """Chi-square of the texts of `decode` behind one token, with a settled row after an unsettled one."""
    config, logits, drafter_config, models = pair()
    params = Params(models["target"], models["drafter"], config, drafter_config, max_len=16, precision="exact")
    penalties = {name: [getattr(MIXED, name)] * ROWS for name in ("repetition_penalty", "frequency_penalty")}
    result = hsd_jax.decode(
        params, [[1]] * ROWS, NEW_TOKENS, temperature=1.0, tree=shape, accept=accept, draw=scheme.value, **penalties
    )
    assert result.stats.accepted_histogram[1:].sum() > 0
    cells = np.ravel_multi_index(tuple(result.tokens.T), (TINY,) * NEW_TOKENS)
    wanted = {(): 1.0}
    for _ in range(NEW_TOKENS):
        longer = {}
        for text, mass in wanted.items():
            for token, p in enumerate(oracle.distribution(logits[([1, *text])[-1]], [1], text, MIXED)):
                longer[(*text, token)] = mass * p
        wanted = longer
    expected = ROWS * np.array([wanted[text] for text in np.ndindex((TINY,) * NEW_TOKENS)])
    counts, is_rare = np.bincount(cells, minlength=len(expected)), expected < 5
    counts, expected = (np.append(x[~is_rare], x[is_rare].sum()) for x in (counts, expected))
    return float(stats.chisquare(counts, expected).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize(("accept", "scheme", "shape", "pair"), cases(LOOPS, slow=LOOPS[1:]))
def test_the_compiled_loop_follows_the_changed_distribution(accept, scheme, shape, pair):
    assert p_value(accept, scheme, shape, pair) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("case", [LOOPS[0], LOOPS[-1]], ids=["drawn", "match"])
def test_the_compiled_loop_needs_the_path(monkeypatch, case):
    setup_lib.make_decoder.cache_clear()
    monkeypatch.setattr(tree, "path_tokens", forgets_path)
    monkeypatch.setattr(round, "path_tokens", forgets_path)
    try:
        assert p_value(*case) < FALSE_ALARM
    finally:
        setup_lib.make_decoder.cache_clear()
