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
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import PARALLEL, TrunkConfig
from hsd_jax.kernels.attention import MASKED, by_nodes, widen
from hsd_jax.models.layers import Block, rope_table
from hsd_jax.models.target import masks_within, sequence_layout
from hsd_jax.models.trunk import apply_trunk
from hsd_jax.types import Weights

KV = tuple[Array, Array]
EmbedDraft = Callable[[int, Float[Array, "B A H"]], Float[Array, "B A H"]]
"""`embed_draft(depth, state)`: the target's embedding of the token at that depth, which `state` predicts."""


def _attend(
    query: Float[Array, "B G n E"],
    committed: KV,
    committed_mask: Bool[Array, "B N T"],
    scale: float,
    own_scores: Float[Array, "B G ..."],
) -> tuple[Float[Array, "B G n E"], Float[Array, "B G ..."]]:
    """One softmax over the committed entries that a node sees and entries of its anchor, of which the scores are given.

    Returned are the mix of the committed values, and the shares of the anchor's entries.
    """
    scores = jnp.einsum("bgne,bgte->bgnt", query, committed[0]) * scale
    scores = jnp.where(widen(committed_mask, query), scores, MASKED)
    own = own_scores.reshape(*scores.shape[:3], -1)
    mix = jax.nn.softmax(jnp.concatenate([scores, own], -1), -1)
    out = jnp.einsum("bgnt,bgte->bgne", mix[..., : scores.shape[-1]], committed[1])
    return out, mix[..., scores.shape[-1] :].reshape(own_scores.shape)


def attend_own(query, new: KV, _, committed: KV, committed_mask, scale: float, softcap, *, own: tuple[KV, ...] | None):
    """`attention.attend` where each node sees committed entries under a mask, and only the states of its own anchor.

    The nodes of a pass are anchors. A node computes one product per own entry, so memory grows with A (T + K) and not
    with (A K)^2. `own` are the anchors' earlier states, oldest first. None: the first step, whose entry is committed.
    """
    entries = () if own is None else (*own, new)
    per_anchor = query.reshape(*query.shape[:2], new[0].shape[2], -1, query.shape[3])
    own_scores = [jnp.sum(per_anchor * key[:, :, :, None], -1) * scale for key, _ in entries]
    none = jnp.zeros((*per_anchor.shape[:-1], 0))
    out, shares = _attend(query, committed, committed_mask, scale, jnp.stack(own_scores, -1) if entries else none)
    for i, (_, value) in enumerate(entries):
        out = out + (shares[..., i, None] * value[:, :, :, None]).reshape(out.shape)
    return by_nodes(out, committed_mask.shape[1])


def attend_slots(query, new: KV, _, committed: KV, committed_mask, scale: float, softcap, *, num_slots: int):
    """`attention.attend` where each slot sees committed entries under a mask, and the slots of its anchor up to itself.

    The nodes of a pass are S = `num_slots` slots of each anchor, anchor by anchor. Memory grows with A S (T + S).
    """
    batch, groups, _, width = query.shape
    keys, values = (x.reshape(batch, groups, -1, num_slots, width) for x in new)
    per_anchor = query.reshape(batch, groups, keys.shape[2], -1, width)
    sees = jnp.repeat(jnp.tril(jnp.ones((num_slots, num_slots), bool)), per_anchor.shape[3] // num_slots, axis=0)
    own_scores = jnp.where(sees, jnp.einsum("bgane,bgase->bgans", per_anchor, keys) * scale, MASKED)
    out, shares = _attend(query, committed, committed_mask, scale, own_scores)
    out = out + jnp.einsum("bgans,bgase->bgane", shares, values).reshape(out.shape)
    return by_nodes(out, committed_mask.shape[1])


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
    sees, _ = masks_within(config.window, positions, causal)
    take = jax.vmap(lambda of_tokens, own: of_tokens[own])
    at_anchors, causal = take(positions, anchors), take(causal, anchors)

    def rope(positions: Array) -> tuple[Array, Array]:
        return rope_table(config.rope, config.head_dim, positions)

    def mask(ahead: int) -> Bool[Array, "B A T"]:
        """The committed entries that a node `ahead` positions after each anchor sees: the anchor's, in the window."""
        if config.window is None:
            return causal
        return causal & (at_anchors[:, :, None] + ahead - positions[:, None] < config.window)

    def block(layer: int, *args, **options) -> tuple[Array, KV]:
        output = Block(config).apply({"params": weights["trunk"][f"layer_{layer}"]}, *args, **options)
        return cast(tuple[Array, KV], output)

    assert embeddings is not None or not config.committed_embeddings, "the drafter reads embeddings of committed tokens"
    inputs = x = apply_trunk(weights, config, features, embeddings, method="inputs")
    table, committed = rope(positions), list[KV]()
    for layer in range(config.num_layers):
        before, (x, kv) = x, block(layer, x, table, sees, None, None)
        committed.append(kv)

    # The last layer of step 1 is computed again for the anchors only. XLA then keeps only the keys and values of that
    # layer from the pass above.
    first, last = functools.partial(attend_own, own=None), config.num_layers - 1
    state, _ = block(last, take(before, anchors), rope(at_anchors), None, committed[last], mask(0), attend_fn=first)
    if config.num_steps == 1:
        return state[:, :, None]

    def recurrence(state: Float[Array, "B A H"]) -> Float[Array, "B A later H"]:
        """g_2..g_K of every anchor, each computed from the previous state."""
        states: list[Array] = []
        own: list[tuple[KV, ...]] = [()] * config.num_layers
        for step in range(1, config.num_steps):
            table, seen = rope(at_anchors + step), mask(step)
            drafted = None if embed_draft is None else embed_draft(step, state)
            state = apply_trunk(weights, config, state, drafted, method="inputs")
            for layer in range(config.num_layers):
                see = functools.partial(attend_own, own=own[layer])
                state, kv = block(layer, state, table, None, committed[layer], seen, attend_fn=see)
                own[layer] = (*own[layer], kv)
            states.append(state)
        return jnp.stack(states, 2)

    def all_slots(last: Float[Array, "B A H"]) -> Float[Array, "B A later H"]:
        """g_2..g_K in one pass over K - 1 slots per anchor. `last` is the trunk's input at the anchors."""
        num_slots = config.num_steps - 1
        x = apply_trunk(weights, config, last, num_slots, method="slot_inputs").reshape(batch, -1, last.shape[-1])
        table = rope((at_anchors[:, :, None] + 1 + jnp.arange(num_slots)).reshape(batch, -1))
        seen = jnp.stack([mask(1 + slot) for slot in range(num_slots)], 2).reshape(batch, -1, num)
        see = functools.partial(attend_slots, num_slots=num_slots)
        for layer in range(config.num_layers):
            x, _ = block(layer, x, table, None, committed[layer], seen, attend_fn=see)
        return x.reshape(*last.shape[:2], num_slots, -1)

    if config.trunk == PARALLEL:
        return jnp.concatenate([state[:, :, None], all_slots(take(inputs, anchors))], 2)
    if embed_draft is None and config.reads_drafts:
        assert embeddings is not None
        of_row = embeddings
        embed_draft = lambda step, state: take(of_row, jnp.minimum(anchors + step, num - 1))  # noqa: E731
    return jnp.concatenate([state[:, :, None], recurrence(state)], 2)
