"""What a small language model keeps between rounds, and how it drafts a tree: a pass for every level, none of it kept.

Which drafts will be accepted is not known when they are read, and the nodes that are verified are not all that were
read, so a tree leaves nothing in the cache. Chains, which do, are in `draft.py`. Read that next.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.infer.tree import Grower
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import causal_mask, forward, read_chunk
from hsd_jax.types import KVCache, ModelOutput, NewKV, RoundInputs, Verdict, Weights


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class SmallLMState:
    """Cached plus pending tokens = committed tokens.

    While a round is judged, the cache of a chain also holds the drafts the model has read; slot index equals position,
    so `commit` keeps the accepted ones by setting the length. Drafts of a tree are never cached: what is accepted of
    them is pending, and the next round reads it first.
    """

    cache: KVCache
    pending: Int[Array, "B M"]
    num_pending: Int[Array, "B"]
    num_drafted: Int[Array, "B"]
    """Drafts of the round that is judged, if it is a chain."""


class Level(NamedTuple):
    """What the next level of a tree needs of those above."""

    sees: Bool[Array, "B w X"]
    """Which drafted nodes so far each node of the level sees: its ancestors and itself."""
    drafted: NewKV | None
    """Keys and values of the X drafted nodes so far; None at the root, which is cached."""


def empty_state(
    config: SmallLMConfig,
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    capacity: int,
    max_pending: int,
    cache_dtype: Any,
) -> SmallLMState:
    """Before any of the prompts is read: their last tokens, the roots, are pending."""
    slots = (capacity,) * config.num_layers
    cache = cache_lib.empty_cache(slots, len(length), config.num_kv_heads, config.head_dim, cache_dtype)
    root = jnp.take_along_axis(tokens, length[:, None] - 1, 1)
    return SmallLMState(
        cache, jnp.pad(root, ((0, 0), (0, max_pending - 1))), jnp.ones_like(length), jnp.zeros_like(length)
    )


def read_prompt(
    weights: Weights,
    config: SmallLMConfig,
    state: SmallLMState,
    tokens: Int[Array, "B chunk"],
    start: Int[Array, ""] | int,
    length: Int[Array, "B"],
) -> SmallLMState:
    """Reads a chunk of the prompts but their last tokens."""
    _, cache = read_chunk(weights, config, state.cache, tokens, start, length - 1)
    return dataclasses.replace(state, cache=cache)


def read_pending(
    weights: Weights, config: SmallLMConfig, state: SmallLMState
) -> tuple[Float[Array, "B 1 V"], SmallLMState]:
    """The logits behind the root, and the state with all that was pending in the cache."""
    batch, num = state.pending.shape
    place = jnp.arange(num)
    positions, is_there = state.cache.length[:, None] + place, place < state.num_pending[:, None]
    nodes = state.pending, positions, causal_mask(batch, num), state.cache
    output = forward(weights, config, *nodes, active=is_there)
    first = jnp.take_along_axis(output.logits, state.num_pending[:, None, None] - 1, 1)
    cache = cache_lib.commit(state.cache, output.new_kv, None, state.num_pending, after=first)
    return first, dataclasses.replace(state, cache=cache)


def no_level(batch: int) -> Level:
    """What the first level below the root needs."""
    return Level(jnp.zeros((batch, 1, 0), bool), None)


def read_level(
    weights: Weights,
    config: SmallLMConfig,
    cache: KVCache,
    level: int,
    tokens: Int[Array, "B w"],
    parents: Int[Array, "B w"],
    above: Level,
) -> tuple[Float[Array, "B w V"], Level]:
    """The logits behind the nodes of a level, 1 and more, and what the next level needs; the cache keeps none of it."""
    batch, width = tokens.shape
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    sees = jnp.concatenate([cache_lib.take_nodes(above.sees, parents, axis=1), own], 2)
    positions = jnp.broadcast_to(cache.length[:, None] + level - 1, tokens.shape)
    output = forward(weights, config, tokens, positions, sees, cache, earlier=above.drafted)
    drafted = output.new_kv
    if above.drafted is not None:
        drafted = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 2), above.drafted, drafted)
    return output.logits, Level(sees, drafted)


def all_pending(state: SmallLMState, verdict: Verdict, num_committed: Int[Array, "B"]) -> SmallLMState:
    """After a round that began with `read_pending`: all that it committed is pending; of a finished row, which
    committed nothing, the root again."""
    root = jnp.take_along_axis(state.pending, state.num_pending[:, None] - 1, 1)
    is_idle = num_committed == 0
    pending = jnp.where(is_idle[:, None], root, verdict.emitted)
    cache = dataclasses.replace(state.cache, length=state.cache.length - is_idle.astype(jnp.int32))
    return SmallLMState(cache, pending, jnp.maximum(num_committed, 1), state.num_drafted)


def tree_round(config: SmallLMConfig, grower: Grower) -> tuple[Callable, Callable]:
    """`draft` and `commit` of a `Drafter` whose trees have siblings."""

    def draft(models, state: SmallLMState, inputs: RoundInputs):
        """Reads what is pending and keeps that; then reads the nodes of each level, and keeps none."""
        first, state = read_pending(models["drafter"], config, state)

        def expand(level: int, tokens: Array, parents: Array, above: Level):
            if level == 0:
                return first, above
            return read_level(models["drafter"], config, state.cache, level, tokens, parents, above)

        drafted, _ = grower.grow(expand, no_level(len(inputs.root)), inputs)
        return drafted, state

    def commit(models, state: SmallLMState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        return all_pending(state, verdict, num_committed)

    return draft, commit
