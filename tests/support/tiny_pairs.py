"""Pairs so small that every text can be enumerated."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from hsd_jax.config import TreeConfig
from support import toy

ROWS, TINY, NEW_TOKENS = 16_384, 4, 8

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
