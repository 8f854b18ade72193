"""How a model that drafts reads text.

Tokens that a row has committed but its drafter has not read yet are pending: the first entries of an array. The drafter
reads them in one pass when it drafts next. It reads the nodes of a tree level by level, and its cache keeps none of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import ModelConfig, TrunkConfig
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.target import causal_mask, forward
from hsd_jax.types import KVCache, ModelOutput, NewKV, Weights


def unread(
    config: ModelConfig | TrunkConfig,
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    capacity: int,
    max_pending: int,
    cache_dtype: Any,
) -> tuple[KVCache, Int[Array, "B M"]]:
    """The cache and the pending tokens before the prompts are read: the root, in the first of `max_pending` places."""
    root = jnp.take_along_axis(tokens, length[:, None] - 1, 1)
    cache = cache_lib.cache_of(config, len(length), capacity, cache_dtype)
    return cache, jnp.pad(root, ((0, 0), (0, max_pending - 1)))


def read_on(
    weights: Weights,
    config: ModelConfig,
    cache: KVCache,
    tokens: Int[Array, "B M"],
    num: Int[Array, "B"],
    **options: Any,
) -> tuple[ModelOutput, KVCache]:
    """Reads the first `num` tokens of each row after its cached tokens, and adds them to the cache.

    XLA computes no logits if the caller does not use them. `options` are those of `forward`.
    """
    batch, width = tokens.shape
    positions = cache.length[:, None] + jnp.arange(width)
    output = forward(weights, config, tokens, positions, causal_mask(batch, width), cache, **options)
    return output, cache_lib.commit(cache, output.new_kv, None, num, after=output.hidden)


def joined(waiting: Array, num_waiting: Int[Array, "B"], new: Array, num_entries: int | None = None) -> Array:
    """The first `num_waiting` entries of each row of `waiting` [B, M, ...], then those of `new` [B, M2, ...].

    The result has `num_entries` entries (None: M + M2). Entries after the joined ones are arbitrary.
    """
    room = waiting.shape[1]
    place, num = jnp.arange(num_entries or room + new.shape[1]), num_waiting[:, None]
    index = jnp.where(place < num, place, room + place - num)
    return take_nodes(jnp.concatenate([waiting, new], 1), index, axis=1)


def newest_feature(
    features: Float[Array, "B chunk H"],
    start: Int[Array, ""] | int,
    length: Int[Array, "B"],
    before: Float[Array, "B H"],
) -> Float[Array, "B H"]:
    """The feature of the second-to-last token of each prompt, or of the last one of this chunk if it comes later.

    `before` is the feature after the chunks before, for prompts that ended there.
    """
    last = jnp.minimum(length - 2 - start, features.shape[1] - 1)[:, None]
    found = take_nodes(features, jnp.maximum(last, 0), axis=1)[:, 0]
    return jnp.where(last >= 0, found, before)


class Ancestry(NamedTuple):
    """The ancestors of the nodes of one level among the X nodes drafted so far, and the keys and values of these."""

    sees: Bool[Array, "B w X"]
    """Which drafted nodes each node of the level sees: its ancestors and itself."""
    drafted: NewKV | None
    """Keys and values of the X drafted nodes; None at the root, which is cached."""

    def next_level(
        self, cache: KVCache, level: int, parents: Int[Array, "B w"], read: Callable[..., tuple[Any, NewKV]]
    ) -> tuple[Any, Ancestry]:
        """Runs a pass over the nodes of the next level, of depth `level`. The cache keeps none of them.

        Args:
          parents: their parents, as indices into this level.
          read: the pass: `read(positions [B, w], sees [B, w, X + w], earlier) -> (result, keys and values)`.
        Returns:
          The result of the pass, and the ancestry of the nodes.
        """
        batch, width = parents.shape
        own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
        sees = jnp.concatenate([take_nodes(self.sees, parents, axis=1), own], 2)
        positions = jnp.broadcast_to(cache.length[:, None] + level - 1, parents.shape)
        said, drafted = read(positions, sees, self.drafted)
        if self.drafted is not None:
            drafted = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 2), self.drafted, drafted)
        return said, Ancestry(sees, drafted)


def at_root(batch: int) -> Ancestry:
    """The ancestry of the root, from which that of the first level below it is made."""
    return Ancestry(jnp.zeros((batch, 1, 0), bool), None)
