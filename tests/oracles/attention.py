"""Attention of nodes to slots and to each other, query by query in float64; from the formula, without jax."""

from __future__ import annotations

import numpy as np


def attend(query, new, new_mask, cached, seen, scale, softcap) -> np.ndarray:
    """As `hsd_jax.kernels.attention.attend`; a query that sees nothing gives zeros."""
    batch, groups, num, _ = query.shape
    per_node = num // new_mask.shape[1]
    out = np.zeros(query.shape)
    for b, g, i in np.ndindex(batch, groups, num):
        node = i // per_node
        slots, nodes = slice(seen[0][b, node], seen[1][b, node]), new_mask[b, node]
        keys, values = (
            np.concatenate([c[b, g, slots], n[b, g, nodes]]).astype(float) for c, n in zip(cached, new, strict=True)
        )
        if len(keys) == 0:
            continue
        scores = keys @ query[b, g, i].astype(float) * scale
        if softcap is not None:
            scores = np.tanh(scores / softcap) * softcap
        weights = np.exp(scores - scores.max())
        out[b, g, i] = weights @ values / weights.sum()
    return out
