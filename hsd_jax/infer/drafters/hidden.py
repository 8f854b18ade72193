"""The hidden-state drafter: K token-free trunk states, one batched head, a tree with token information.

The trunk reads the target's features and its own states only; drafted tokens first appear in `grow_tree` (Lyanna,
arXiv:2602.21224; methods.md 1.5). What becomes of states a round did not use is `reuse.py`; when the trunk runs is
decided here. Weights and their modules live in `models/hidden.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.config import (
    AHEAD,
    MIX,
    NO_REUSE,
    NONE,
    SKIP,
    SUM,
    UNFUSED,
    UNION,
    DrafterConfig,
    ModelConfig,
    ReuseConfig,
    TreeConfig,
)
from hsd_jax.infer import reuse as reuse_lib
from hsd_jax.infer.reuse import Spares
from hsd_jax.infer.tree import grow_tree
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.hidden import STATES, base_logits, embed_committed, token_info, trunk_features, trunk_pass
from hsd_jax.models.hot import to_columns
from hsd_jax.models.target import causal_mask
from hsd_jax.types import Drafter, DraftTree, DrawLaw, KVCache, ModelOutput, NewKV, SamplingParams, Verdict


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
    spares: Spares | None = None
    """What earlier trunk runs left for the positions ahead; None where nothing is reused."""


class Levels(NamedTuple):
    """What the tree of a round grows from."""

    logits: Float[Array, "B D C"]
    num: Int[Array, "B"] | None = None
    """Levels of each row that have logits; None: all."""
    rival: Float[Array, "B D C"] | None = None
    """Logits of a second proposer (form UNION)."""


def run_trunk(
    models, target_config: ModelConfig, config: DrafterConfig, num_states: int, state: HiddenState
) -> tuple[Float[Array, "B K H"], NewKV]:
    """K = `num_states` token-free states, and keys and values of the pending features."""
    embeddings = embed_committed(models["target"], target_config, config, state.next_tokens)
    read = STATES[config.trunk]
    return read(models["drafter"], config, state.pending, embeddings, state.num_pending, num_states, state.cache)


def trunk_states(
    models, target_config: ModelConfig, config: DrafterConfig, num_states: int, state: HiddenState
) -> tuple[Float[Array, "B K H"], KVCache]:
    """K = `num_states` token-free states, and the trunk's cache with the pending features committed."""
    states, kv = run_trunk(models, target_config, config, num_states, state)
    return states, cache_lib.commit(state.cache, kv, None, state.num_pending, after=states[:, -1])


