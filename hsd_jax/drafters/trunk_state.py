"""The state of a drafter with a trunk, and all functions of its `Drafter` except `draft`.

The target's features of committed positions wait in `TrunkState.pending` until the trunk reads them and adds them to
its cache. This code is the same for a trunk that reads no drafted tokens (`hidden/`) and one that does (`eagle.py`).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.config import ModelConfig, TreeConfig, TrunkConfig
from hsd_jax.drafters.method import check_tree
from hsd_jax.drafters.reading import newest_feature, unread
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import causal_mask
from hsd_jax.models.trunk import STATES, embed_committed, trunk_features, trunk_pass
from hsd_jax.types import Drafter, DrawScheme, KVCache, ModelOutput, NewKV, Verdict


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class TrunkState:
    """The drafter's state between rounds.

    `pending` are features that the target computed and the trunk has not read yet, normally those of the last round.
    They are fused if the drafter reads several layers. Cached plus pending features = committed tokens - 1.
    """

    cache: KVCache
    pending: Float[Array, "B M H"]
    next_tokens: Int[Array, "B M"]
    """The committed token after each pending feature."""
    num_pending: Int[Array, "B"]
    spares: Any = None
    """Spare states of earlier trunk runs for the positions ahead (`hidden/reuse.py`). None: the drafter keeps none."""


def with_room(state: TrunkState, num: int) -> TrunkState:
    """The state with room for `num` pending features, which deeper trees than its drafter's own leave."""
    return dataclasses.replace(
        state,
        pending=cache_lib.pad_to(state.pending, num, axis=1),
        next_tokens=cache_lib.pad_to(state.next_tokens, num, axis=1),
    )


class TrunkInputs(NamedTuple):
    """What a trunk reads and how. The defaults are for a trunk that was trained with the target's own embeddings."""

    embed: Callable[..., Any] = lambda models, *args: embed_committed(models["target"], *args)
    """`embed(models, target_config, config, tokens [B, N]) -> [B, N, H]`; None if it reads no embeddings."""
    fuse: Callable[..., Any] = lambda models, *args: trunk_features(models["drafter"], *args)
    """`fuse(models, config, hidden [..., H], features) -> [..., h]`: its input from a pass of the target."""
    read: Callable[..., tuple[Any, NewKV]] = trunk_pass
    """As `trunk_pass`: reads fused features that no draft follows. The states may be None."""
    states: Callable[..., tuple[Array, NewKV]] | None = None
    """As `run_trunk`, without `inputs`. None: `models.trunk.STATES` has it."""


FROM_TARGET = TrunkInputs()


def trunk_drafter(
    target_config: ModelConfig,
    config: TrunkConfig,
    tree: TreeConfig,
    draft: Callable[..., Any],
    cache_dtype: Any,
    scheme: DrawScheme,
    max_pending: int | None = None,
    inputs: TrunkInputs = FROM_TARGET,
) -> Drafter:
    """A `Drafter` whose state is a `TrunkState`, and whose trunk runs in every round.

    Args:
      draft: `Drafter.draft`. It must add the pending features to the trunk's cache.
      max_pending: the largest number of pending features; None: those of one round.
    """
    check_tree(target_config, config, tree, scheme)
    most = tree.depth + 1 if max_pending is None else max_pending

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        """A prompt of a single token has no feature, so nothing is pending."""
        cache, roots = unread(config, tokens, length, capacity, most, cache_dtype)
        pending = jnp.zeros((len(length), most, config.hidden_size))
        return TrunkState(cache, pending, roots, jnp.where(length >= 2, 1, 0).astype(jnp.int32))

    def read(models, state: TrunkState, output: ModelOutput, tokens, following: Int[Array, "B chunk"], start, length):
        """Reads all features of the prompt except the last one, which becomes pending."""
        batch, num = following.shape
        positions = jnp.broadcast_to(start + jnp.arange(num), (batch, num))
        num_entries = jnp.maximum(length - 2, 0)
        embeddings = inputs.embed(models, target_config, config, following)
        features = inputs.fuse(models, config, output.hidden, output.features)
        before = dataclasses.replace(state.cache, length=jnp.full(batch, start, jnp.int32))
        is_first = type(start) is int and start == 0
        seen = positions, causal_mask(batch, num), None if is_first else before
        active = positions < num_entries[:, None]
        states, kv = inputs.read(models["drafter"], config, features, embeddings, *seen, active=active)
        cache = cache_lib.commit(before, kv, None, length * 0, after=_reading_cache(config, states), start=start)
        cache = dataclasses.replace(cache, length=jnp.minimum(num_entries, start + num))
        feature = newest_feature(features, start, length, state.pending[:, 0])
        return dataclasses.replace(state, cache=cache, pending=state.pending.at[:, 0].set(feature))

    def commit(models, state: TrunkState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        # XLA drops the final hidden states if the trunk reads only inner layers.
        read = (output.hidden, output.features)
        path = jax.tree.map(lambda x: cache_lib.take_nodes(x, verdict.path, axis=1), read)
        pending = inputs.fuse(models, config, *path)
        return TrunkState(state.cache, pending, verdict.emitted, num_committed)

    def follow(models, state: TrunkState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        """Reads the pending features. No state after them is needed."""
        batch, num = state.pending.shape[:2]
        embeddings = inputs.embed(models, target_config, config, state.next_tokens)
        seen = state.cache.length[:, None] + jnp.arange(num), causal_mask(batch, num), state.cache
        active = jnp.arange(num) < state.num_pending[:, None]
        states, kv = inputs.read(models["drafter"], config, state.pending, embeddings, *seen, active=active)
        after = _reading_cache(config, states)
        cache = cache_lib.commit(state.cache, kv, None, state.num_pending, after=after)
        return commit(models, dataclasses.replace(state, cache=cache), verdict, output, num_committed)

    options = {"lookahead": most - 1, "follow": follow}
    return Drafter(init, read, draft, commit, scheme, tree.depth, config.feature_layers, **options)


def run_trunk(
    models,
    target_config: ModelConfig,
    config: TrunkConfig,
    num_states: int,
    state: TrunkState,
    inputs: TrunkInputs = FROM_TARGET,
) -> tuple[Float[Array, "B K H"], NewKV]:
    """K = `num_states` token-free states, and the keys and values of the pending features."""
    if inputs.states is not None:
        return inputs.states(models, target_config, config, num_states, state)
    embeddings = inputs.embed(models, target_config, config, state.next_tokens)
    read = STATES[config.trunk]
    return read(models["drafter"], config, state.pending, embeddings, state.num_pending, num_states, state.cache)


def trunk_states(
    models,
    target_config: ModelConfig,
    config: TrunkConfig,
    num_states: int,
    state: TrunkState,
    inputs: TrunkInputs = FROM_TARGET,
) -> tuple[Float[Array, "B K H"], KVCache]:
    """K = `num_states` token-free states, and the trunk's cache with the pending features committed."""
    states, kv = run_trunk(models, target_config, config, num_states, state, inputs)
    return states, cache_lib.commit(state.cache, kv, None, state.num_pending, after=states[:, -1])


def _reading_cache(config: TrunkConfig, states: Float[Array, "B M H"] | None) -> Float[Array, "B M H"] | None:
    """The array that a write to the cache must wait for, if the states themselves are not needed.

    `cache.commit` explains why a write must wait for the pass that reads the cache. A pass through a single layer whose
    states are not needed does not read the cache. Then the write need not wait, and XLA drops the rest of the layer.
    """
    return None if config.num_layers == 1 else states
