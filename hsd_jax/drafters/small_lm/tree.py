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

from hsd_jax.config import ModelConfig
from hsd_jax.infer.tree import Grower
from hsd_jax.kernels import native
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.steering import Steer
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
    features: Float[Array, "B M X"] | None = None
    """What steers each pending token: the target's states of the token before it. None: nothing does."""


class Steered(NamedTuple):
    """What steers a model (`drafters/steered`), as functions of the weights."""

    aux_layers: tuple[int, ...]
    width: int
    """Numbers of a token's features, all layers together."""
    joined: Callable[..., Float[Array, "B N X"]]
    """`joined(ModelOutput.features)`: those of a token side by side."""
    steer: Callable[..., Steer]
    """`steer(weights, features [B, N, X])`: what `forward` takes as `up_bias`."""


class Bias(NamedTuple):
    """`up_bias` of the tokens of a round; None: nothing steers them."""

    pending: Float[Array, "B M L F"] | None = None
    drafts: Float[Array, "B 1 L F"] | None = None


NO_BIAS = Bias()


class Level(NamedTuple):
    """What the next level of a tree needs of those above."""

    sees: Bool[Array, "B w X"]
    """Which drafted nodes so far each node of the level sees: its ancestors and itself."""
    drafted: NewKV | None
    """Keys and values of the X drafted nodes so far; None at the root, which is cached."""


def empty_state(
    config: ModelConfig,
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    capacity: int,
    max_pending: int,
    cache_dtype: Any,
    steered: Steered | None = None,
) -> SmallLMState:
    """Before any of the prompts is read: their last tokens, the roots, are pending."""
    slots = (capacity,) * config.num_layers
    cache = cache_lib.empty_cache(slots, len(length), config.num_kv_heads, config.head_dim, cache_dtype)
    root = jnp.take_along_axis(tokens, length[:, None] - 1, 1)
    pending = jnp.pad(root, ((0, 0), (0, max_pending - 1)))
    features = None if steered is None else jnp.zeros((*pending.shape, steered.width))
    return SmallLMState(cache, pending, jnp.ones_like(length), jnp.zeros_like(length), features)


def read_prompt(
    weights: Weights,
    config: ModelConfig,
    state: SmallLMState,
    tokens: Int[Array, "B chunk"],
    start: Int[Array, ""] | int,
    length: Int[Array, "B"],
    up_bias: Steer | None = None,
) -> SmallLMState:
    """Reads a chunk of the prompts but their last tokens."""
    _, cache = read_chunk(weights, config, state.cache, tokens, start, length - 1, up_bias=up_bias)
    return dataclasses.replace(state, cache=cache)


def steered_prompt(
    weights: Weights,
    steered: Steered,
    state: SmallLMState,
    output: ModelOutput,
    start: Int[Array, ""] | int,
    length: Int[Array, "B"],
) -> tuple[Steer, SmallLMState]:
    """What steers a chunk's tokens, each by the states of the token before it, and the state with those of the newest
    token that was read; after the last chunk, of the one before the root."""
    assert state.features is not None, "the state of a steered model"
    features, before = steered.joined(output.features), state.features[:, :1]
    num = features.shape[1]
    shifted = jnp.concatenate([before, features[:, :-1]], 1)
    with native.only(start + jnp.arange(num) < length[:, None] - 1):
        steer = steered.steer(weights, shifted)
    last = jnp.minimum(length - 2 - start, num - 1)[:, None]
    newest = jnp.where(last[..., None] >= 0, cache_lib.take_nodes(features, jnp.maximum(last, 0), axis=1), before)
    return steer, dataclasses.replace(state, features=state.features.at[:, :1].set(newest))


def bias_of_pending(weights: Weights, steered: Steered | None, state: SmallLMState) -> Bias:
    """What steers the pending tokens, and the drafts of the round as it does the root; None: nothing does."""
    if steered is None:
        return NO_BIAS
    with native.only(jnp.arange(state.pending.shape[1]) < state.num_pending[:, None]):
        pending = steered.steer(weights, state.features).up_bias()
    return Bias(pending, cache_lib.take_nodes(pending, state.num_pending[:, None] - 1, axis=1))


