"""Grows draft trees, as a beam or level by level (`levels.py`), and makes their ancestor masks.

All shapes are static, and all functions work on a batch. This module knows neither the target nor acceptance rules.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import TreeConfig
from hsd_jax.infer import controls, levels
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.chains import Draft, Pick, chain_of, grow_chain
from hsd_jax.infer.levels import NumLevels
from hsd_jax.kernels import ops
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.draft_vocab import TokensOfColumns, draft_columns, to_tokens
from hsd_jax.types import (
    DRAWN_SCHEMES,
    NO_PARENT,
    NO_TOKEN,
    Candidates,
    DraftTree,
    DrawScheme,
    Expand,
    Inject,
    RoundInputs,
)


def token_free(
    base_logits: Float[Array, "B D C"], inject: Inject | None, column_tokens: Int[Array, "C"] | None = None
) -> Expand:
    """The `Expand` of a drafter whose states read no drafted token: a level's base logits plus what tokens add.

    `column_tokens` is as `Candidates.tokens`.
    """

    def expand(level: int, tokens: Array, parents: Array, carry: Any):
        if inject is None:
            logits = jnp.broadcast_to(base_logits[:, level, None], (*tokens.shape, base_logits.shape[-1]))
            return Candidates(logits, column_tokens), carry
        added, read = inject(tokens, jax.tree.map(lambda x: take_nodes(x, parents, axis=1), carry))
        return Candidates(base_logits[:, level, None, :] + added, column_tokens), read

    return expand


def coupled(logits: Array, column_tokens: TokensOfColumns, inputs: RoundInputs, *places: Any) -> Array:
    """log q + g up to a constant per node, with q of the drafter and g the target's noise at `places`, an index.

    The noise is one number per token for all nodes of a level, because they predict the same position. Greedy rows use
    none. A filtered or cold token has q = 0 for any noise.
    """
    noise = lambda: draft_columns(column_tokens, inputs.noise[:, *places])  # noqa: E731
    return sampling_lib.perturb(noise, logits, inputs.sampling)


def coupled_expand(expand: Expand, inputs: RoundInputs) -> Expand:
    """`expand` with the logits of `coupled`."""

    def expand_coupled(level: Any, tokens: Array, parents: Array, carry: Any):
        said, carry = expand(level, tokens, parents, carry)
        return said._replace(logits=coupled(*said, inputs, level, None)), carry

    return expand_coupled


def controlled_expand(expand: Expand, inputs: RoundInputs, max_depth: int) -> Expand:
    """`expand` with the logits that the row draws from (`controls.transformed`). Its carry has the paths, too."""
    past = inputs.past
    assert past is not None

    def expand_controlled(level: Any, tokens: Array, parents: Array, carry: Any):
        own, paths = carry
        said, own = expand(level, tokens, parents, own)
        is_here = jnp.arange(max_depth) == level - 1
        paths = jnp.where(is_here, tokens[:, :, None], take_nodes(paths, parents, axis=1))
        logits = controls.transformed(said.logits, inputs.sampling, past, paths, said.tokens)
        return said._replace(logits=logits), (own, paths)

    return expand_controlled


def grow_tree(
    expand: Expand,
    carry: Any,
    inputs: RoundInputs,
    config: TreeConfig,
    scheme: DrawScheme,
    num_levels: NumLevels = None,
) -> tuple[DraftTree, Any]:
    """A tree of this shape, whose children are chosen by `scheme`, and the last carry of `expand`.

    Without `TreeConfig.branching`, an ARBITRARY or COUPLED tree is a beam over all levels, a WITHOUT_REPLACEMENT tree
    is a stochastic beam (RSD-S), and INDEPENDENT chains branch at the root. With a branching, every node of a level has
    the same number of children under every scheme (`levels.py`). An ARBITRARY tree uses no key, and of the settings
    only the temperature. A COUPLED tree uses the target's noise.
    """
    is_drawn, is_chain = scheme in DRAWN_SCHEMES, config.width == 1
    if inputs.past is not None:
        begin = carry, jnp.full((len(inputs.root), 1, config.depth), NO_TOKEN, jnp.int32)
        changed, inputs = controlled_expand(expand, inputs, config.depth), dataclasses.replace(inputs, past=None)
        tree, (carry, _) = grow_tree(changed, begin, inputs, config, scheme, num_levels)
        return tree, carry
    if scheme is DrawScheme.COUPLED:
        expand = coupled_expand(expand, inputs)
    if is_chain and inputs.stop is not None:
        pick = levels.drawn_draft(inputs, config, scheme) if is_drawn else likeliest_draft(inputs, scheme)
        return grow_chain(expand, carry, inputs, config.depth, pick, scheme)
    if is_drawn or (config.branching is not None and not is_chain):
        grow = levels.tree_of_levels
    else:
        grow = chain if is_chain else beam
    return grow(expand, carry, inputs, config, scheme, num_levels)


def chain(
    expand: Expand, carry: Any, inputs: RoundInputs, config: TreeConfig, scheme: DrawScheme, num_levels: NumLevels
) -> tuple[DraftTree, Any]:
    """The tree of `beam` for width 1, where no nodes compete. (XLA removes the scores if they are not used.)"""
    token, drafts = inputs.root[:, None], []
    scores, pick = [jnp.zeros(token.shape)], likeliest_draft(inputs, scheme)
    for level in range(config.depth):
        said, carry = expand(level, token, jnp.zeros_like(token), carry)
        token, log_confidence, _ = pick(level, said)
        scores.append(scores[-1] + jnp.fmin(log_confidence, 0.0))
        drafts.append(token)
    num, score = config.depth if num_levels is None else num_levels, jnp.concatenate(scores, 1)
    return chain_of(inputs.root, jnp.concatenate(drafts, 1), num, scheme=scheme, score=score), carry


def beam(
    expand: Expand, carry: Any, inputs: RoundInputs, config: TreeConfig, scheme: DrawScheme, num_levels: NumLevels
) -> tuple[DraftTree, Any]:
    """Grows trees by cumulative log-probability and keeps the best nodes over all levels (EAGLE-2's rerank).

    At every level the `width` best nodes are expanded, each into its `width` likeliest children (`levels.likeliest`).
    Scores fall along a path, and the shallower node wins a tie. The kept nodes therefore include all their ancestors,
    and the order of scores puts parents first. Nodes below a row's levels come last.
    """
    frontier, scale = levels.root_level(inputs.root), levels.inverse_temperature(inputs.sampling.temperature, scheme)
    ids, tokens, parents, scores = frontier.parents, [frontier.tokens], [frontier.parents], [frontier.logp]
    for level in range(config.depth):
        said, carry = expand(level, frontier.tokens, frontier.parents, carry)
        count = min(config.width, said.logits.shape[-1])
        below = levels.likeliest(said, scale, frontier, count)
        score = below.logp
        if num_levels is not None:
            score = jnp.where(level < num_levels[:, None], score, -jnp.inf)
        best_scores, best = lax.top_k(score, min(config.width, score.shape[1]))
        parents.append(jnp.repeat(ids, count, axis=1))
        ids = sum(x.shape[1] for x in scores) + best
        tokens.append(below.tokens)
        scores.append(score)
        best_tokens = jnp.take_along_axis(below.tokens, best, 1)
        frontier = levels.Level(best_tokens, best // count, best_scores, best_scores)
    depths = np.repeat(np.arange(len(scores), dtype=np.int32), [x.shape[1] for x in scores])
    scores, tokens, parents = (jnp.concatenate(x, 1) for x in (scores, tokens, parents))
    depths = jnp.broadcast_to(depths, tokens.shape)
    return best_tree(tokens, parents, depths, scores, config.nodes, scheme, num_levels is not None), carry


def likeliest_draft(inputs: RoundInputs, scheme: DrawScheme) -> Pick:
    """The `Pick` of the likeliest child. Its confidence is the log-softmax of the logits, scaled as in a beam."""
    scale = levels.inverse_temperature(inputs.sampling.temperature, scheme)

    def pick(level: Any, said: Candidates) -> Draft:
        best = ops.argmax(said.logits)[:, :, None]
        scaled = said.logits * scale[:, None, None]
        top = jnp.take_along_axis(scaled, best, 2)[:, :, 0]
        return Draft(to_tokens(said.tokens, best)[:, :, 0], top - jax.nn.logsumexp(scaled, axis=-1))

    return pick


def best_tree(
    tokens: Int[Array, "B M"],
    parents: Int[Array, "B M"],
    depths: Int[Array, "B M"],
    scores: Float[Array, "B M"],
    num_nodes: int,
    scheme: DrawScheme,
    may_lack: bool,
) -> DraftTree:
    """The tree of the `num_nodes` best of M candidates, of which the first is the root, with the score 0.

    Scores must fall along paths, and parents must come before their children. The first candidate wins a tie, so the
    kept nodes include all their ancestors, and parents come first. `parents` are indices of candidates. If rows
    `may_lack` candidates, the missing ones have a score of -inf and are not valid.
    """
    best_scores, kept = lax.top_k(scores, num_nodes)  # on a tie it takes the first
    tokens, parents, depths = (jnp.take_along_axis(x, kept, 1) for x in (tokens, parents, depths))
    valid = best_scores > -jnp.inf if may_lack else jnp.ones(kept.shape, bool)
    has_parent = valid & (jnp.arange(num_nodes) > 0)
    parents = jnp.where(has_parent, jnp.argmax(parents[:, :, None] == kept[:, None, :], -1), NO_PARENT)
    return DraftTree(tokens.astype(jnp.int32), parents.astype(jnp.int32), depths, valid, None, scheme, best_scores)


def on_text(
    tree: DraftTree, text: Int[Array, "B T"], first: Int[Array, "B"], end: Int[Array, "B"], max_depth: int
) -> Bool[Array, "B N"]:
    """Marks the root and the nodes whose paths equal the text after the root, from index `first` to before `end`."""
    place = first[:, None] + tree.depth - 1
    is_right = tree.tokens == jnp.take_along_axis(text, jnp.clip(place, 0, text.shape[1] - 1), 1)
    is_right &= tree.valid & (place < end[:, None]) & (tree.depth > 0)
    found = is_root = tree.depth == 0
    for _ in range(max_depth):
        found = is_root | (is_right & jnp.take_along_axis(found, jnp.maximum(tree.parents, 0), 1))
    return found


def path_tokens(tree: DraftTree, max_depth: int) -> Int[Array, "B N D"]:
    """The tokens from below the root to each node, its own last, then NO_TOKEN."""
    levels = jnp.arange(1, max_depth + 1)
    is_at = ancestor_mask(tree, max_depth)[:, :, None] & (tree.depth[:, None, None] == levels[:, None])
    return jnp.max(jnp.where(is_at, tree.tokens[:, None, None], NO_TOKEN), -1)


def ancestor_mask(tree: DraftTree, max_depth: int) -> Bool[Array, "B N N"]:
    """`mask[b, i, j]`: whether node j is node i or an ancestor of it. A node without a parent sees only itself."""
    num = tree.tokens.shape[1]
    mask = jnp.broadcast_to(jnp.eye(num, dtype=bool), (tree.tokens.shape[0], num, num))
    up = jnp.maximum(tree.parents, 0)
    has_parent = (tree.parents != NO_PARENT)[:, :, None]
    own = mask
    for _ in range(max_depth):
        mask = own | (has_parent & jnp.take_along_axis(mask, up[:, :, None], 1))
    return mask
