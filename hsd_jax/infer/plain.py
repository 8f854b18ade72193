"""Plain autoregressive decoding: the reference for exactness and for speed.

One token a pass, through the same cache, sampling and loop as the speculative round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hsd_jax.config import ModelConfig
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.step import Step, advance, cut, or_lawless
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import forward
from hsd_jax.types import DecodeState, Limits, NewKV, SamplingParams


def make_plain_step(config: ModelConfig, pad_rows: int = 1) -> Step:
    """The transition that decodes one token a row.

    Args:
      pad_rows: nodes per row in the pass; those behind the first repeat it and are dropped. Some CPUs multiply 4 rows
        of bfloat16 faster than 1.
    """

    def step(models: dict, sampling: SamplingParams, limits: Limits, state: DecodeState) -> DecodeState:
        position = state.length - 1
        root = jnp.take_along_axis(state.tokens, position[:, None], 1)
        batch = root.shape[0]
        with jax.named_scope("target"):
            nodes = jnp.broadcast_to(root, (batch, pad_rows))
            positions = jnp.broadcast_to(position[:, None], (batch, pad_rows))
            mask = jnp.broadcast_to(jnp.eye(pad_rows, dtype=bool), (batch, pad_rows, pad_rows))
            active = jnp.broadcast_to(~state.done[:, None], (batch, pad_rows))
            output = forward(models["target"], config, nodes, positions, mask, state.cache, active=active)
        with jax.named_scope("judge"):
            drawn = sampling_lib.draw(state.keys, output.logits[:, :1], position[:, None] + 1, sampling)
            emitted = or_lawless(drawn, jnp.zeros_like(drawn), output)
            count, done = cut(emitted, jnp.ones(batch, jnp.int32), limits, state)
        with jax.named_scope("commit"):
            first = NewKV(*(tuple(x[:, :, :1] for x in xs) for xs in (output.new_kv.keys, output.new_kv.values)))
            cache = cache_lib.commit(state.cache, first, None, count, after=emitted)
            return advance(state, emitted, count, done, cache, state.drafter)

    return step
