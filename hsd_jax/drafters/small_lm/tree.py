"""The state of a small language model between rounds, and how it drafts a tree: with one pass per level.

The cache keeps no node of a tree. When nodes are read it is not known which of them will be accepted, and not all of
them are verified. Chains keep their drafts in the cache. They are in `draft.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.reading import Ancestry, at_root, logits_after, newest_feature, unread
from hsd_jax.infer.tree import grow_tree
from hsd_jax.kernels import native
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.steering import Steer
from hsd_jax.models.target import forward, read_chunk
from hsd_jax.types import Candidates, DrawScheme, KVCache, ModelOutput, NewKV, RoundInputs, Verdict, Weights


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class SmallLMState:
    """The state of the small model. Cached plus pending tokens = committed tokens.

    While a round is judged, the cache of a chain also has the drafts that the model has read. Slot index equals
    position, so `commit` only sets the length to keep the accepted ones. Drafts of a tree are never cached. The
    accepted ones are pending, and the next round reads them first.
    """

    cache: KVCache
    pending: Int[Array, "B M"]
    num_pending: Int[Array, "B"]
    num_drafted: Int[Array, "B"]
    """The number of drafts in the round that is judged, if it is a chain."""
    features: Any = None
    """The states that steer each pending token, [B, M, X]: the target's of the token before it. None: no steering."""


class Steered(NamedTuple):
    """The steering of a model (`drafters/steered`), as functions of the weights."""

    feature_layers: tuple[int, ...]
    width: int
    """Length of a token's feature vector, all layers together."""
    steer: Callable[..., Steer]
    """`steer(weights, features [B, N, X])`: the `up_bias` of `forward`."""


def joined_features(features: tuple[Float[Array, "B N H"], ...]) -> Float[Array, "B N X"]:
    """The states of several layers side by side, in float32."""
    return jnp.concatenate([part.astype(jnp.float32) for part in features], -1)


def empty_state(
    config: ModelConfig,
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    capacity: int,
    max_pending: int,
    cache_dtype: Any,
    steered: Steered | None = None,
) -> SmallLMState:
    """The state before any part of the prompts is read. Their last tokens, the roots, are pending."""
    cache, pending = unread(config, tokens, length, capacity, max_pending, cache_dtype)
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
    """Reads a chunk of the prompts, without their last tokens."""
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
    """The steering of a chunk's tokens, each by the target's states of the token before it; and the state.

    The state has the features of the newest token so far. After the last chunk that is the token before the root.
    """
    features, before = joined_features(output.features), state.features[:, :1]
    shifted = jnp.concatenate([before, features[:, :-1]], 1)
    with native.only(start + jnp.arange(features.shape[1]) < length[:, None] - 1):
        steer = steered.steer(weights, shifted)
    newest = newest_feature(features, start, length, before[:, 0])
    return steer, dataclasses.replace(state, features=state.features.at[:, 0].set(newest))


def biases(
    weights: Weights, steered: Steered | None, state: SmallLMState
) -> tuple[Float[Array, "B M L F"] | None, Float[Array, "B 1 L F"] | None]:
    """`up_bias` of the pending tokens, and of the drafts, which is that of the root. None: no steering."""
    if steered is None:
        return None, None
    with native.only(jnp.arange(state.pending.shape[1]) < state.num_pending[:, None]):
        pending = steered.steer(weights, state.features).up_bias()
    return pending, cache_lib.take_nodes(pending, state.num_pending[:, None] - 1, axis=1)


def features_of_text(state: SmallLMState, verdict: Verdict, output: ModelOutput) -> Array:
    """The features that steer the root and each emitted token, [B, D + 2, X]: those of the token before it."""
    root = cache_lib.take_nodes(state.features, state.num_pending[:, None] - 1, axis=1)
    return jnp.concatenate([root, cache_lib.take_nodes(joined_features(output.features), verdict.path, axis=1)], 1)


def read_pending_tokens(
    weights: Weights, config: ModelConfig, state: SmallLMState, up_bias: Array | None = None
) -> tuple[Float[Array, "B 1 V"], SmallLMState]:
    """The logits after the root, and the state with all pending tokens in the cache."""
    is_there = jnp.arange(state.pending.shape[1]) < state.num_pending[:, None]
    options = {"active": is_there, "up_bias": up_bias}
    first, cache = logits_after(weights, config, state.cache, state.pending, state.num_pending, **options)
    return first, dataclasses.replace(state, cache=cache)


def read_level(
    weights: Weights,
    config: ModelConfig,
    cache: KVCache,
    level: int,
    tokens: Int[Array, "B w"],
    parents: Int[Array, "B w"],
    above: Ancestry,
    bias: Float[Array, "B 1 L F"] | None = None,
) -> tuple[Float[Array, "B w V"], Ancestry]:
    """The logits after the nodes of a level, at least 1, and their ancestry. The cache keeps none of them."""
    up_bias = None if bias is None else jnp.broadcast_to(bias, (*tokens.shape, *bias.shape[2:]))

    def read(positions: Array, sees: Array, earlier: NewKV | None):
        output = forward(weights, config, tokens, positions, sees, cache, earlier=earlier, up_bias=up_bias)
        return output.logits, output.new_kv

    return above.next_level(cache, level, parents, read)


def all_pending(
    state: SmallLMState,
    verdict: Verdict,
    num_committed: Int[Array, "B"],
    features: Float[Array, "B M2 X"] | None = None,
) -> SmallLMState:
    """The state after a round that began with `read_pending_tokens`. All tokens that it committed are pending.

    `features` steer each token of the verdict.
    """
    num_pending = jnp.maximum(num_committed, 1)
    return SmallLMState(state.cache, verdict.emitted, num_pending, state.num_drafted, features)


def tree_round(
    config: ModelConfig, tree: TreeConfig, scheme: DrawScheme, steered: Steered | None
) -> tuple[Callable, Callable]:
    """`draft` and `commit` of a `Drafter` whose trees have siblings."""

    def draft(models, state: SmallLMState, inputs: RoundInputs):
        """Reads the pending tokens, which the cache keeps; then the nodes of each level, which it does not keep."""
        of_pending, bias = biases(models["drafter"], steered, state)
        first, state = read_pending_tokens(models["drafter"], config, state, of_pending)

        def expand(level: int, tokens: Array, parents: Array, above: Ancestry):
            logits = first
            if level > 0:
                logits, above = read_level(models["drafter"], config, state.cache, level, tokens, parents, above, bias)
            return Candidates(logits), above

        drafted, _ = grow_tree(expand, at_root(len(inputs.root)), inputs, tree, scheme)
        return drafted, state

    def commit(models, state: SmallLMState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        features = None if steered is None else features_of_text(state, verdict, output)[:, 1:]
        return all_pending(state, verdict, num_committed, features)

    return draft, commit
