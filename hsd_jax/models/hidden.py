"""The hidden-state drafter's weights: a token-free trunk, the fusion in front of it, and the token-info injector.

The trunk maps a state that predicts position t to one that predicts position t + 1; it reads the target's features of
committed positions and its own earlier states, never a drafted token (Lyanna, arXiv:2602.21224). The injector adds
what the previous token says, behind the LM head, as a low-rank bias. Read next: `infer/drafters/hidden.py`.
"""

from __future__ import annotations

import functools
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import FULL, DrafterConfig, ModelConfig
from hsd_jax.models.layers import Block, RMSNorm, Weight, attend, linears, matmul, rms_norm, rope_table
from hsd_jax.models.target import layer_masks, lm_head, logits_of_rows
from hsd_jax.types import KVCache, NewKV, Weights


class Trunk(nn.Module):
    """Decoder layers over states. `embeddings` are those of committed tokens; drafted positions have none."""

    config: DrafterConfig

    @nn.compact
    def __call__(self, states, embeddings, positions, new_mask, cache, earlier):
        c = self.config
        x = states
        if c.committed_embeddings:
            no_token = self.param("no_token", nn.initializers.zeros, (c.hidden_size,)).astype(jnp.float32)
            if embeddings is None:
                x = x + no_token
            else:
                embeddings = RMSNorm(c.norm_eps, name="embedding_norm")(embeddings)
                x = x + linears(embeddings, Weight(c.hidden_size, c.hidden_size, init_std=0.01, name="embedding_in"))[0]
        table = rope_table(c.rope, c.head_dim, positions)
        masks = layer_masks(_NO_WINDOW, positions, new_mask, cache)[FULL]
        keys, values = [], []
        for layer in range(c.num_layers):
            cached = None if cache is None else (cache.keys[layer], cache.values[layer])
            see = attend
            if earlier is not None:
                see = functools.partial(_attend_behind, (earlier.keys[layer], earlier.values[layer]))
            x, (key, value) = Block(c, name=f"layer_{layer}")(x, table, masks[0], cached, masks[1], see)
            keys.append(key)
            values.append(value)
        return x, NewKV(tuple(keys), tuple(values))


def _attend_behind(earlier, query, new, *rest):
    """`attend` where the nodes also see entries of earlier passes of this round, which no cache holds."""
    keys, values = (jnp.concatenate([e.astype(n.dtype), n], 2) for e, n in zip(earlier, new, strict=True))
    return attend(query, (keys, values), *rest)


_NO_WINDOW = ModelConfig(1, 1, 1, 1, 1, 1, 1)


def trunk_pass(
    weights: Weights,
    config: DrafterConfig,
    states: Float[Array, "B N H"],
    embeddings: Float[Array, "B N H"] | None,
    positions: Int[Array, "B N"],
    new_mask: Bool[Array, "B N X"],
    cache: KVCache | None,
    earlier: NewKV | None = None,
) -> tuple[Float[Array, "B N H"], NewKV]:
    """One pass of the trunk over N states a row.

    Args:
      states: features of committed positions, or the trunk's own states.
      embeddings: the target's embedding of the token that follows each position, where that token is committed;
        None for the trunk's own states. Ignored when the configuration has no committed embeddings.
      new_mask: which of the `earlier` entries, and behind them of the N states, each state sees.
      earlier: keys and values of earlier passes of the same round.
    Returns:
      The next states, before the output norm, and keys and values to commit or to drop.
    """
    if not config.committed_embeddings:
        embeddings = None
    variables = {"params": weights["trunk"]}
    output = Trunk(config).apply(variables, states, embeddings, positions, new_mask, cache, earlier)
    return cast(tuple[Array, NewKV], output)


def embed_committed(
    target_weights: Weights, target_config: ModelConfig, config: DrafterConfig, tokens: Int[Array, "B N"]
) -> Float[Array, "B N H"] | None:
    """The target's embeddings of committed tokens; None if the drafter does not read them (methods.md, A1)."""
    if not config.committed_embeddings:
        return None
    return target_weights["embedding"][tokens].astype(jnp.float32) * target_config.embed_scale


