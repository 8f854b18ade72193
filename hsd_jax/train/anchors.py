"""The anchors of a row in training, their labels, and the acceptance that a greedy chain would have there.

An anchor is the position of the last feature that a round has read. Drafts from it start two tokens later.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.train import losses


def labels_of_anchors(
    mask: Bool[Array, "B T+1"], num_steps: int, starts: Int[Array, "B T+1"] | None = None
) -> Bool[Array, "B T-1 K"]:
    """For each anchor 0..T-2 and depth: whether the token there is a label and belongs to the anchor's document."""
    num = mask.shape[1] - 2

    def ahead(values: Array) -> Array:
        padded = jnp.pad(values[:, 2:], ((0, 0), (0, num_steps - 1)))
        return jnp.stack([padded[:, k : k + num] for k in range(num_steps)], -1)

    if starts is None:
        return ahead(mask)
    return ahead(mask) & (ahead(starts) == starts[:, :num, None])


def sample_anchors(key: jax.Array, has_label: Bool[Array, "B T-1"], count: int) -> Int[Array, "B A"]:
    """`count` different random anchors of each row, ascending, or all anchors if there are at most `count`.

    An anchor without any label is taken only if a row has too few others. Consumes the key.
    """
    batch, available = has_label.shape
    if count >= available:
        return jnp.broadcast_to(jnp.arange(available), (batch, available))
    return jnp.sort(choose_anchors(key, has_label, count), -1)


def choose_anchors(key: jax.Array, has_label: Bool[Array, "B A"], count: int) -> Int[Array, "B picked"]:
    """Indices of `count` random anchors of each row, or of all; those without a label come last. Consumes the key."""
    order = jax.random.uniform(key, has_label.shape)
    return lax.top_k(jnp.where(has_label, order, order - 1.0), min(count, has_label.shape[1]))[1]


def agreement(
    target: losses.TeacherDistribution, draft_logits: Float[Array, "BAK C"], shape: tuple[int, ...]
) -> tuple[Bool[Array, "B A K"], Float[Array, "B A K"]]:
    """Whether both models have the same argmax at a node, and the sum of min(p, q) there, in `shape` B, A, K.

    They never agree if the target's argmax is a cold token.
    """
    draft_logits = lax.stop_gradient(draft_logits)
    # A maximum costs a tenth of an argmax on CPU; exact ties count as agreement.
    is_best = jnp.take_along_axis(draft_logits, target.best[:, None], -1)[:, 0] >= jnp.max(draft_logits, -1)
    overlap = 1.0 - losses.total_variation(target, draft_logits)
    return (is_best & target.is_hot).reshape(shape), overlap.reshape(shape)


def chain_metrics(
    mask: Bool[Array, "B A K"], agreed: Bool[Array, "B A K"], overlap: Float[Array, "B A K"]
) -> dict[str, Array]:
    """The acceptance that a greedy chain would have, over the anchors whose tokens are all labels.

    This is a proxy, because the target's argmax is taken given the row's text and not given its own.

    Returns:
      acceptance: [K], the share of anchors that agree with the target's argmax at a depth, of those that agreed before.
      tau: one plus the mean number of leading agreements.
      overlap: [K], the mean over the labels of a depth of the sum of min(p, q), the chance that a draw is accepted.
    """
    num_steps = mask.shape[2]
    labels = mask.reshape(-1, num_steps)
    whole = labels.all(-1)

    def total(hits: Array) -> Array:
        return hits.astype(jnp.float32).sum(0)

    count = jnp.maximum(total(whole), 1.0)
    agreed = agreed.reshape(-1, num_steps) & whole[:, None]
    kept = total(jnp.cumprod(agreed.astype(jnp.int32), 1))
    before = jnp.concatenate([count[None], kept[:-1]])
    overlap = jnp.where(labels, overlap.reshape(-1, num_steps), 0.0)
    return {
        "acceptance": kept / jnp.maximum(before, 1.0),
        "tau": 1.0 + kept.sum() / count,
        "overlap": overlap.sum(0) / jnp.maximum(total(labels), 1.0),
    }
