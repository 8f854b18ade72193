"""The EAGLE drafter: a recurrence, which reads the drafted tokens, one trunk pass and one head a level.

The state after a node is what the trunk makes of its parent's state and the embedding of its own token, so siblings
differ and a tree is grown level by level (EAGLE, arXiv:2401.15077); its shape follows the drafter's confidence, and the
best nodes over all levels are verified (EAGLE-2, arXiv:2406.16858, section 4). What it keeps between rounds, and which
layers of the target it reads, is in `drafters/trunk_state.py`. Read that first.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.eagle.config import EagleConfig
from hsd_jax.drafters.trunk_state import TrunkState, read_pending, trunk_drafter
from hsd_jax.infer.tree import Grower
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.trunk import base_logits, embed_committed, trunk_pass
from hsd_jax.types import Drafter, DrawScheme, KVCache, NewKV, RoundInputs


class Level(NamedTuple):
    """What the next level needs of this one and of those above."""

    states: Float[Array, "B w H"]
    sees: Bool[Array, "B w X"]
    """Which drafted nodes so far each node of the level sees: its ancestors and itself."""
    drafted: NewKV | None
    """Keys and values of the X drafted nodes so far; None at the root, which is committed."""


def root_level(models, target_config: ModelConfig, config: EagleConfig, state: TrunkState) -> tuple[Level, KVCache]:
    """The state after the root, in one pass over the pending features, and the cache that has taken them in."""
    last = jnp.maximum(state.num_pending - 1, 0)[:, None]
    states, cache = read_pending(models, target_config, config, state, last)
    assert states is not None, "they were asked for"
    return Level(states, jnp.zeros((last.shape[0], 1, 0), bool), None), cache


def next_level(
    models,
    target_config: ModelConfig,
    config: EagleConfig,
    cache: KVCache,
    depth: int,
    tokens: Int[Array, "B w"],
    parents: Int[Array, "B w"],
    above: Level,
) -> Level:
    """The states after the nodes of a level, from their tokens and their parents' states.

    Args:
      cache: of `root_level`.
      depth: of the nodes, at least 1.
      parents: places in `above`.
    """
    batch, width = tokens.shape
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    states, sees = (cache_lib.take_nodes(x, parents, axis=1) for x in (above.states, above.sees))
    sees = jnp.concatenate([sees, own], 2)
    embeddings = embed_committed(models["target"], target_config, config, tokens)
    positions = jnp.broadcast_to(cache.length[:, None] + depth - 1, tokens.shape)
    states, kv = trunk_pass(models["drafter"], config, states, embeddings, positions, sees, cache, above.drafted)
    if above.drafted is not None:
        kv = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 2), above.drafted, kv)
    return Level(states, sees, kv)


def eagle_drafter(
    target_config: ModelConfig,
    config: EagleConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
) -> Drafter:
    """A `Drafter` whose trees have the shape of `tree`, their children chosen as `scheme` says.

    A round costs `tree.depth` trunk passes, of up to `width` nodes but for the first, and as many products with the
    LM head.

    Raises:
      ValueError: as `trunk_drafter`.
    """

    grower = Grower(tree, scheme, config.vocab_size)

    def draft(models, state: TrunkState, inputs: RoundInputs):
        with jax.named_scope("trunk"):
            first, cache = root_level(models, target_config, config, state)

        def expand(depth: int, tokens: Array, parents: Array, level: Level):
            if depth > 0:
                level = next_level(models, target_config, config, cache, depth, tokens, parents, level)
            return base_logits(models["drafter"], config, models["target"], target_config, level.states), level

        draft_to_target = models["drafter"].get("draft_to_target")
        with jax.named_scope("tree"):
            drafted, _ = grower.grow(expand, first, inputs, draft_to_target)
        return drafted, dataclasses.replace(state, cache=cache)

    return trunk_drafter(target_config, config, tree, draft, cache_dtype, scheme)
