"""An independent small language model with a cache of its own, which drafts from its own distribution.

Drawn chains under the `recursive` rule are standard speculative sampling (Leviathan et al., arXiv:2211.17192, algorithm
1; Chen et al., arXiv:2302.01318, algorithm 2). Drawn trees are RSD (Jeon et al., arXiv:2402.14160). Any language model
with the target's vocabulary can draft without training.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.reading import joined, logits_after, read_on
from hsd_jax.drafters.shared import check_shape, check_vocabulary
from hsd_jax.drafters.small_lm.tree import (
    SmallLMState,
    Steered,
    biases,
    empty_state,
    features_of_text,
    read_prompt,
    steered_prompt,
    tree_round,
)
from hsd_jax.infer.tree import grow_tree
from hsd_jax.kernels import native
from hsd_jax.models import cache as cache_lib
from hsd_jax.types import Candidates, Drafter, DrawScheme, KVCache, ModelOutput, RoundInputs, Verdict

MAX_PENDING = 2
"""The largest number of pending tokens for a chain: the root, and the last draft before it if the whole chain was
accepted, because the model has not read its own last draft."""


def small_lm_drafter(
    target_config: ModelConfig,
    config: ModelConfig,
    tree: TreeConfig,
    cache_dtype: Any,
    scheme: DrawScheme,
    steered: Steered | None = None,
) -> Drafter:
    """The `Drafter`. A round costs `tree.depth` passes of the small model.

    For a chain each pass reads one or two tokens. For a tree the first pass reads the tokens that the last round
    committed, and each other pass reads the nodes of a level. `steered`: how states of the target steer the model.
    """
    check_shape(tree, scheme, config.num_tokens)
    check_vocabulary(config, target_config, "the drafter")
    depth, is_chain = tree.depth, tree.width == 1
    max_pending = MAX_PENDING if is_chain else depth + 1

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        return empty_state(config, tokens, length, capacity, max_pending, cache_dtype, steered)

    def read(models, state: SmallLMState, output: ModelOutput, tokens: Int[Array, "B chunk"], following, start, length):
        steer = None
        if steered is not None:
            steer, state = steered_prompt(models["drafter"], steered, state, output, start, length)
        return read_prompt(models["drafter"], config, state, tokens, start, length, steer)

    def draft(models, state: SmallLMState, inputs: RoundInputs):
        of_pending, of_drafts = biases(models["drafter"], steered, state)

        def expand(level: int | Int[Array, ""], tokens: Array, parents: Array, cache: KVCache):
            """Reads the pending tokens, then one draft per level. The cache keeps them all."""
            is_first = isinstance(level, int) and level == 0  # if the chain may end early, later levels are traced
            num_read = state.num_pending if is_first else jnp.ones_like(inputs.root)
            nodes = state.pending if is_first else tokens
            up_bias = of_pending if is_first else of_drafts
            logits, cache = logits_after(models["drafter"], config, cache, nodes, num_read, up_bias=up_bias)
            return Candidates(logits), cache

        drafted, cache = grow_tree(expand, state.cache, inputs, tree, scheme)
        num_drafted = jnp.max(jnp.where(drafted.valid, drafted.depth, 0), 1)
        return drafted, dataclasses.replace(state, cache=cache, num_drafted=num_drafted)

    def commit(models, state: SmallLMState, verdict: Verdict, output: Any, num_committed: Int[Array, "B"]):
        """Removes the rejected drafts from the cache. It holds the root and all drafts except the last."""
        root_position = state.cache.length - state.num_drafted
        root = jnp.take_along_axis(state.pending, state.num_pending[:, None] - 1, 1)
        # If a round commits n tokens, the model has read the root and n - 1 accepted drafts, but never the last draft
        # of the chain. In a finished row (n = 0) the root is pending again.
        num_read = jnp.minimum(num_committed, state.num_drafted)
        text = jnp.concatenate([root, verdict.emitted], 1)
        places = num_read[:, None] + jnp.arange(MAX_PENDING)
        pending = jnp.take_along_axis(text, places, 1, mode="clip")
        cache = dataclasses.replace(state.cache, length=root_position + num_read)
        features = None
        if steered is not None:
            features = cache_lib.take_nodes(features_of_text(state, verdict, output), places, axis=1)
        return SmallLMState(cache, pending, 1 + num_committed - num_read, state.num_drafted, features)

    def follow(models, state: SmallLMState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        """Reads tokens that it did not draft, except the last one."""
        nodes = joined(state.pending, state.num_pending, verdict.emitted)
        num_read = jnp.where(num_committed > 0, state.num_pending + num_committed - 1, 0)
        active, bias, features = jnp.arange(nodes.shape[1]) < num_read[:, None], None, None
        if steered is not None:
            of_text = features_of_text(state, verdict, output)
            with native.only(active):
                of_nodes = joined(state.features, state.num_pending, of_text[:, 1:])
                bias = steered.steer(models["drafter"], of_nodes)
            newest = cache_lib.take_nodes(of_text, num_committed[:, None], axis=1)
            features = jnp.pad(newest, ((0, 0), (0, max_pending - 1), (0, 0)))
        options = {"active": active, "up_bias": bias}
        _, cache = read_on(models["drafter"], config, state.cache, nodes, num_read, **options)
        pending = jnp.pad(verdict.next_token[:, None], ((0, 0), (0, max_pending - 1)))
        return SmallLMState(cache, pending, jnp.ones_like(state.num_pending), state.num_drafted, features)

    of_round = (draft, commit) if is_chain else tree_round(config, tree, scheme, steered)
    feature_layers, lookahead = () if steered is None else steered.feature_layers, depth + max_pending
    return Drafter(init, read, *of_round, scheme, depth, feature_layers, lookahead, follow=follow)
