"""The hidden-state drafter: K token-free trunk states, one batched head, a tree with token information.

The trunk reads the target's features and its own states only; drafted tokens first appear in `grow_tree` (Lyanna,
arXiv:2602.21224; methods.md 1.5). Weights and their modules live in `models/hidden.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.infer.tree import grow_tree
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.hidden import STATES, base_logits, embed_committed, token_info, trunk_features, trunk_pass
from hsd_jax.models.hot import to_columns
from hsd_jax.models.target import causal_mask
from hsd_jax.types import Drafter, DraftTree, DrawLaw, KVCache, ModelOutput, SamplingParams, Verdict


@typing.no_type_check  # tree.map puts shapes and shardings where the arrays stand
@flax.struct.dataclass
class HiddenState:
    """What the drafter carries between rounds.

    `pending` are the features the target computed in the last round, fused if the drafter reads several layers; the
    trunk has not read them yet. Cached plus pending features = committed tokens - 1.
    """

    cache: KVCache
    pending: Float[Array, "B M H"]
    next_tokens: Int[Array, "B M"]
    """The committed token behind each pending feature."""
    num_pending: Int[Array, "B"]


def trunk_states(
    models, target_config: ModelConfig, config: DrafterConfig, num_states: int, state: HiddenState
) -> tuple[Float[Array, "B K H"], KVCache]:
    """K = `num_states` token-free states, and the trunk's cache with the pending features committed."""
    embeddings = embed_committed(models["target"], target_config, config, state.next_tokens)
    states, kv = STATES[config.trunk](
        models["drafter"], config, state.pending, embeddings, state.num_pending, num_states, state.cache
    )
    return states, cache_lib.commit(state.cache, kv, None, state.num_pending, after=states[:, -1])


def check_tree(target_config: ModelConfig, config: DrafterConfig, tree: TreeConfig, law: DrawLaw) -> None:
    """Raises a ValueError if a trained drafter cannot draft such trees, or not for this target."""
    config.check_feature_layers(target_config.num_layers)
    if tree.depth > config.num_steps:
        raise ValueError(f"TreeConfig.depth={tree.depth}: this drafter was trained for 1 to {config.num_steps} steps")
    if tree.width > config.draft_vocab_size:
        whole = "vocabulary" if config.hot_tokens is None else "hot vocabulary"
        raise ValueError(f"TreeConfig.width={tree.width}: allowed are 1 to the {whole}, {config.draft_vocab_size}")
    if law is not DrawLaw.ARBITRARY:
        tree.sampled_widths()  # raises here, before anything compiles


def hidden_drafter(
    target_config: ModelConfig,
    config: DrafterConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    law: DrawLaw = DrawLaw.ARBITRARY,
) -> Drafter:
    """A `Drafter` whose trees have the shape of `tree`, their children chosen as `law` says.

    Raises:
      ValueError: if the tree is deeper than the trunk was trained for, the target lacks a layer the drafter reads, or
        a tree of this law cannot have this shape.
    """
    check_tree(target_config, config, tree, law)
    max_pending = tree.depth + 1

    def init(models, output: ModelOutput, tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        """Reads all features of the prompt but the last one, which becomes the pending query."""
        batch, num = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(num), (batch, num))
        following = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], 1)
        embeddings = embed_committed(models["target"], target_config, config, following)
        features = trunk_features(models["drafter"], config, output.hidden, output.features)
        _, kv = trunk_pass(models["drafter"], config, features, embeddings, positions, causal_mask(batch, num), None)
        cache = cache_lib.empty_cache(
            config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim, cache_dtype
        )
        cache = cache_lib.commit(cache, kv, None, jnp.maximum(length - 2, 0))
        last = jnp.maximum(length - 2, 0)[:, None]
        has_feature = (length >= 2)[:, None, None]  # a prompt of one token leaves nothing but its embedding
        feature = jnp.where(has_feature, jnp.take_along_axis(features, last[..., None], 1), 0.0)
        root = jnp.take_along_axis(tokens, length[:, None] - 1, 1)
        pad = ((0, 0), (0, max_pending - 1))
        return HiddenState(
            cache,
            jnp.pad(feature, (*pad, (0, 0))),
            jnp.pad(root, pad),
            jnp.where(length >= 2, 1, 0).astype(jnp.int32),
        )

    def draft(
        models,
        state: HiddenState,
        root: Int[Array, "B"],
        root_position: Int[Array, "B"],
        keys: jax.Array,
        sampling: SamplingParams,
    ):
        with jax.named_scope("trunk"):
            states, cache = trunk_states(models, target_config, config, tree.depth, state)
        with jax.named_scope("head"):
            base = base_logits(models["drafter"], config, models["target"], target_config, states)
        with jax.named_scope("tree"):
            bias = functools.partial(token_info, models["drafter"], config)
            hot_ids = models["drafter"].get("hot_ids")
            drafted = grow_tree(base, bias, root, tree, law, keys, root_position, sampling, hot_ids, config.vocab_size)
        return drafted, dataclasses.replace(state, cache=cache)

    def node_logp(models, state: HiddenState, drafted: DraftTree):
        states, _ = trunk_states(models, target_config, config, tree.depth, state)
        base = base_logits(models["drafter"], config, models["target"], target_config, states)
        above = jnp.take_along_axis(base, jnp.maximum(drafted.depth - 1, 0)[:, :, None], 1)
        previous = jnp.take_along_axis(drafted.tokens, jnp.maximum(drafted.parents, 0), 1)
        logp = jax.nn.log_softmax(above + token_info(models["drafter"], config, previous), -1)
        columns, _ = to_columns(models["drafter"].get("hot_ids"), drafted.tokens)
        chosen = jnp.take_along_axis(logp, columns[:, :, None], 2)[:, :, 0]
        return jnp.where(drafted.depth > 0, chosen, 0.0)

    def commit(models, state: HiddenState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        # XLA drops the final states where the trunk reads layers below.
        read = (output.hidden, output.features)
        path = jax.tree.map(lambda x: cache_lib.take_nodes(x, verdict.path, axis=1), read)
        pending = trunk_features(models["drafter"], config, *path)
        return HiddenState(state.cache, pending, verdict.emitted, num_committed)

    def grow(state: HiddenState, capacity: int):
        return dataclasses.replace(state, cache=cache_lib.grow(state.cache, capacity))

    return Drafter(init, draft, commit, grow, law, tree.nodes, tree.depth, config.feature_layers, node_logp)
