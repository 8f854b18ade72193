"""The trunk's K steps from many anchors at once, on its own states: training sees what inference computes.

An anchor a is the position of the last committed feature of a round whose root is token a + 1. Its first state reads
the committed entries 0..a; state k + 1 is fed state k at position a + k and also sees states 1..k of the same anchor
(EAGLE-3's training-time test, with no token in the recurrence). Equal to `models.hidden.trunk_pass` round by round,
which a test holds it to. Read next: `drafter.py`.
"""

from __future__ import annotations

import functools
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import DrafterConfig
from hsd_jax.models.layers import MASKED, Block, matmul, rms_norm, rope_table
from hsd_jax.models.target import causal_mask
from hsd_jax.types import Weights

KV = tuple[Array, Array]


def attend_own(
    query: Float[Array, "B G n E"],
    new: KV,
    new_mask: None,
    committed: KV,
    committed_mask: Bool[Array, "B 1 n T"],
    scale: float,
    softcap: float | None,
    *,
    own: tuple[KV, ...] | None,
) -> Float[Array, "B G n E"]:
    """`layers.attend` where each node sees committed entries under a mask, and its own anchor's states only.

    The nodes of a pass are anchors; an own entry is one product a node, so memory grows with A (T + K), not with
    (A K)^2.

    Args:
      new: keys and values of this pass [B, G, A, E]; each node sees its own.
      own: those of the anchors' earlier states, oldest first. None: the first step, whose entry is committed.
    """
    del new_mask, softcap  # a drafter has no softcap
    entries = () if own is None else (*own, new)
    batch, groups, nodes, width = query.shape
    scores = jnp.einsum("bgne,bgte->bgnt", query, committed[0]) * scale
    scores = jnp.where(committed_mask, scores, MASKED)
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


def _take(values: Float[Array, "B T ..."], anchors: Int[Array, "B A"]) -> Float[Array, "B A ..."]:
    return jax.vmap(lambda v, a: v[a])(values, anchors)


def unroll(
    weights: Weights,
    config: DrafterConfig,
    features: Float[Array, "B T H"],
    embeddings: Float[Array, "B T H"] | None,
    anchors: Int[Array, "B A"],
) -> Float[Array, "B A K H"]:
    """States g_1..g_K of every anchor, before the output norm; g_k of anchor a predicts the token at a + 1 + k.

    Args:
      features: the target's hidden states of positions 0..T-1.
      embeddings: the target's embedding of the token behind each position; None without committed embeddings.
      anchors: positions in 0..T-1, in any order.
    """
    trunk, batch, num = weights["trunk"], features.shape[0], features.shape[1]
    positions = jnp.broadcast_to(jnp.arange(num), (batch, num))
    table = rope_table(config.rope, config.head_dim, positions)
    causal = causal_mask(batch, num)
    mask = positions[:, None, :] <= anchors[:, :, None]

    def block(layer: int, *args, **options) -> tuple[Array, KV]:
        return cast(tuple[Array, KV], Block(config).apply({"params": trunk[f"layer_{layer}"]}, *args, **options))

    x = features
    if config.committed_embeddings:
        assert embeddings is not None, "the drafter reads embeddings of committed tokens: pass them"
        embeddings = rms_norm(embeddings, trunk["embedding_norm"]["weight"].astype(jnp.float32), config.norm_eps)
        x = x + matmul(embeddings, trunk["embedding_in"]["kernel"])
    committed: list[KV] = []
    for layer in range(config.num_layers):
        before, (x, kv) = x, block(layer, x, table, causal, None, None)
        committed.append(kv)

    # Step 1 once more, for the anchors only, through the last layer: of the pass above XLA then keeps no more than
    # the keys and values of that layer.
    first = functools.partial(attend_own, own=None)
    at_anchors = rope_table(config.rope, config.head_dim, anchors)
    last = config.num_layers - 1
    state, _ = block(last, _take(before, anchors), at_anchors, None, committed[last], mask, attend_fn=first)
    states: list[Array] = [state]
    own: list[tuple[KV, ...]] = [()] * config.num_layers
    for step in range(1, config.num_steps):
        at = rope_table(config.rope, config.head_dim, anchors + step)
        if config.committed_embeddings:
            state = state + trunk["no_token"].astype(jnp.float32)
        for layer in range(config.num_layers):
            see = functools.partial(attend_own, own=own[layer])
            state, kv = block(layer, state, at, None, committed[layer], mask, attend_fn=see)
            own[layer] = (*own[layer], kv)
        states.append(state)
    return jnp.stack(states, 2)
