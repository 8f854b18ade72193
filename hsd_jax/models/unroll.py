"""Computes the trunk's K states from many anchors at once, for training.

The states equal those of a round at inference, which a test checks. An anchor a is the position of the last committed
feature of a round whose root is token a + 1. Its first state reads the committed entries 0..a. State k + 1 is at
position a + k. It also sees the entries of the same anchor between a and its own position.

The input of state k + 1 depends on the trunk. In a recurrent trunk it is state k (EAGLE-3's training-time test, without
tokens in the recurrence). An EAGLE drafter also reads the token at that position: the row's token (as in EAGLE-3 and
HASS), or one drawn from state k. In a parallel trunk it is slot k, and all slots are computed at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from hsd_jax.config import PARALLEL, TrunkConfig
from hsd_jax.kernels.attention import MASKED, widen
from hsd_jax.models.layers import Block, rope_table
from hsd_jax.models.target import masks_within, sequence_layout
from hsd_jax.models.trunk import apply_trunk
from hsd_jax.types import Weights

KV = tuple[Array, Array]
EmbedDraft = Callable[[int, Float[Array, "B A H"]], Float[Array, "B A H"]]
"""`embed_draft(depth, state)`: the target's embedding of the token at that depth, which `state` predicts."""


def attend_own(
    query: Float[Array, "B G n E"],
    new: KV,
    new_mask: None,
    committed: KV,
    committed_mask: Bool[Array, "B N T"],
    scale: float,
    softcap: float | None,
    *,
    own: tuple[KV, ...] | None,
) -> Float[Array, "B G n E"]:
    """`attention.attend` where each node sees committed entries under a mask, and only the states of its own anchor.

    The nodes of a pass are anchors. A node computes one product per own entry, so memory grows with A (T + K) and not
    with (A K)^2. `own` are the anchors' earlier states, oldest first. None: the first step, whose entry is committed.
    """
    del new_mask, softcap  # a drafter has no softcap
    entries = () if own is None else (*own, new)
    batch, groups, nodes, width = query.shape
    scores = jnp.einsum("bgne,bgte->bgnt", query, committed[0]) * scale
    scores = jnp.where(widen(committed_mask, query), scores, MASKED)
    if not entries:
        return jnp.einsum("bgnt,bgte->bgne", jax.nn.softmax(scores, -1), committed[1])
    per_anchor = query.reshape(batch, groups, new[0].shape[2], -1, width)
    own_scores = jnp.stack([jnp.sum(per_anchor * key[:, :, :, None], -1) for key, _ in entries], -1) * scale
    own_scores = own_scores.reshape(batch, groups, nodes, -1)
    mix = jax.nn.softmax(jnp.concatenate([scores, own_scores], -1), -1)
    out = jnp.einsum("bgnt,bgte->bgne", mix[..., : scores.shape[-1]], committed[1])
    shares = mix[..., scores.shape[-1] :].reshape(*per_anchor.shape[:-1], -1)
    for i, (_, value) in enumerate(entries):
        out = out + (shares[..., i, None] * value[:, :, :, None]).reshape(out.shape)
    return out


