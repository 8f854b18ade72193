"""What a small language model keeps between rounds, and how it drafts a tree: a pass for every level, none of it kept.

Which drafts will be accepted is not known when they are read, and the nodes that are verified are not all that were
read, so a tree leaves nothing in the cache. Chains, which do, are in `draft.py`. Read that next.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.infer.tree import Grower
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import causal_mask, forward
from hsd_jax.types import KVCache, ModelOutput, NewKV, RoundInputs, Verdict


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


class Level(NamedTuple):
    """What the next level of a tree needs of those above."""

    sees: Bool[Array, "B w X"]
    """Which drafted nodes so far each node of the level sees: its ancestors and itself."""
    drafted: NewKV | None
    """Keys and values of the X drafted nodes so far; None at the root, which is cached."""


def tree_round(config: SmallLMConfig, grower: Grower, max_pending: int) -> tuple[Callable, Callable]:
    """`draft` and `commit` of a `Drafter` whose trees have siblings.

    Args:
      max_pending: tokens that a round may commit.
    """

    def draft(models, state: SmallLMState, inputs: RoundInputs):
        """Reads what is pending and keeps that; then reads the nodes of each level, and keeps none."""
        causal = causal_mask(*state.pending.shape)
        place = jnp.arange(max_pending)
        positions, is_there = state.cache.length[:, None] + place, place < state.num_pending[:, None]
        output = forward(models["drafter"], config, state.pending, positions, causal, state.cache, active=is_there)
        first = jnp.take_along_axis(output.logits, state.num_pending[:, None, None] - 1, 1)
        cache = cache_lib.commit(state.cache, output.new_kv, None, state.num_pending, after=first)

        def expand(level: int, tokens: Array, parents: Array, above: Level):
            if level == 0:
                return first, above
            batch, width = tokens.shape
            own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
            sees = jnp.concatenate([cache_lib.take_nodes(above.sees, parents, axis=1), own], 2)
            positions = jnp.broadcast_to(cache.length[:, None] + level - 1, tokens.shape)
            output = forward(models["drafter"], config, tokens, positions, sees, cache, earlier=above.drafted)
            drafted = output.new_kv
            if above.drafted is not None:
                drafted = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 2), above.drafted, drafted)
            return output.logits, Level(sees, drafted)

        nothing = Level(jnp.zeros((len(inputs.root), 1, 0), bool), None)
        drafted, _ = grower.grow(expand, nothing, inputs)
        return drafted, dataclasses.replace(state, cache=cache)

    def commit(models, state: SmallLMState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        """All that a round committed is pending; of a finished row, which committed nothing, the root again."""
        root = jnp.take_along_axis(state.pending, state.num_pending[:, None] - 1, 1)
        is_idle = num_committed == 0
        pending = jnp.where(is_idle[:, None], root, verdict.emitted)
        cache = dataclasses.replace(state.cache, length=state.cache.length - is_idle.astype(jnp.int32))
        return SmallLMState(cache, pending, jnp.maximum(num_committed, 1))

    return draft, commit
