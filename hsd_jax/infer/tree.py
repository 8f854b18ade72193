"""Draft trees: growing one by beam from base logits, its ancestor mask and positions.

All shapes are static. Written over a whole batch; nothing here knows the target or an acceptance rule.
Read next: `accept.py`, which walks these trees.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import TreeConfig
from hsd_jax.models.hot import to_tokens
from hsd_jax.types import NO_PARENT, DraftTree, DrawLaw


def grow_beam(
    base_logits: Float[Array, "B D V"],
    bias: Callable[[Int[Array, "B w"]], Float[Array, "B w V"]],
    root: Int[Array, "B"],
    config: TreeConfig,
    hot_ids: Int[Array, "hot"] | None = None,
) -> DraftTree:
    """Grows trees by cumulative log-probability and keeps the best nodes over all levels (EAGLE-2's rerank).

    At every level the `width` best nodes are expanded, each into its `width` likeliest children under
    `log_softmax(base_logits[level] + bias(token))`. Scores fall along a path and ties go to the shallower node, so
    the nodes kept are closed under ancestors, and the order of scores puts parents first. Choices are made without
    randomness: the law is ARBITRARY.

    Args:
      hot_ids: the token of each of the V columns; None: the columns are the tokens. `bias` gets tokens, and the tree
        holds tokens.
    """
    batch, depth, _ = base_logits.shape
    depth, width = min(depth, config.depth), config.width
    frontier_tokens, frontier_scores = root[:, None], jnp.zeros((batch, 1))
    frontier_ids = jnp.full((batch, 1), NO_PARENT)  # the root is no candidate
    scores, tokens, parents = [], [], []
    for level in range(depth):
        logits = base_logits[:, level, None, :] + bias(frontier_tokens)
        top, children = lax.top_k(logits, width)
        # A score above its parent's, or none at all, would cut a node off from its parent: never trust a drafter.
        logp = jnp.fmin(top - jax.nn.logsumexp(logits, axis=-1, keepdims=True), 0.0)
        level_scores = (frontier_scores[:, :, None] + logp).reshape(batch, -1)
        level_tokens = to_tokens(hot_ids, children).reshape(batch, -1)
        first_id = sum(s.shape[1] for s in scores)
        scores.append(level_scores)
        tokens.append(level_tokens)
        parents.append(jnp.repeat(frontier_ids, width, axis=1))
        frontier_scores, best = lax.top_k(level_scores, width)
        frontier_tokens = jnp.take_along_axis(level_tokens, best, 1)
        frontier_ids = first_id + best
    scores, tokens, parents = (jnp.concatenate(x, 1) for x in (scores, tokens, parents))
    _, kept = lax.top_k(scores, config.nodes - 1)  # stable: of equals the shallower
    kept_parents = jnp.take_along_axis(parents, kept, 1)
    # The node index of each kept node's parent; the root is node 0, kept candidate i is node i + 1.
    is_parent = kept_parents[:, :, None] == kept[:, None, :]
    node_parent = jnp.where(kept_parents == NO_PARENT, 0, jnp.argmax(is_parent, -1) + 1)
    candidate_depth = jnp.concatenate(
        [jnp.full(width if level == 0 else width * width, level + 1) for level in range(depth)]
    )
    column = jnp.zeros((batch, 1), jnp.int32)
    return DraftTree(
        tokens=jnp.concatenate([root[:, None], jnp.take_along_axis(tokens, kept, 1)], 1).astype(jnp.int32),
        parents=jnp.concatenate([column + NO_PARENT, node_parent.astype(jnp.int32)], 1),
        depth=jnp.concatenate([column, candidate_depth[kept].astype(jnp.int32)], 1),
        valid=jnp.ones((batch, config.nodes), bool),
        law=DrawLaw.ARBITRARY,
    )


def ancestor_mask(tree: DraftTree, max_depth: int) -> Bool[Array, "B N N"]:
    """`mask[b, i, j]`: node j is node i or an ancestor of it. Padding sees itself only."""
    num = tree.tokens.shape[1]
    mask = jnp.broadcast_to(jnp.eye(num, dtype=bool), (tree.tokens.shape[0], num, num))
    up = jnp.maximum(tree.parents, 0)
    has_parent = (tree.parents != NO_PARENT)[:, :, None]
    own = mask
    for _ in range(max_depth):
        mask = own | (has_parent & jnp.take_along_axis(mask, up[:, :, None], 1))
    return mask
