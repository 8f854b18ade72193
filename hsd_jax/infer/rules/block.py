"""Block verification: decides how much of a drawn chain to keep, and judges its drafts together."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from hsd_jax.config import TreeConfig
from hsd_jax.infer.rules.accept import RECURSIVE_SCHEMES, normalised, rule_with_coins
from hsd_jax.types import AcceptRule, DraftTree


def block(tree: DraftTree, target_logp: Float[Array, "B N V"]) -> tuple[Float[Array, "B N"], Float[Array, "B I V"]]:
    """The acceptance probability h of each draft, and the distribution of the next token after each node.

    Let p_i be the target's distribution after node i, q_i the drafter's, x_i the tokens, and w_0 = 1. Then

        w_i = min(1, w_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i))
        s_i = sum of (w_i p_i - q_i)+
        h_i = s_i / (s_i + 1 - w_i),    at the last node h = w

    Each draft has a coin. The deepest draft whose coin is below h_i is accepted, with all drafts before it. The next
    token follows (w_i p_i - q_i)+, normalised, and at the last node p. If tokens were judged one by one, w would be the
    product of min(1, p / q). Here a ratio above 1 compensates for one below 1, so at least as many drafts are accepted
    on average. The rule is lossless for the text of this round and of later rounds, and later rounds use the unchanged
    target. The function consumes no randomness. Both results are probabilities, and the first is 0 for nodes that are
    no drafts.

    References:
      Sun et al. (arXiv:2403.10444, algorithm 2); methods.md 6.7.
    """
    assert tree.draft_logp is not None
    depth = tree.draft_logp.shape[1]
    target, draft = jnp.exp(target_logp[:, :depth]), jnp.exp(tree.draft_logp)
    drawn = tree.tokens[:, 1:, None]
    p, q = (jnp.take_along_axis(distribution, drawn, 2)[:, :, 0] for distribution in (target, draft))
    ratio = p / jnp.maximum(q, jnp.finfo(q.dtype).tiny)

    def longer(weight, ratio):
        weight = jnp.minimum(weight * ratio, 1.0)
        return weight, weight

    one = jnp.ones_like(ratio[:, 0])
    weight = jnp.concatenate([one[:, None], lax.scan(longer, one, ratio.T)[1].T], 1)
    rest = jnp.maximum(weight[:, :depth, None] * target - draft, 0.0)
    mass = jnp.sum(rest, -1)
    below = mass + 1.0 - weight[:, :depth]  # 0 only where p = q: then a later node is certainly accepted
    accepted_inside = jnp.where(below > 0.0, mass / jnp.where(below > 0.0, below, 1.0), 0.0)
    has_child = jnp.concatenate([tree.valid[:, 1:], jnp.zeros_like(tree.valid[:, :1])], 1)
    chance = jnp.where(has_child, jnp.concatenate([accepted_inside, weight[:, depth:]], 1), weight)
    chance = jnp.where(tree.valid & (tree.depth > 0), chance, 0.0)
    return chance, jnp.where(has_child[:, :depth, None], normalised(rest, target), target)


def block_rule(tree: TreeConfig) -> AcceptRule:
    """The rule for drawn chains."""
    if tree.width > 1:
        raise ValueError(f"accept='block_verification' with tree {tree.name}: it judges only chains (width 1)")

    def deepest(tree: DraftTree, is_below: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
        """The deepest accepted draft also accepts all drafts before it."""
        return lax.cummax(is_below.astype(jnp.int32), axis=1, reverse=True) > 0

    return rule_with_coins("block_verification", RECURSIVE_SCHEMES, tree.depth, block, deepest, judges_jointly=True)
