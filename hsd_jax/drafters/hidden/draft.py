"""The hidden-state drafter: K token-free trunk states, one batched head, a tree with token information.

The trunk reads the target's features and its own states only; drafted tokens first appear in the `Grower` (Lyanna,
arXiv:2602.21224; methods.md 1.5). When the trunk runs, and what becomes of states a round did not use, stands in
`schedule.py`. The trunk is `models/trunk.py`, token information `weights.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.config import AHEAD, NO_REUSE, NONE, SKIP, UNFUSED, ModelConfig, ReuseConfig, TreeConfig, TrunkConfig
from hsd_jax.drafters.hidden import reuse as reuse_lib
from hsd_jax.drafters.hidden.config import HiddenConfig
from hsd_jax.drafters.hidden.schedule import HiddenState, append_pending, make_schedule, run_trunk
from hsd_jax.drafters.hidden.weights import inject, read_tree, token_bias
from hsd_jax.drafters.shared import check_tree, last_feature
from hsd_jax.infer.tree import Grower, sharpness
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.draft_vocab import to_columns
from hsd_jax.models.target import causal_mask
from hsd_jax.models.trunk import base_logits, embed_committed, trunk_features, trunk_pass
from hsd_jax.types import Drafter, DraftTree, DrawScheme, ModelOutput, RoundInputs, SamplingParams, Verdict


def hidden_drafter(
    target_config: ModelConfig,
    config: TrunkConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
    reuse: ReuseConfig = NO_REUSE,
) -> Drafter:
    """A `Drafter` whose trees have the shape of `tree`, their children chosen as `scheme` says.

    Args:
      reuse: what becomes of states that a round leaves over; no form changes what is decoded.
    Raises:
      ValueError: if the tree is deeper than the trunk was trained for, the target lacks a layer the drafter reads, a
        tree of this scheme cannot have this shape, or this form of reuse needs another tree or drafter.
    """
    check_tree(target_config, config, tree, scheme)
    reuse_lib.check_reuse(reuse, config, tree)
    num_states = reuse.num_states(tree.depth, config.num_steps)
    levels_of_round = make_schedule(target_config, config, tree, reuse, num_states)
    grower = Grower(tree, scheme, config.vocab_size)
    node_logp, node_origins = _for_pictures(config, tree, reuse, levels_of_round)
    runs_every_round = reuse.form not in (SKIP, UNFUSED)
    # A row without a trunk run keeps its pending features. Since a tree is no deeper than the spares it grows from, a
    # row commits at most K + 1 tokens from one trunk run to the next.
    max_pending = tree.depth + 1 if runs_every_round else num_states + 1

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        state = _unread(target_config, config, tokens, length, capacity, max_pending, cache_dtype)
        if reuse.form == NONE:
            return state
        return dataclasses.replace(state, spares=reuse_lib.no_spares(len(length), num_states, config.draft_vocab_size))

    def read(models, state: HiddenState, output: ModelOutput, tokens: Int[Array, "B C"], *where):
        """Takes in all features of the prompt but the last one, which becomes the pending query."""
        return _read_chunk(models, target_config, config, state, output, *where)

    def ready(models, state: HiddenState):
        """AHEAD: the first tree needs states, and no round has made any."""
        states, _ = run_trunk(models, target_config, config, num_states, state)
        logits = base_logits(models["drafter"], config, models["target"], target_config, states)
        return dataclasses.replace(state, spares=reuse_lib.fresh_spares(logits))

    def draft(models, state: HiddenState, inputs: RoundInputs):
        levels, state = levels_of_round(models, state)
        with jax.named_scope("tree"):
            bias = functools.partial(inject, models["drafter"], cast(HiddenConfig, config))
            draft_to_target = models["drafter"].get("draft_to_target")
            return grower.grow_token_free(levels.logits, bias, inputs, draft_to_target, levels.num), state

    def commit(models, state: HiddenState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        # XLA drops the final states where the trunk reads layers below.
        read = (output.hidden, output.features)
        path = jax.tree.map(lambda x: cache_lib.take_nodes(x, verdict.path, axis=1), read)
        pending, next_tokens = trunk_features(models["drafter"], config, *path), verdict.emitted
        spares = None if state.spares is None else reuse_lib.advance(state.spares, num_committed)
        if runs_every_round:
            return HiddenState(state.cache, pending, next_tokens, num_committed, spares)
        assert spares is not None
        # A row that stays finished must not ask for trunk runs that the others would wait for.
        spares = dataclasses.replace(spares, num=jnp.where(num_committed == 0, num_states, spares.num))
        return append_pending(dataclasses.replace(state, spares=spares), pending, next_tokens, num_committed)

    def follow(models, state: HiddenState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        after = commit(models, _absorb(models, target_config, config, state), verdict, output, num_committed)
        return cache_lib.keep_idle(num_committed, state, after)

    def resize(state: HiddenState, capacity: int):
        return dataclasses.replace(state, cache=cache_lib.grow(state.cache, capacity))

    return Drafter(
        init,
        read,
        draft,
        commit,
        resize,
        scheme,
        tree.depth,
        config.feature_layers,
        node_logp,
        lookahead=max_pending - 1,
        node_origins=node_origins,
        ready=ready if reuse.form == AHEAD else None,
        follow=follow if reuse.form == NONE else None,
    )


def _unread(
    target_config: ModelConfig,
    config: TrunkConfig,
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    capacity: int,
    max_pending: int,
    cache_dtype: Any,
) -> HiddenState:
    """The state before a prompt is read; one of a single token leaves nothing to read but its embedding."""
    batch = len(length)
    slots = (capacity,) * config.num_layers
    cache = cache_lib.empty_cache(slots, batch, config.num_kv_heads, config.head_dim, cache_dtype)
    root = jnp.take_along_axis(tokens, length[:, None] - 1, 1)
    return HiddenState(
        cache,
        jnp.zeros((batch, max_pending, target_config.hidden_size)),
        jnp.pad(root, ((0, 0), (0, max_pending - 1))),
        jnp.where(length >= 2, 1, 0).astype(jnp.int32),
    )


def _read_chunk(
    models,
    target_config: ModelConfig,
    config: TrunkConfig,
    state: HiddenState,
    output: ModelOutput,
    following: Int[Array, "B C"],
    start: Int[Array, ""] | int,
    length: Int[Array, "B"],
) -> HiddenState:
    """The state with the features of a prompt's positions from `start` on read, but for the prompt's last feature."""
    batch, num = following.shape
    positions = jnp.broadcast_to(start + jnp.arange(num), (batch, num))
    num_entries = jnp.maximum(length - 2, 0)
    embeddings = embed_committed(models["target"], target_config, config, following)
    features = trunk_features(models["drafter"], config, output.hidden, output.features)
    active = positions < num_entries[:, None]
    before = dataclasses.replace(state.cache, length=jnp.full(batch, start, jnp.int32))
    states, kv = trunk_pass(
        models["drafter"],
        config,
        features,
        embeddings,
        positions,
        causal_mask(batch, num),
        None if type(start) is int and start == 0 else before,
        active=active,
    )
    cache = cache_lib.commit(before, kv, None, length * 0, after=states, start=start)
    cache = dataclasses.replace(cache, length=jnp.minimum(num_entries, start + num))
    feature = last_feature(features, start, length, state.pending[:, 0])
    return dataclasses.replace(state, cache=cache, pending=state.pending.at[:, 0].set(feature))


def _absorb(models, target_config: ModelConfig, config: TrunkConfig, state: HiddenState) -> HiddenState:
    """The state with the pending features in the trunk's cache, as drafting would leave it."""
    batch, num = state.pending.shape[:2]
    embeddings = embed_committed(models["target"], target_config, config, state.next_tokens)
    positions = state.cache.length[:, None] + jnp.arange(num)
    states, kv = trunk_pass(
        models["drafter"], config, state.pending, embeddings, positions, causal_mask(batch, num), state.cache
    )
    # Keys and values of a single layer do not read the cache, but those of more do: only then wait for the pass.
    after = states if config.num_layers > 1 else None
    return dataclasses.replace(state, cache=cache_lib.commit(state.cache, kv, None, state.num_pending, after=after))