def attend_slots(
    query: Float[Array, "B G n E"],
    new: KV,
    new_mask: None,
    committed: KV,
    committed_mask: Bool[Array, "B N T"],
    scale: float,
    softcap: float | None,
    *,
    num_slots: int,
) -> Float[Array, "B G n E"]:
    """`attention.attend` where each slot sees committed entries under a mask, and the slots of its anchor up to itself.

    The nodes of a pass are S = `num_slots` slots of each anchor, anchor by anchor. Memory grows with A S (T + S).
    """
    del new_mask, softcap
    batch, groups, nodes, width = query.shape
    keys, values = (x.reshape(batch, groups, -1, num_slots, width) for x in new)
    per_anchor = query.reshape(batch, groups, keys.shape[2], -1, width)
    sees = jnp.repeat(jnp.tril(jnp.ones((num_slots, num_slots), bool)), per_anchor.shape[3] // num_slots, axis=0)
    own_scores = jnp.where(sees, jnp.einsum("bgane,bgase->bgans", per_anchor, keys) * scale, MASKED)
    scores = jnp.einsum("bgne,bgte->bgnt", query, committed[0]) * scale
    scores = jnp.where(widen(committed_mask, query), scores, MASKED)
    mix = jax.nn.softmax(jnp.concatenate([scores, own_scores.reshape(batch, groups, nodes, -1)], -1), -1)
    out = jnp.einsum("bgnt,bgte->bgne", mix[..., : scores.shape[-1]], committed[1])
    shares = mix[..., scores.shape[-1] :].reshape(own_scores.shape)
    return out + jnp.einsum("bgans,bgase->bgane", shares, values).reshape(out.shape)


class _Context(NamedTuple):
    """The committed entries of a row, and which of them the states of its anchors see."""

    window: int | None
    positions: Int[Array, "B T"]
    at_anchors: Int[Array, "B A"]
    """Positions of the anchors, counted from the beginning of their document, as `positions`."""
    causal: Bool[Array, "B A T"]

    def mask(self, ahead: int) -> Bool[Array, "B A T"]:
        """The entries that a node `ahead` positions after each anchor sees: those of its anchor, within the window."""
        if self.window is None:
            return self.causal
        return self.causal & (self.at_anchors[:, :, None] + ahead - self.positions[:, None] < self.window)


def _take(values: Shaped[Array, "B T ..."], anchors: Int[Array, "B A"]) -> Shaped[Array, "B A ..."]:
    return jax.vmap(lambda v, a: v[a])(values, anchors)


def unroll(
    weights: Weights,
    config: TrunkConfig,
    features: Float[Array, "B T H"],
    embeddings: Float[Array, "B T H"] | None,
    anchors: Int[Array, "B A"],
    starts: Int[Array, "B T"] | None = None,
    embed_draft: EmbedDraft | None = None,
) -> Float[Array, "B A K H"]:
    """States g_1..g_K of every anchor, before the output norm. g_k of anchor a predicts the token at a + 1 + k.

    Args:
      features: the target's features of positions 0..T-1, as the trunk reads them.
      embeddings: the target's embedding of the token after each position. None without committed embeddings.
      anchors: indices in the row, 0..T-1, in any order.
      starts: the index in the row where the document of each token begins. No state sees earlier tokens. None: each
        row is one document.
      embed_draft: gives the embeddings of drafted tokens to states that read them. None: the row's tokens are used.
    """
    batch, num = features.shape[:2]
    positions, causal = sequence_layout(batch, num, starts)
    table = rope_table(config.rope, config.head_dim, positions)
    sees, _ = masks_within(config.window, positions, causal)
    context = _Context(config.window, positions, _take(positions, anchors), _take(causal, anchors))

    assert embeddings is not None or not config.committed_embeddings, "the drafter reads embeddings of committed tokens"
    inputs = x = apply_trunk(weights, config, features, embeddings, method="inputs")
    committed: list[KV] = []
    for layer in range(config.num_layers):
        before, (x, kv) = x, _block(weights, config, layer, x, table, sees, None, None)
        committed.append(kv)

    # The last layer of step 1 is computed again for the anchors only. XLA then keeps only the keys and values of that
    # layer from the pass above.
    first, last = functools.partial(attend_own, own=None), config.num_layers - 1
    at_anchors = rope_table(config.rope, config.head_dim, context.at_anchors)
    inner = _take(before, anchors), at_anchors, None, committed[last], context.mask(0)
    state, _ = _block(weights, config, last, *inner, attend_fn=first)
    if config.num_steps == 1:
        return state[:, :, None]
    if config.trunk == PARALLEL:
        later = _all_slots(weights, config, _take(inputs, anchors), context, committed)
    else:
        if embed_draft is None and config.reads_drafts:
            assert embeddings is not None
            of_row, end = embeddings, num - 1
            embed_draft = lambda step, state: _take(of_row, jnp.minimum(anchors + step, end))  # noqa: E731
        later = _recurrence(weights, config, state, embed_draft, context, committed)
    return jnp.concatenate([state[:, :, None], later], 2)


def _block(weights: Weights, config: TrunkConfig, layer: int, *args, **options) -> tuple[Array, KV]:
    """One layer of the trunk."""
    output = Block(config).apply({"params": weights["trunk"][f"layer_{layer}"]}, *args, **options)
    return cast(tuple[Array, KV], output)


def _recurrence(
    weights: Weights,
    config: TrunkConfig,
    state: Float[Array, "B A H"],
    embed_draft: EmbedDraft | None,
    context: _Context,
    committed: list[KV],
) -> Float[Array, "B A later H"]:
    """g_2..g_K of every anchor, each computed from the previous state. `state` is g_1."""
    states: list[Array] = []
    own: list[tuple[KV, ...]] = [()] * config.num_layers
    for step in range(1, config.num_steps):
        at = rope_table(config.rope, config.head_dim, context.at_anchors + step)
        mask = context.mask(step)
        drafted = None if embed_draft is None else embed_draft(step, state)
        state = apply_trunk(weights, config, state, drafted, method="inputs")
        for layer in range(config.num_layers):
            see = functools.partial(attend_own, own=own[layer])
            state, kv = _block(weights, config, layer, state, at, None, committed[layer], mask, attend_fn=see)
            own[layer] = (*own[layer], kv)
        states.append(state)
    return jnp.stack(states, 2)


def _all_slots(
    weights: Weights, config: TrunkConfig, last: Float[Array, "B A H"], context: _Context, committed: list[KV]
) -> Float[Array, "B A later H"]:
    """g_2..g_K of every anchor, in one pass over K - 1 slots per anchor. `last` is the trunk's input at the anchors."""
    (batch, num), num_slots = context.at_anchors.shape, config.num_steps - 1
    x = apply_trunk(weights, config, last, num_slots, method="slot_inputs").reshape(batch, num * num_slots, -1)
    positions = context.at_anchors[:, :, None] + 1 + jnp.arange(num_slots)
    table = rope_table(config.rope, config.head_dim, positions.reshape(batch, -1))
    mask = jnp.stack([context.mask(1 + slot) for slot in range(num_slots)], 2).reshape(batch, num * num_slots, -1)
    see = functools.partial(attend_slots, num_slots=num_slots)
    for layer in range(config.num_layers):
        x, _ = _block(weights, config, layer, x, table, None, committed[layer], mask, attend_fn=see)
    return x.reshape(batch, num, num_slots, -1)