def trunk_features(
    weights: Weights,
    config: DrafterConfig,
    hidden: Float[Array, "... H"],
    features: tuple[Float[Array, "... H"], ...],
) -> Float[Array, "... H"]:
    """What the trunk reads of a pass of the target: the final hidden states, or the tapped layers fused.

    Fusion is one linear layer over the residual streams, each normalised with its own weights, side by side. It sees
    committed positions only, so the recurrence stays token-free (methods.md, A2).

    Args:
      hidden, features: of a `ModelOutput` with `config.feature_layers` tapped.
    """
    if not config.feature_layers:
        return hidden
    norms = weights["fusion"]["norm"].astype(jnp.float32).reshape(len(config.feature_layers), -1)
    normed = [rms_norm(x, norm, config.norm_eps) for x, norm in zip(features, norms, strict=True)]
    return matmul(jnp.concatenate(normed, -1), weights["fusion"]["kernel"])


def base_logits(
    weights: Weights,
    config: DrafterConfig,
    target_weights: Weights,
    target_config: ModelConfig,
    states: Float[Array, "... H"],
) -> Float[Array, "... V"]:
    """Logits of all states through the target's own LM head, in one product.

    V are the tokens that may be drafted: with a hot vocabulary the rows that `hot.attach` copied from the target's head
    stand in for the whole of it.
    """
    norm = weights["output_norm"]["weight"].astype(jnp.float32)
    normed = rms_norm(states, norm, config.norm_eps)
    if config.hot_tokens is None:
        return lm_head(target_weights, target_config, normed)
    if "head" not in weights:
        raise ValueError("a drafter with a hot vocabulary lacks its rows of the target's head: models.hot.attach them")
    return logits_of_rows(weights["head"], target_config, normed)


def token_info(weights: Weights, config: DrafterConfig, previous: Int[Array, "..."]) -> Float[Array, "... V"]:
    """The bias of the previous token: RMSNorm(W1[previous]) . W2; zero at initialisation (methods.md 1.5, 3).

    `previous` may be any token, cold ones too; V are the tokens that may be drafted (methods.md, A10).
    """
    row = weights["injector"]["previous"][previous]
    row = rms_norm(row, weights["injector"]["norm"].astype(jnp.float32), config.norm_eps)
    return matmul(row, weights["injector"]["bias"])


def init_drafter(key: jax.Array, config: DrafterConfig) -> Weights:
    """Random float32 weights; `injector/bias` is zero, so the first logits are the base logits.

    These are the weights that are learned; with a hot vocabulary `hot.attach` adds the rest.
    """
    trunk_key, table_key = jax.random.split(key)
    width = config.hidden_size * len(config.feature_layers)
    one = jnp.zeros((1, 1), jnp.int32)
    state = jnp.zeros((1, 1, config.hidden_size))
    mask = jnp.ones((1, 1, 1), bool)
    trunk = Trunk(config).init(trunk_key, state, state, one, mask, None, None)["params"]
    if config.committed_embeddings:  # created only on the pass without embeddings
        trunk = dict(trunk, no_token=jnp.zeros(config.hidden_size))
    fusion = {}
    if width:
        kernel = jax.random.normal(jax.random.fold_in(key, 1), (config.hidden_size, width)) * width**-0.5
        fusion = {"fusion": {"norm": jnp.ones(width), "kernel": kernel}}
    return {
        **fusion,
        "trunk": trunk,
        "output_norm": {"weight": jnp.ones(config.hidden_size)},
        "injector": {
            "previous": jax.random.normal(table_key, (config.vocab_size, config.rank)),
            "norm": jnp.ones(config.rank),
            "bias": jnp.zeros((config.draft_vocab_size, config.rank)),
        },
    }
