"""A block of mask tokens that sees the target's features as keys and values of every layer (DFlash, arXiv:2602.06036).

Every layer makes keys and values of the projected features with the weights that it also uses for its own states. So
features need one pass of products when they are committed and are never in the block. The block holds the anchor, which
is the last committed token, and mask tokens after it. One pass gives the states of all slots.

`config` is a `TrunkConfig` with `layer_type(layer)`, `sliding_window` and `sees_ahead`, as `DFlashConfig`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import FULL, SLIDING
from hsd_jax.kernels import native
from hsd_jax.kernels.ops import rms_norm
from hsd_jax.models.layers import MLP, Attention, rope_table
from hsd_jax.models.target import masks_within
from hsd_jax.types import KVCache, NewKV, Weights


def normed(weights: Weights, config: Any, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """`x` after a norm whose result only products read."""
    return rms_norm(x, weights["weight"], config.norm_eps, dtype=weights["weight"].dtype)


def context_pass(
    weights: Weights,
    config: Any,
    context: Float[Array, "B N H"],
    embeddings: None,
    positions: Int[Array, "B N"],
    sees: Bool[Array, "B N N"],
    cache: KVCache | None,
    active: Bool[Array, "B N"] | None = None,
) -> tuple[None, NewKV]:
    """The keys and values of committed positions. The arguments are those of `trunk_pass`.

    They depend on no mask and no other position. XLA drops the attention, whose output is not used.
    """
    table, pairs = rope_table(config.rope, config.head_dim, positions), []
    with native.only(active):
        for layer in range(config.num_layers):
            of_layer = {"params": weights["trunk"][f"layer_{layer}"]["attn"]}
            pairs.append(Attention(config).apply(of_layer, context, table, sees, None, None)[1])
    return None, _joined(pairs)


def _joined(pairs: list[Any]) -> NewKV:
    keys, values = zip(*pairs, strict=True)
    return NewKV(keys, values)


def block_states(
    weights: Weights,
    config: Any,
    context: Float[Array, "B M H"],
    num_context: Int[Array, "B"],
    block: Float[Array, "B slots H"],
    cache: KVCache,
) -> tuple[Float[Array, "B slots H"], NewKV]:
    """The states of all slots before the output norm, and the keys and values of the context, without those of slots.

    Args:
      context: projected features of positions after the cache, of which the first `num_context` of each row count.
      block: embeddings of the anchor, whose position is the first after the context, and of the mask tokens.
    """
    (batch, num), size = context.shape[:2], block.shape[1]
    anchor = (cache.length + num_context)[:, None]
    positions = jnp.concatenate([cache.length[:, None] + jnp.arange(num), anchor + jnp.arange(size)], 1)
    table, node = rope_table(config.rope, config.head_dim, positions), jnp.arange(num + size)
    is_there = ((node >= num) | (node < num_context[:, None]))[:, None]
    sees, seen = masks_within(None, positions, jnp.broadcast_to(is_there, (batch, num + size, num + size)), cache)
    masks: dict[str, Any] = {FULL: (sees, seen)}
    if config.sliding_window is not None:
        # The window ends at the anchor for all slots, as in training by speculators.
        first = jnp.maximum(anchor - config.sliding_window, 0)
        near = (positions >= first)[:, None] & (config.sees_ahead | (node <= node[:, None]))
        assert seen is not None
        masks[SLIDING] = sees & near, (jnp.broadcast_to(first, positions.shape), seen[1])
    slots = jnp.broadcast_to(num + jnp.arange(size), (batch, size))
    x, pairs = block, list[Any]()
    for layer in range(config.num_layers):
        own, (sees, seen) = weights["trunk"][f"layer_{layer}"], masks[config.layer_type(layer)]
        queries = normed(own["attn_norm"], config, x)
        nodes = jnp.concatenate([context.astype(queries.dtype), queries], 1)
        cached = cache.keys[layer], cache.values[layer]
        of_layer = {"params": own["attn"]}
        attention: Any = Attention(config)
        attended, kv = attention.apply(of_layer, nodes, table, sees, cached, seen, asking=slots)
        pairs.append((kv[0][:, :, :num], kv[1][:, :, :num]))
        x = x + attended
        mlp = MLP(config.intermediate_size, config.activation)
        x = x + mlp.apply({"params": own["mlp"]}, normed(own["mlp_norm"], config, x))
    return x, _joined(pairs)
