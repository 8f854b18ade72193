"""Where a row drafts from in training, which of its tokens are labels there, and how a greedy chain would fare.

An anchor is the position of the last feature a round has read; what is drafted from it starts two tokens later. Knows
no model. Read next: `drafter.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.models.draft_vocab import to_columns
from hsd_jax.train import losses

ABLATED_DEPTH = 3
"""Where agreement is shown with and without token information (methods.md 1.9)."""


def labels_of_anchors(
    mask: Bool[Array, "B T+1"], num_steps: int, starts: Int[Array, "B T+1"] | None = None
) -> Bool[Array, "B T-1 K"]:
    """For each anchor 0..T-2 and depth: whether the token there is a label, and of the anchor's own document.

    Args:
      starts: where the document of each token begins; None: rows of one document.
    """
    num = mask.shape[1] - 2

    def ahead(values: Array) -> Array:
        padded = jnp.pad(values[:, 2:], ((0, 0), (0, num_steps - 1)))
        return jnp.stack([padded[:, k : k + num] for k in range(num_steps)], -1)

    if starts is None:
        return ahead(mask)
    return ahead(mask) & (ahead(starts) == starts[:, :num, None])


def sample_anchors(key: jax.Array, has_label: Bool[Array, "B T-1"], count: int) -> Int[Array, "B A"]:
    """`count` different anchors a row, ascending; those without any label only where a row has too few others.

    Consumes the key. All anchors if there are no more than `count`.
    """
    batch, available = has_label.shape
    if count >= available:
        return jnp.broadcast_to(jnp.arange(available), (batch, available))
    order = jax.random.uniform(key, (batch, available))
    _, chosen = lax.top_k(jnp.where(has_label, order, order - 1.0), count)
    return jnp.sort(chosen, -1)


def chain_metrics(
    target_logits: Float[Array, "BAK V"],
    draft_logits: Float[Array, "BAK C"],
    base: Float[Array, "BAK C"],
    mask: Bool[Array, "B A K"],
    draft_to_target: losses.DraftToTarget = None,
) -> dict[str, Array]:
    """How a greedy chain would fare, over the anchors all of whose tokens are labels.

    A proxy: the target's argmax is taken given the row's text, not given its own.

    Args:
      draft_to_target: the tokens of the drafter's columns; where the target says a cold one the drafter never agrees.
    Returns:
      acceptance: [K], agreement with the target's argmax at a depth, of the anchors that agreed at all before it.
      tau: one plus the mean number of leading agreements.
      agreement_3, agreement_3_base: at depth 3 whatever came before, with and without token information.
      overlap: [K], sum of min(p, q) at a depth, the chance that a sampled draft token is accepted there; the mean of
        all labels of that depth.
    """
    target_logits, draft_logits, base = lax.stop_gradient((target_logits, draft_logits, base))
    num_steps = mask.shape[2]
    whole = mask.all(-1).reshape(-1)
    best, is_hot = to_columns(draft_to_target, jnp.argmax(target_logits, -1))

    def agrees(logits: Array, best: Array) -> Array:
        # A maximum costs a tenth of an argmax on CPU; exact ties count as agreement.
        return jnp.take_along_axis(logits, best[:, None], -1)[:, 0] >= jnp.max(logits, -1)

    def total(hits: Array) -> Array:
        return hits.astype(jnp.float32).sum(0)

    count = jnp.maximum(total(whole), 1.0)
    agreed = (agrees(draft_logits, best) & is_hot).reshape(-1, num_steps) & whole[:, None]
    kept = total(jnp.cumprod(agreed.astype(jnp.int32), 1))
    before = jnp.concatenate([count[None], kept[:-1]])
    depth = min(ABLATED_DEPTH, num_steps) - 1
    base_agreed = agrees(base[depth::num_steps], best[depth::num_steps]) & is_hot[depth::num_steps] & whole
    labels = mask.reshape(-1, num_steps)
    overlap = 1.0 - losses.total_variation(target_logits, draft_logits, draft_to_target).reshape(-1, num_steps)
    return {
        "acceptance": kept / jnp.maximum(before, 1.0),
        "tau": 1.0 + kept.sum() / count,
        f"agreement_{depth + 1}": total(agreed[:, depth]) / count,
        f"agreement_{depth + 1}_base": total(base_agreed) / count,
        "overlap": jnp.where(labels, overlap, 0.0).sum(0) / jnp.maximum(total(labels), 1.0),
    }