def hidden_drafter(
    target_config: ModelConfig,
    config: DrafterConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    law: DrawLaw = DrawLaw.ARBITRARY,
    reuse: ReuseConfig = NO_REUSE,
) -> Drafter:
    """A `Drafter` whose trees have the shape of `tree`, their children chosen as `law` says.

    Args:
      reuse: what becomes of states that a round leaves over; no form changes what is decoded.
    Raises:
      ValueError: if the tree is deeper than the trunk was trained for, the target lacks a layer the drafter reads, a
        tree of this law cannot have this shape, or this form of reuse needs another tree, law or drafter.
    """
    config.check_feature_layers(target_config.num_layers)
    if tree.depth > config.num_steps:
        raise ValueError(f"TreeConfig.depth={tree.depth}: this drafter was trained for 1 to {config.num_steps} steps")
    if tree.width > config.draft_vocab_size:
        whole = "vocabulary" if config.hot_tokens is None else "hot vocabulary"
        raise ValueError(f"TreeConfig.width={tree.width}: allowed are 1 to the {whole}, {config.draft_vocab_size}")
    if law is not DrawLaw.ARBITRARY:
        tree.sampled_widths()  # raises here, before anything compiles
    reuse_lib.check_reuse(reuse, config, tree, law)
    num_states = reuse.num_states(tree.depth, config.num_steps)
    levels_of_round = _schedule(target_config, config, tree, reuse, num_states)
    runs_every_round = reuse.form not in (SKIP, UNFUSED)
    # A row without a trunk run keeps its pending features. Since a tree is no deeper than the spares it grows from, a
    # row commits at most K + 1 tokens from one trunk run to the next.
    max_pending = tree.depth + 1 if runs_every_round else num_states + 1

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
        state = HiddenState(
            cache,
            jnp.pad(feature, (*pad, (0, 0))),
            jnp.pad(root, pad),
            jnp.where(length >= 2, 1, 0).astype(jnp.int32),
        )
        if reuse.form == NONE:
            return state
        if reuse.form == AHEAD:  # the first tree needs states, and no round has made any
            states, _ = run_trunk(models, target_config, config, num_states, state)
            logits = base_logits(models["drafter"], config, models["target"], target_config, states)
            return dataclasses.replace(state, spares=reuse_lib.fresh_spares(logits))
        empty = jnp.zeros((batch, num_states, config.draft_vocab_size))
        return dataclasses.replace(state, spares=Spares(empty, jnp.zeros(batch, jnp.int32)))

    def draft(
        models,
        state: HiddenState,
        root: Int[Array, "B"],
        root_position: Int[Array, "B"],
        keys: jax.Array,
        sampling: SamplingParams,
    ):
        levels, state = levels_of_round(models, state)
        with jax.named_scope("tree"):
            bias = functools.partial(token_info, models["drafter"], config)
            hot_ids = models["drafter"].get("hot_ids")
            return grow_tree(
                levels.logits,
                bias,
                root,
                tree,
                law,
                keys,
                root_position,
                sampling,
                hot_ids,
                config.vocab_size,
                levels.num,
                levels.rival,
            ), state

    def node_logp(models, state: HiddenState, drafted: DraftTree):
        levels, _ = levels_of_round(models, state)
        depth_index = jnp.maximum(drafted.depth - 1, 0)[:, :, None]
        previous = jnp.take_along_axis(drafted.tokens, jnp.maximum(drafted.parents, 0), 1)
        added = token_info(models["drafter"], config, previous)
        columns, _ = to_columns(models["drafter"].get("hot_ids"), drafted.tokens)

        def chosen(logits):
            logp = jax.nn.log_softmax(jnp.take_along_axis(logits, depth_index, 1) + added, -1)
            return jnp.take_along_axis(logp, columns[:, :, None], 2)[:, :, 0]

        logp = chosen(levels.logits)
        if levels.rival is not None:
            logp = jnp.maximum(logp, chosen(levels.rival))
        return jnp.where(drafted.depth > 0, logp, 0.0)

    def commit(models, state: HiddenState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        # XLA drops the final states where the trunk reads layers below.
        read = (output.hidden, output.features)
        path = jax.tree.map(lambda x: cache_lib.take_nodes(x, verdict.path, axis=1), read)
        pending, next_tokens = trunk_features(models["drafter"], config, *path), verdict.emitted
        spares = None if state.spares is None else reuse_lib.advance(state.spares, num_committed)
        if runs_every_round:
            return HiddenState(state.cache, pending, next_tokens, num_committed, spares)
        # A finished row must not ask for trunk runs that the others would wait for.
        spares = dataclasses.replace(spares, num=jnp.where(num_committed == 0, num_states, spares.num))
        slot, behind = jnp.arange(max_pending), state.num_pending[:, None]
        index = jnp.where(slot < behind, slot, max_pending + slot - behind)
        pending, next_tokens = (
            cache_lib.take_nodes(jnp.concatenate(both, 1), index, axis=1)
            for both in ((state.pending, pending), (state.next_tokens, next_tokens))
        )
        return HiddenState(state.cache, pending, next_tokens, state.num_pending + num_committed, spares)

    def grow(state: HiddenState, capacity: int):
        return dataclasses.replace(state, cache=cache_lib.grow(state.cache, capacity))

    return Drafter(
        init,
        draft,
        commit,
        grow,
        law,
        tree.nodes,
        tree.depth,
        config.feature_layers,
        node_logp,
        reach=max_pending - 1,
    )


def _schedule(
    target_config: ModelConfig, config: DrafterConfig, tree: TreeConfig, reuse: ReuseConfig, num_states: int
) -> Callable[[Any, HiddenState], tuple[Levels, HiddenState]]:
    """`levels_of_round(models, state) -> (levels, state)`: what a round drafts from, and when the trunk runs for it."""

    def read_pending(models, state: HiddenState) -> tuple[Float[Array, "B K C"], HiddenState]:
        """Base logits of a trunk run for every row, and the state with the pending features committed."""
        with jax.named_scope("trunk"):
            states, cache = trunk_states(models, target_config, config, num_states, state)
        with jax.named_scope("head"):
            logits = base_logits(models["drafter"], config, models["target"], target_config, states)
        return logits, dataclasses.replace(state, cache=cache)

    def drop(models, state: HiddenState):
        logits, state = read_pending(models, state)
        return Levels(logits), state

    def fuse(models, state: HiddenState):
        """SUM, MIX and UNION: old and new states take part in one tree, so one target pass judges both."""
        fresh, after = read_pending(models, state)
        old = state.spares
        with jax.named_scope("reuse"):
            if reuse.form == SUM:
                levels = Levels(reuse_lib.add(fresh, old))
            elif reuse.form == MIX:
                levels = Levels(reuse_lib.mix(fresh, old, models["drafter"]["mix"]))
            else:
                levels = Levels(fresh, rival=reuse_lib.where_spare(old, old.logits, fresh))
        # Only what a trunk says itself is kept, so no state counts in more than two rounds (methods.md, A8).
        return levels, dataclasses.replace(after, spares=reuse_lib.fresh_spares(fresh))

    def run_ahead(models, state: HiddenState):
        """AHEAD: the tree reads nothing of this round's trunk run, nor that anything of this round's target pass."""
        fresh, after = read_pending(models, state)
        levels = Levels(state.spares.logits[:, : tree.depth])
        return levels, dataclasses.replace(after, spares=reuse_lib.fresh_spares(fresh))

    def run_if_needed(models, state: HiddenState):
        """SKIP and UNFUSED: rows with spares enough draft from these; the trunk runs if any other row is left.

        Which states a row drafts from does not depend on the other rows: one with spares enough uses them even where
        the trunk runs for another.
        """
        old = state.spares
        needs = old.num < reuse_lib.min_spares(reuse, tree.depth, config.num_steps)

        def run():
            states, kv = run_trunk(models, target_config, config, num_states, state)
            return base_logits(models["drafter"], config, models["target"], target_config, states), kv

        def keep():
            return old.logits, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run)[1])

        with jax.named_scope("trunk"):
            logits, kv = lax.cond(jnp.any(needs), run, keep)
            # Written in every round, counted for rows that ran; the next write covers the rest.
            cache = cache_lib.commit(state.cache, kv, None, jnp.where(needs, state.num_pending, 0), after=logits)
        logits = jnp.where(needs[:, None, None], logits, old.logits)
        num = jnp.where(needs, num_states, old.num)
        kept = jnp.where(needs, num, 0) if reuse.form == UNFUSED else num  # spares are resampled from once
        state = dataclasses.replace(
            state, cache=cache, num_pending=jnp.where(needs, 0, state.num_pending), spares=Spares(logits, kept)
        )
        return Levels(logits[:, : tree.depth], num=jnp.minimum(num, tree.depth)), state

    schedules = dict.fromkeys((SUM, MIX, UNION), fuse) | dict.fromkeys((SKIP, UNFUSED), run_if_needed)
    return ({NONE: drop, AHEAD: run_ahead} | schedules)[reuse.form]
