"""The trunk computes states for the next positions. A product with the target's LM head turns them into logits.

It reads the target's features of committed positions and gives K states. A recurrent trunk maps a state that predicts
position t to one that predicts t + 1 (Lyanna, arXiv:2602.21224). It reads no token, or in EAGLE the embedding of a
drafted token. A parallel trunk gives all states in one pass over learned slots (as DFlash and DSpark do, methods.md
1.4).
"""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import PARALLEL, RECURRENT, DrafterConfig, ModelConfig, TrunkConfig
from hsd_jax.kernels import native
from hsd_jax.kernels.ops import embed, matmul, rms_norm
from hsd_jax.models.layers import Block, RMSNorm, Weight, attend_after, linears, normal, param, rope_table, zeros
from hsd_jax.models.target import causal_mask, lm_head, logits_of_rows, masks_within
from hsd_jax.types import KVCache, NewKV, Weights


class Trunk(nn.Module):
    """Decoder layers over states. `embeddings` are those of committed tokens; drafted positions have none.

    A parallel trunk adds `num_slots` slots after the states of a pass. `slots_after` [B] is the index of each row's
    last state. The slots start from its input and continue its positions. `positions` and `new_mask` then cover states
    and slots. `asking` [B, asked] are the nodes whose next states are computed. For the other nodes the last layer
    computes only keys and values.
    """

    config: TrunkConfig

    def setup(self):
        c = self.config
        self.layer = [Block(c) for _ in range(c.num_layers)]
        if c.pairs_in_attention:
            return
        if c.reads_drafts:
            self.embedding_norm = RMSNorm(c.norm_eps)
            self.pair_in = Weight(c.hidden_size, 2 * c.hidden_size, init=normal(0.01))
        elif c.committed_embeddings:
            self.embedding_norm = RMSNorm(c.norm_eps)
            self.embedding_in = Weight(c.hidden_size, c.hidden_size, init=normal(0.01))
            if c.trunk == RECURRENT:
                self.no_token = param(self, "no_token", zeros, (c.hidden_size,))
        if c.trunk == PARALLEL and c.num_steps > 1:
            self.slots = param(self, "slots", zeros, (c.num_steps - 1, c.hidden_size))

    def inputs(self, states, embeddings):
        """The input of the first layer for features of committed positions, or for the trunk's own states."""
        if self.config.pairs_in_attention:
            return states
        if self.config.reads_drafts:  # EAGLE's layer over feature and embedding, added to the feature
            pair = jnp.concatenate([states, self.embedding_norm(embeddings)], -1)
            return states + linears(pair, self.pair_in)[0]
        if not self.config.committed_embeddings:
            return states
        if embeddings is None:
            return states + self.no_token.astype(jnp.float32)
        return states + linears(self.embedding_norm(embeddings), self.embedding_in)[0]

    def slot_inputs(self, last, num_slots):
        """The inputs of the slots [..., slots, H] after the committed position whose input is `last` [..., H]."""
        return last[..., None, :] + self.slots[:num_slots].astype(jnp.float32)

    def __call__(
        self,
        states,
        embeddings,
        positions,
        new_mask,
        cache,
        earlier,
        num_slots=0,
        slots_after=None,
        asking=None,
        active=None,
    ):
        c, x = self.config, self.inputs(states, embeddings)
        if num_slots and slots_after is not None:
            last = jnp.take_along_axis(x, slots_after[:, None, None], 1)[:, 0]
            x = jnp.concatenate([x, self.slot_inputs(last, num_slots)], 1)
        table = rope_table(c.rope, c.head_dim, positions)
        masks = masks_within(c.window, positions, new_mask, cache, active)
        keys, values = [], []
        for i, layer in enumerate(self.layer):
            cached = None if cache is None else (cache.keys[i], cache.values[i])
            rest = masks[0], cached, masks[1], attend_after(earlier, i)
            own = {"embeddings": embeddings} if c.pairs_in_attention and i == 0 else {}
            x, (key, value) = layer(x, table, *rest, asking if i == c.num_layers - 1 else None, **own)
            keys.append(key)
            values.append(value)
        return x, NewKV(tuple(keys), tuple(values))


