"""The target: one parameterised decoder-only transformer, as pure functions of its weights.

The fields of `ModelConfig` make it a Llama 2/3, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3. A pass computes N nodes per
row, which see the committed cache and each other under any mask: a causal mask in prefill and training, the ancestor
mask in verification. A pass never writes to the cache (`cache.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import FULL, SLIDING, ModelConfig
from hsd_jax.kernels import native
from hsd_jax.kernels.attention import Seen
from hsd_jax.kernels.int8 import Kernel
from hsd_jax.kernels.ops import embed, matmul
from hsd_jax.models.cache import commit
from hsd_jax.models.layers import Block, RMSNorm, attend_after, normal, param, rope_table
from hsd_jax.models.steering import Steer, of_layer
from hsd_jax.types import KVCache, ModelOutput, NewKV, Weights

EMBEDDING = -1
"""The feature layer that means the embeddings, before the first layer."""


class Target(nn.Module):
    """Embedding, blocks, final norm, LM head."""

    config: ModelConfig
    remat: bool = False

    @nn.compact
    def __call__(
        self,
        tokens,
        positions,
        new_mask,
        cache,
        feature_layers,
        active=None,
        earlier: NewKV | None = None,
        up_bias=None,
    ):
        c = self.config
        embedding = param(self, "embedding", normal(0.02), (c.vocab_size, c.hidden_size))
        x = embed(embedding, tokens) * c.embed_scale
        masks = {FULL: masks_within(None, positions, new_mask, cache, active)}
        masks[SLIDING] = masks[FULL]
        if c.sliding_window is not None:
            masks[SLIDING] = masks_within(c.sliding_window, positions, new_mask, cache, active)
        tables = {
            FULL: rope_table(c.rope, c.head_dim, positions),
            SLIDING: rope_table(c.rope_local or c.rope, c.head_dim, positions),
        }
        one_layer = _block_of(c, self.remat)
        is_traced = isinstance(x, Tracer) and not self.is_initializing()
        keys, values, features = [], [], [x] if EMBEDDING in feature_layers else []
        for layer in range(c.num_layers):
            kind = c.layer_type(layer)
            cached = None if cache is None else (cache.keys[layer], cache.values[layer])
            rest = tables[kind], masks[kind][0], cached, masks[kind][1]
            steer, name = of_layer(up_bias, layer), f"layer_{layer}"
            if is_traced:
                before = earlier and NewKV((earlier.keys[layer],), (earlier.values[layer],))
                x, (key, value) = one_layer(self.variables["params"][name], x, rest, before, steer)
            else:
                x, (key, value) = Block(c, name=name)(x, *rest, attend_after(earlier, layer), up_bias=steer)
            keys.append(key)
            values.append(value)
            if layer in feature_layers:
                features.append(x)
        hidden = RMSNorm(c.norm_eps, c.norm_offset, name="final_norm")(x)
        if not c.tie_embeddings:  # `lm_head` reads it
            param(self, "head", normal(c.hidden_size**-0.5), (c.vocab_size, c.hidden_size))
        logits = lm_head(dict(self.variables["params"]), c, hidden)
        return ModelOutput(logits, hidden, tuple(features), NewKV(tuple(keys), tuple(values)))


def _block_of(config: ModelConfig, remat: bool) -> Callable:
    """A decoder layer as a function of its weights. A pass traces it once, unless layers differ in their shapes."""

    def one_layer(weights: Weights, x: Array, rest: tuple, before: NewKV | None, up_bias: Any) -> Any:
        return Block(config).apply({"params": weights}, x, *rest, attend_after(before, 0), up_bias=up_bias)

    return jax.jit(jax.checkpoint(one_layer) if remat else one_layer)


def masks_within(
    window: int | None,
    positions: Int[Array, "B N"],
    new_mask: Bool[Array, "B N X"],
    cache: KVCache | None = None,
    active: Bool[Array, "B N"] | None = None,
) -> tuple[Bool[Array, "B N X"], Seen | None]:
    """The mask among the nodes of a pass, and the cache slots that each node sees.

    Args:
      window: the number of positions that a node sees, its own included. None: all.
      new_mask: if it also covers entries of earlier passes (X > N), the window is not applied to it.
      active: nodes whose output is used. The other nodes see nothing. None: all nodes.
    """
    if active is None and (rows := native.active_rows()) is not None:
        active = rows[:, None]  # rows that the kernels skip see nothing
    if active is not None:
        new_mask = new_mask & active[:, :, None]
    if window is not None and new_mask.shape[1] == new_mask.shape[2]:
        new_mask = new_mask & (positions[:, :, None] - positions[:, None, :] < window)
    if cache is None:
        return new_mask, None
    first = jnp.zeros_like(positions) if window is None else jnp.maximum(positions - window + 1, 0)
    last = jnp.broadcast_to(cache.length[:, None], positions.shape)
    return new_mask, (first, last if active is None else jnp.where(active, last, 0))


def head_rows(weights: Weights, config: ModelConfig) -> Kernel:
    """The weights of the LM head, one row per token."""
    return weights["embedding" if config.tie_embeddings else "head"]


def lm_head(weights: Weights, config: ModelConfig, hidden: Float[Array, "... H"]) -> Float[Array, "... V"]:
    """Logits in float32 from states after a final norm. The target and its drafters use it."""
    logits = logits_of_rows(head_rows(weights, config), config, hidden)
    if config.num_tokens == config.vocab_size:
        return logits
    return jnp.where(jnp.arange(config.vocab_size) < config.num_tokens, logits, -jnp.inf)


def logits_of_rows(rows: Kernel, config: ModelConfig, hidden: Float[Array, "... H"]) -> Float[Array, "... V"]:
    """`lm_head` for a subset of tokens, given by their rows of the head."""
    logits = matmul(hidden, rows)
    if config.logit_softcap is not None:
        logits = jnp.tanh(logits / config.logit_softcap) * config.logit_softcap
    return logits


def forward(
    weights: Weights,
    config: ModelConfig,
    tokens: Int[Array, "B N"],
    positions: Int[Array, "B N"],
    new_mask: Bool[Array, "B N X"],
    cache: KVCache | None = None,
    *,
    feature_layers: tuple[int, ...] = (),
    active: Bool[Array, "B N"] | None = None,
    earlier: NewKV | None = None,
    up_bias: Float[Array, "B N L F"] | Steer | None = None,
    remat: bool = False,
) -> ModelOutput:
    """One pass of the target over N nodes per row.

    Args:
      positions: absolute positions. In a tree they follow the depth of a node and not its index.
      new_mask: `new_mask[b, i, j]` says whether node i sees entry j: the `earlier` entries come first, then the nodes.
        Each node must see itself.
      cache: committed slots. Every node sees all of them, or those in its sliding window.
      feature_layers: layers whose residual stream is returned in `features`, or EMBEDDING. That of the last layer is
        before the final norm.
      active: nodes whose output is used. None: all. The output of other nodes has no meaning.
      earlier: keys and values of earlier passes over drafts, which are not in the cache.
      up_bias: the steering of a drafter, added to the up-projection of every layer's MLP (`drafters/steered.py`).
    """
    with native.only(active):
        output = Target(config, remat).apply(
            {"params": weights}, tokens, positions, new_mask, cache, feature_layers, active, earlier, up_bias
        )
    return cast(ModelOutput, output)  # flax's type also covers mutable collections; the target has none


def causal_mask(batch: int, num: int) -> Bool[Array, "B N N"]:
    """Node i sees nodes 0 to i."""
    return jnp.broadcast_to(jnp.tril(jnp.ones((num, num), bool)), (batch, num, num))


def sequence_layout(
    batch: int, num: int, starts: Int[Array, "B T"] | None = None
) -> tuple[Int[Array, "B T"], Bool[Array, "B T T"]]:
    """Positions in rows of T tokens, and the mask: a token sees itself and earlier tokens of its document.

    `starts` is the index in the row where the document of each token begins, and positions count from there. None: each
    row is one document.
    """
    index, causal = jnp.arange(num), causal_mask(batch, num)
    if starts is None:
        return jnp.broadcast_to(index, (batch, num)), causal
    return index - starts, causal & (index >= starts[:, :, None])


def forward_sequence(
    weights: Weights, config: ModelConfig, tokens: Int[Array, "B T"], starts: Int[Array, "B T"] | None = None, **options
) -> ModelOutput:
    """One causal pass over complete sequences from position 0. `starts` is as in `sequence_layout`."""
    positions, sees = sequence_layout(tokens.shape[0], tokens.shape[1], starts)
    return forward(weights, config, tokens, positions, sees, None, **options)


def read_chunk(
    weights: Weights,
    config: ModelConfig,
    cache: KVCache,
    tokens: Int[Array, "B chunk"],
    start: Int[Array, ""] | int,
    num_read: Int[Array, "B"],
    *,
    feature_layers: tuple[int, ...] = (),
    up_bias: Steer | None = None,
) -> tuple[ModelOutput, KVCache]:
    """A causal pass over the tokens at positions `start` to `start` + chunk, and the cache with their entries.

    With the CPU kernels, a prompt read in chunks gives exactly the results of a prompt read at once. The memory is
    linear in the length of the prompt. The cache needs a full chunk of slots from `start` on. All chunks together read
    `num_read` tokens of each row, and ignore the later ones.
    """
    batch, num = tokens.shape
    positions = jnp.broadcast_to(start + jnp.arange(num), (batch, num))
    before = dataclasses.replace(cache, length=jnp.full(batch, start, jnp.int32))
    active = positions < num_read[:, None]
    is_first = type(start) is int and start == 0 and not native.is_on()
    output = forward(
        weights,
        config,
        tokens,
        positions,
        causal_mask(batch, num),
        None if is_first else before,
        feature_layers=feature_layers,
        active=active,
        up_bias=up_bias,
    )
    cache = commit(before, output.new_kv, None, jnp.zeros(batch, jnp.int32), output.hidden, start, active)
    return output, dataclasses.replace(cache, length=jnp.minimum(num_read, start + num).astype(jnp.int32))


def init_target(key: jax.Array, config: ModelConfig) -> Weights:
    """Random float32 weights."""
    one = jnp.zeros((1, 1), jnp.int32)
    return dict(Target(config).init(key, one, one, jnp.ones((1, 1, 1), bool), None, ())["params"])
