"""Pairs so small that every text can be enumerated, and the chi-square of what the compiled loop says of them."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from oracles import sampling as sampling_oracle
from scipy import stats

from hsd_jax.config import NO_REUSE, ModelConfig, ReuseConfig, TreeConfig
from hsd_jax.drafters.small_lm import SmallLMConfig
from hsd_jax.drafters.table import make_drafter
from hsd_jax.infer.loop import Decoder, program_for
from hsd_jax.infer.round import make_step
from hsd_jax.infer.rules.table import make_rule
from hsd_jax.types import AcceptRule, DrawScheme
from support import calls, toy

ROWS, TINY, NEW_TOKENS = 16_384, 4, 8
FEW_SLOTS = 24
"""Of the caches of a call of many rows and short texts: what a row takes is what such a test takes."""

TREES = {
    "deep": TreeConfig(nodes=6, depth=3, width=2),
    "wide": TreeConfig(nodes=7, depth=2, width=3),
    "branching": TreeConfig(branching=(3, 2)),
}


@functools.cache
def tiny_pair():
    """A Markov target over four tokens, its logits, and a drafter with a distribution of its own."""
    logits = np.random.default_rng(3).normal(0, 1.2, (TINY, TINY))
    config, weights = toy.markov_target(logits)
    shape = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "intermediate_size": 4, "num_steps": 3}
    drafter_config = toy.drafter_config(config, **shape)
    drafter = toy.make_drafter(drafter_config, config, weights)
    wrong = np.random.default_rng(4).normal(0, 1.0, (TINY, TINY))
    injector = drafter["injector"] | {"bias": jnp.asarray((0.5 * logits + wrong).T / TINY**0.5, jnp.float32)}
    drafter |= {"injector": injector, "output_norm": {"weight": jnp.full(TINY, 0.3)}}
    return config, logits, drafter_config, {"target": weights, "drafter": drafter}


FALSE_ALARM = 1e-6
SETTINGS = [(1.0, None, None), (0.7, 3, None), (1.3, None, 0.8), (1.0, None, None)]
"""Of rows 0, 1, 2, 3, 4, ... in turns."""


@functools.cache
def tiny_small_lm():
    """The same target, and a Markov model with a distribution of its own as small language model."""
    config, logits, _, models = tiny_pair()
    _, small = toy.markov_target(0.5 * logits + np.random.default_rng(4).normal(0, 1.0, (TINY, TINY)))
    return config, logits, SmallLMConfig(**vars(config)), models | {"drafter": small}


def decoder_of(
    config: ModelConfig,
    drafter_config: Any,
    tree: TreeConfig,
    scheme: DrawScheme = DrawScheme.WITHOUT_REPLACEMENT,
    rule: AcceptRule | None = None,
    reuse: ReuseConfig = NO_REUSE,
) -> Decoder:
    """Of a pair whose drafts are drawn, under the recursive rule if no other is given."""
    drafter = make_drafter(config, drafter_config, tree, scheme=scheme, reuse=reuse)
    step = make_step(config, drafter, rule or make_rule("recursive", tree))
    return Decoder(config, step, drafter, own=program_for("highest", use_native=False))


def many_rows(settings=((1.0, None, None),), rows: int = ROWS, new_tokens: int = NEW_TOKENS, first: int = 1):
    """A call of short texts behind one token, each row with a seed of its own; the settings are those of rows in
    turns."""
    temperature, top_k, top_p = zip(*(settings[row % len(settings)] for row in range(rows)), strict=True)
    return calls.Call(
        prompts=[np.array([first], np.int32)] * rows,
        new_tokens=[new_tokens] * rows,
        temperature=list(temperature),
        top_k=[k or 0 for k in top_k],
        top_p=[p or 1.0 for p in top_p],
        seeds=list(range(rows)),
        prompt_bucket=2,
    )


def tiny_texts(
    tree: TreeConfig,
    scheme: DrawScheme,
    pair=tiny_pair,
    reuse: ReuseConfig = NO_REUSE,
    accept: str = "recursive",
) -> np.ndarray:
    """The texts [ROWS, NEW_TOKENS] of the compiled loop."""
    config, _, drafter_config, models = pair()
    decoder = decoder_of(config, drafter_config, tree, scheme, make_rule(accept, tree), reuse)
    state = many_rows(SETTINGS).run(decoder, models, FEW_SLOTS)
    assert state.cache.capacity == FEW_SLOTS
    histogram = np.asarray(state.stats.accepted_histogram).sum(0)
    reached = histogram[:-1] if decoder.drafter.drafts_ahead else histogram  # a tip has no token behind it
    assert (reached > 0).all(), histogram
    return np.asarray(state.tokens)[:, 1 : 1 + NEW_TOKENS]


def p_values(texts: np.ndarray) -> list[float]:
    """Chi-square of three tokens early and late in the text against the target's distribution, for each of SETTINGS."""
    logits, found = tiny_pair()[1], []
    for index, setting in enumerate(SETTINGS):
        rows = texts[index :: len(SETTINGS)]
        step = np.array([sampling_oracle.distribution(logits[a], *setting) for a in range(TINY)])
        for first in (0, NEW_TOKENS - 3):
            start = np.linalg.matrix_power(step, first)[1]  # the prompt is token 1
            distribution = np.einsum("a,ab,bc,cd->bcd", start, step, step, step).ravel()
            cells = np.ravel_multi_index(tuple(rows[:, first : first + 3].T), (TINY,) * 3)
            counts, expected = np.bincount(cells, minlength=len(distribution)), distribution * len(rows)
            if counts[distribution == 0].any():
                found.append(0.0)
                continue
            is_rare = expected < 5
            counts, expected = (np.append(x[~is_rare], x[is_rare].sum()) for x in (counts, expected))
            keep = expected > 0
            found.append(float(stats.chisquare(counts[keep], expected[keep]).pvalue))
    return found