def features_of_text(steered: Steered, state: SmallLMState, verdict: Verdict, output: ModelOutput) -> Array:
    """What steers the root and each emitted token: states of the token before it, [B, D + 2, X]."""
    assert state.features is not None, "the state of a steered model"
    root = cache_lib.take_nodes(state.features, state.num_pending[:, None] - 1, axis=1)
    return jnp.concatenate([root, cache_lib.take_nodes(steered.joined(output.features), verdict.path, axis=1)], 1)


def read_pending(
    weights: Weights, config: ModelConfig, state: SmallLMState, bias: Bias = NO_BIAS
) -> tuple[Float[Array, "B 1 V"], SmallLMState]:
    """The logits behind the root, and the state with all that was pending in the cache."""
    batch, num = state.pending.shape
    place = jnp.arange(num)
    positions, is_there = state.cache.length[:, None] + place, place < state.num_pending[:, None]
    nodes = state.pending, positions, causal_mask(batch, num), state.cache
    output = forward(weights, config, *nodes, active=is_there, up_bias=bias.pending)
    first = jnp.take_along_axis(output.logits, state.num_pending[:, None, None] - 1, 1)
    cache = cache_lib.commit(state.cache, output.new_kv, None, state.num_pending, after=first)
    return first, dataclasses.replace(state, cache=cache)


def no_level(batch: int) -> Level:
    """What the first level below the root needs."""
    return Level(jnp.zeros((batch, 1, 0), bool), None)


def read_level(
    weights: Weights,
    config: ModelConfig,
    cache: KVCache,
    level: int,
    tokens: Int[Array, "B w"],
    parents: Int[Array, "B w"],
    above: Level,
    bias: Bias = NO_BIAS,
) -> tuple[Float[Array, "B w V"], Level]:
    """The logits behind the nodes of a level, 1 and more, and what the next level needs; the cache keeps none of it."""
    batch, width = tokens.shape
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    sees = jnp.concatenate([cache_lib.take_nodes(above.sees, parents, axis=1), own], 2)
    positions = jnp.broadcast_to(cache.length[:, None] + level - 1, tokens.shape)
    up_bias = None if bias.drafts is None else jnp.broadcast_to(bias.drafts, (batch, width, *bias.drafts.shape[2:]))
    output = forward(weights, config, tokens, positions, sees, cache, earlier=above.drafted, up_bias=up_bias)
    drafted = output.new_kv
    if above.drafted is not None:
        drafted = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 2), above.drafted, drafted)
    return output.logits, Level(sees, drafted)


def all_pending(
    state: SmallLMState,
    verdict: Verdict,
    num_committed: Int[Array, "B"],
    features: Float[Array, "B M2 X"] | None = None,
) -> SmallLMState:
    """After a round that began with `read_pending`: all that it committed is pending; of a finished row, which
    committed nothing, the root again.

    Args:
      features: what steers the root and each token of the verdict.
    """
    root = jnp.take_along_axis(state.pending, state.num_pending[:, None] - 1, 1)
    is_idle = num_committed == 0
    pending = jnp.where(is_idle[:, None], root, verdict.emitted)
    cache = dataclasses.replace(state.cache, length=state.cache.length - is_idle.astype(jnp.int32))
    if features is not None:
        features = jnp.where(is_idle[:, None, None], features[:, :1], features[:, 1:])
    return SmallLMState(cache, pending, jnp.maximum(num_committed, 1), state.num_drafted, features)


def tree_round(config: ModelConfig, grower: Grower, steered: Steered | None) -> tuple[Callable, Callable]:
    """`draft` and `commit` of a `Drafter` whose trees have siblings."""

    def draft(models, state: SmallLMState, inputs: RoundInputs):
        """Reads what is pending and keeps that; then reads the nodes of each level, and keeps none."""
        bias = bias_of_pending(models["drafter"], steered, state)
        first, state = read_pending(models["drafter"], config, state, bias)

        def expand(level: int, tokens: Array, parents: Array, above: Level):
            if level == 0:
                return first, above
            return read_level(models["drafter"], config, state.cache, level, tokens, parents, above, bias)

        drafted, _ = grower.grow(expand, no_level(len(inputs.root)), inputs)
        return drafted, state

    def commit(models, state: SmallLMState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        features = None if steered is None else features_of_text(steered, state, verdict, output)
        return all_pending(state, verdict, num_committed, features)

    return draft, commit