def _for_pictures(
    config: TrunkConfig, tree: TreeConfig, reuse: ReuseConfig, levels_of_round: Callable
) -> tuple[Callable, Callable | None]:
    """`Drafter.node_logp` and `Drafter.node_origins`."""

    def node_logp(models, state: HiddenState, drafted: DraftTree, sampling: SamplingParams):
        levels, _ = levels_of_round(models, state)
        return _logp_of_nodes(
            models["drafter"], cast(HiddenConfig, config), levels.logits, drafted, sharpness(sampling.temperature)
        )

    def node_origins(state: HiddenState, drafted: DraftTree):
        assert state.spares is not None, "the state was made without reuse"
        return reuse_lib.origins(reuse, state.spares, drafted, config.num_steps, tree.depth)

    return node_logp, None if reuse.form == NONE else node_origins


def _logp_of_nodes(
    weights, config: HiddenConfig, logits: Float[Array, "B D C"], drafted: DraftTree, scale: Float[Array, "B"]
) -> Float[Array, "B N"]:
    """Log-probability of each node given its parent, 0 for the root."""
    depth_index = jnp.maximum(drafted.depth - 1, 0)[:, :, None]
    read = read_tree(weights, config, drafted.tokens, drafted.parents, logits.shape[1])
    added = token_bias(weights, config, cache_lib.take_nodes(read, jnp.maximum(drafted.parents, 0), axis=1))
    columns, _ = to_columns(weights.get("draft_to_target"), drafted.tokens)
    logp = jax.nn.log_softmax(scale[:, None, None] * (jnp.take_along_axis(logits, depth_index, 1) + added), -1)
    logp = jnp.take_along_axis(logp, columns[:, :, None], 2)[:, :, 0]
    return jnp.where(drafted.depth > 0, logp, 0.0)
