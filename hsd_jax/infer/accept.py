"""Acceptance rules: given a tree and the target's logits at its nodes, which path survives.

A rule lists the draw laws for which it is lossless; `check_legal` refuses any other pairing. Knows no drafter.
Read next: `step.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.types import AcceptRule, DraftTree, DrawLaw, SamplingParams, Verdict


def check_legal(rule: AcceptRule, law: DrawLaw) -> None:
    """Raises:
    ValueError: if `rule` is not lossless for trees drawn under `law`.
    """
    if law not in rule.laws:
        allowed = ", ".join(sorted(x.name for x in rule.laws))
        raise ValueError(f"rule {rule.name!r} is not lossless for draw law {law.name}; it allows {allowed}")


def walk(tree: DraftTree, ancestors: Bool[Array, "B N N"], draws: Int[Array, "B N"], max_depth: int) -> Verdict:
    """Follows, from the root, the child that holds the node's own draw, until no child does.

    Loop-free: a node survives if it and all its ancestors hold the draw of their parent; the deepest survivor ends the
    path. Siblings that hold the same token have the same draw, so either emits the same text; the deeper path counts.
    """
    num = tree.tokens.shape[1]
    parent_draw = jnp.take_along_axis(draws, jnp.maximum(tree.parents, 0), 1)
    is_root = tree.depth == 0
    matches = (is_root | (tree.tokens == parent_draw)) & tree.valid
    survives = jnp.all(matches[:, None, :] | ~ancestors, -1) & tree.valid
    deepest = jnp.argmax(jnp.where(survives, tree.depth, -1), -1)
    on_path = jnp.take_along_axis(ancestors, deepest[:, None, None], 1)[:, 0]
    levels = jnp.arange(max_depth + 1)
    is_at = on_path[:, None, :] & (tree.depth[:, None, :] == levels[None, :, None])
    path = jnp.argmax(is_at, -1).astype(jnp.int32)  # root index behind the end
    num_accepted = jnp.take_along_axis(tree.depth, deepest[:, None], 1)[:, 0]
    emitted = jnp.take_along_axis(draws, path, 1)
    next_token = jnp.take_along_axis(draws, deepest[:, None], 1)[:, 0]
    has_child = jnp.any((tree.parents == deepest[:, None]) & tree.valid & (jnp.arange(num) > 0), -1)
    return Verdict(path, num_accepted, next_token, ~has_child, emitted)


def match_rule(max_depth: int) -> AcceptRule:
    """Draws the target's token at every node and follows it through the tree.

    Lossless for any tree chosen before the draw. With position-keyed noise the emitted text is a function of the row
    key and the target alone: it equals plain sampling token for token (methods.md 0.5, 1.7).
    """

    def verify(
        keys: jax.Array,
        tree: DraftTree,
        ancestors: Bool[Array, "B N N"],
        logits: Float[Array, "B N V"],
        sampling: SamplingParams,
        root_position: Int[Array, "B"],
    ) -> Verdict:
        predicted = root_position[:, None] + tree.depth + 1
        draws = sampling_lib.draw(keys, logits, predicted, sampling)
        return walk(tree, ancestors, draws, max_depth)

    return AcceptRule("match", frozenset(DrawLaw), verify)