def apply_trunk(weights: Weights, config: TrunkConfig, *args: Any, **options: Any) -> Any:
    """`Trunk.__call__`, or its `method`, with these weights."""
    return Trunk(config).apply({"params": weights["trunk"]}, *args, **options)


def trunk_pass(
    weights: Weights,
    config: TrunkConfig,
    states: Float[Array, "B N H"],
    embeddings: Float[Array, "B N H"] | None,
    positions: Int[Array, "B N"],
    new_mask: Bool[Array, "B N X"],
    cache: KVCache | None,
    earlier: NewKV | None = None,
    asking: Int[Array, "B asked"] | None = None,
    active: Bool[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B asked H"], NewKV]:
    """One pass of the trunk over N states per row.

    Args:
      states: features of committed positions, or the trunk's own states.
      embeddings: the target's embedding of the token after each position, if that token is committed. None for the
        trunk's own states. It is ignored if the configuration has no committed embeddings. An EAGLE drafter also reads
        the embeddings of drafted tokens.
      new_mask: the entries that each state sees: first the `earlier` entries, then the N states.
      earlier: keys and values of earlier passes of the same round.
      asking: the nodes whose next states are computed. None: all N.
      active: as in `target.forward`. Only without `asking`.
    Returns:
      The next states before the output norm, and the keys and values of all N states, which are not yet committed.
    """
    of_pass = states, embeddings, positions, new_mask, cache, earlier
    with native.only(active):
        return apply_trunk(weights, config, *of_pass, asking=asking, active=active)


def embed_committed(
    target_weights: Weights, target_config: ModelConfig, config: DrafterConfig, tokens: Int[Array, "B N"]
) -> Float[Array, "B N H"] | None:
    """The target's embeddings of committed tokens. None if the drafter does not read them (methods.md, A1)."""
    if not config.committed_embeddings:
        return None
    return embed(target_weights["embedding"], tokens) * target_config.embed_scale


def recurrent_states(
    weights: Weights,
    config: TrunkConfig,
    features: Float[Array, "B M H"],
    embeddings: Float[Array, "B M H"] | None,
    num_features: Int[Array, "B"],
    num_states: int,
    cache: KVCache,
) -> tuple[Float[Array, "B K H"], NewKV]:
    """K = `num_states` states of the recurrent trunk: one pass over the features, then K - 1 over the previous state.

    `features` [:, :num_features] are those of committed positions after the cache. Returned are the states before the
    output norm, and the keys and values of the features. Those of the states are dropped.
    """
    batch, num = features.shape[:2]
    positions = cache.length[:, None] + jnp.arange(num)
    last = jnp.maximum(num_features - 1, 0)[:, None]
    out, kv = trunk_pass(weights, config, features, embeddings, positions, causal_mask(batch, num), cache, asking=last)
    states, earlier = [out], kv
    is_feature = (jnp.arange(num) < num_features[:, None])[:, None]
    for step in range(1, num_states):
        position = (cache.length + num_features + step - 1)[:, None]
        sees = jnp.concatenate([is_feature, jnp.ones((batch, 1, step), bool)], -1)
        out, own = trunk_pass(weights, config, states[-1], None, position, sees, cache, earlier)
        states.append(out)
        earlier = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 2), earlier, own)
    return jnp.concatenate(states, 1), kv


def parallel_states(
    weights: Weights,
    config: TrunkConfig,
    features: Float[Array, "B M H"],
    embeddings: Float[Array, "B M H"] | None,
    num_features: Int[Array, "B"],
    num_states: int,
    cache: KVCache,
) -> tuple[Float[Array, "B K H"], NewKV]:
    """K = `num_states` states of the parallel trunk, in one pass over the features and K - 1 slots after them.

    The first state is the trunk's output at the last feature, as in the recurrence. The slot of depth k (2 to K) is
    k - 1 positions further. Its input is that of the last feature, embedding included, plus a vector that is learned
    for its depth. It sees the features and the slots up to itself. Features see no slot, so their committed keys and
    values do not depend on K. The states of lower depths do not depend on K either. The rest is as in
    `recurrent_states`.
    """
    (batch, num), num_slots = features.shape[:2], num_states - 1
    offsets = [jnp.broadcast_to(jnp.arange(num), (batch, num)), num_features[:, None] + jnp.arange(num_slots)]
    positions = cache.length[:, None] + jnp.concatenate(offsets, 1)
    node = jnp.arange(num + num_slots)
    is_padding = (num_features[:, None] <= node) & (node < num)
    sees = causal_mask(batch, num + num_slots) & ~((node >= num)[:, None] & is_padding[:, None])
    last = jnp.maximum(num_features - 1, 0)
    slots = jnp.broadcast_to(num + jnp.arange(num_slots), (batch, num_slots))
    asking = jnp.concatenate([last[:, None], slots], 1)
    of_pass = features, embeddings, positions, sees, cache, None, num_slots, last, asking
    states, kv = apply_trunk(weights, config, *of_pass)
    return states, jax.tree.map(lambda x: x[:, :, :num], kv)


STATES = {RECURRENT: recurrent_states, PARALLEL: parallel_states}
"""The function that computes the states of a round, by the kind of trunk."""


def trunk_features(
    weights: Weights, config: DrafterConfig, hidden: Float[Array, "... H"], features: tuple[Float[Array, "... H"], ...]
) -> Float[Array, "... H"]:
    """The trunk's input from a pass of the target: final hidden states, or fused residual streams of several layers.

    The fusion normalises each residual stream with its own weights, concatenates them and applies one linear layer. It
    reads only committed positions, so the recurrence stays token-free (methods.md, A2).
    """
    if not config.feature_layers:
        return hidden
    norms = weights["fusion"]["norm"].reshape(len(config.feature_layers), -1)
    normed = [rms_norm(x, norm, config.norm_eps, dtype=norm.dtype) for x, norm in zip(features, norms, strict=True)]
    return matmul(jnp.concatenate(normed, -1), weights["fusion"]["kernel"])


def base_logits(
    weights: Weights,
    config: DrafterConfig,
    target_weights: Weights,
    target_config: ModelConfig,
    states: Float[Array, "... H"],
) -> Float[Array, "... C"]:
    """Logits of all states through the target's LM head, in one product.

    The drafter's own head replaces it: rows that `draft_vocab.attach` copied from the target's for a reduced draft
    vocabulary, or a head that was trained (`dflash.py`).
    """
    norm = weights["output_norm"]["weight"]
    normed = rms_norm(states, norm, config.norm_eps, dtype=norm.dtype)
    if "head" not in weights:
        return lm_head(target_weights, target_config, normed)
    return logits_of_rows(weights["head"], target_config, normed)


def init_fusion(key: jax.Array, config: DrafterConfig) -> Weights:
    """Initial weights that every trained drafter has: the norm before the head, and the fusion of feature layers."""
    weights: Weights = {"output_norm": {"weight": jnp.ones(config.hidden_size)}}
    width = config.hidden_size * len(config.feature_layers)
    if width:
        kernel = jax.random.normal(jax.random.fold_in(key, 1), (config.hidden_size, width)) * width**-0.5
        weights["fusion"] = {"norm": jnp.ones(width), "kernel": kernel}
    return weights


def init_trunk(key: jax.Array, config: TrunkConfig) -> Weights:
    """Random float32 weights of the trunk."""
    one = jnp.zeros((1, 1), jnp.int32)
    state = jnp.zeros((1, 1, config.hidden_size))
    mask = jnp.ones((1, 1, 1), bool)
    return cast(Weights, Trunk(config).init(key, state, state, one, mask, None, None)["params"])
