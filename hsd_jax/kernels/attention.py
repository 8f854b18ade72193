"""Attention of the nodes of a pass to the committed slots of a cache and to each other, in one softmax.

Every node sees a contiguous range of slots. Only the mask among the nodes depends on the tree. A flash kernel therefore
computes the slots, and its partial softmax is merged with that of the nodes by maximum and sum. Products are in the
dtype of the cache and sums in float32, so no cache is converted.
"""

from __future__ import annotations

import math
import os
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.kernels import native, program, triton
from hsd_jax.kernels.triton import MASKED, visible
from hsd_jax.validation import OneOf, take

VARIABLE = "HSD_ATTENTION"
"""Environment variable that names a backend for programs without the CPU kernel. The default, "auto", takes triton if
it applies, else xla."""
Backend = Annotated[str, OneOf(("auto", "xla", "triton"))]
SLOTS_AT_ONCE = {"cpu": 256, "tpu": 512}
"""The number of slots that XLA's attention reads per step, by platform. Steps whose slots no node sees are skipped. On
a GPU all slots are read in one step, because there each step of a loop waits for the host."""

Seen = tuple[Int[Array, "B N"], Int[Array, "B N"]]
"""For each node, the first slot that it sees, and the slot after the last one."""
Partial = tuple[Float[Array, "... n E"], Float[Array, "... n"], Float[Array, "... n"]]
"""A softmax over some of the entries: output before normalisation, maximum of the scores, sum of the weights."""


def widen(mask: Array, query: Float[Array, "B G n E"]) -> Array:
    """Expands a mask over nodes [B, N, X] to their queries, [B, 1, n, X]. The query heads of a node are contiguous."""
    return jnp.repeat(mask, query.shape[2] // mask.shape[1], axis=1)[:, None]


def attend(
    query: Float[Array, "B G n E"],
    new: tuple[Array, Array],
    new_mask: Bool[Array, "B N X"],
    cached: tuple[Array, Array] | None,
    seen: Seen | None,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B N H"]:
    """Attention over committed slots and over the nodes of this pass, in one softmax: all heads of a node side by side.

    With a cache, queries that see nothing give zeros. In the CPU kernel a query's result depends only on the entries
    that it sees and on their order: slots first, then nodes.

    Args:
      query: grouped by key/value head: n = nodes x (query heads per key/value head).
      new: keys and values of this pass, [B, G, X, E].
      new_mask: the entries of this pass that each node sees.
      cached: keys and values of the cache, [B, G, S, E].
    """
    if cached is None or seen is None:
        found = scores(query, new[0], widen(new_mask, query), scale, softcap)
        return by_nodes(_product(jax.nn.softmax(found, -1), new[1], (3, 2)), new_mask.shape[1])
    if native.is_on() and query.dtype == cached[0].dtype == cached[1].dtype == jnp.float32:
        numbers = {"scale": np.float32(scale), "softcap": np.float32(softcap or 0.0)}
        out = native.floats(*new_mask.shape[:2], math.prod(query.shape[1:]) // new_mask.shape[1])
        return native.call("attend", out)(query, *new, new_mask, *cached, *seen, **numbers)
    wanted = take(Backend, os.environ.get(VARIABLE, "auto"), VARIABLE)
    is_triton = wanted == "triton" or (wanted == "auto" and triton.attend_applies(query, cached))
    out = (by_triton if is_triton else by_xla)(query, new, new_mask, cached, seen, scale, softcap)
    return by_nodes(out, new_mask.shape[1])


def by_nodes(out: Float[Array, "B G n E"], num: int) -> Float[Array, "B N H"]:
    """What `num` nodes read: all their heads side by side, as the output projection takes them."""
    batch, groups, _, width = out.shape
    return out.reshape(batch, groups, num, -1, width).transpose(0, 2, 1, 3, 4).reshape(batch, num, -1)


def scores(query: Array, keys: Array, mask: Array, scale: float, softcap: float | None) -> Float[Array, "B G n X"]:
    """Scaled and soft-capped products. They are MASKED where `mask` is False."""
    found = _product(query, keys, (3, 3)) * scale
    if softcap is not None:
        found = jnp.tanh(found / softcap) * softcap
    return jnp.where(mask, found, MASKED)


def partial_softmax(found: Float[Array, "B G n X"], values: Float[Array, "B G X E"]) -> Partial:
    """The partial softmax of some scores."""
    top = found.max(-1, keepdims=True)
    weights = jnp.where(found > MASKED, jnp.exp(found - top), 0.0)
    return _product(weights, values, (3, 2)), top[..., 0], weights.sum(-1)


def _product(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """A batched product in the dtype of `y` with float32 sums. `y` has the dtype of the cache."""
    dimensions = ((axes[0],), (axes[1],)), ((0, 1), (0, 1))
    return lax.dot_general(x.astype(y.dtype), y, dimensions, preferred_element_type=jnp.float32)


def merge(one: Partial, other: Partial) -> Partial:
    """Merges two partial softmaxes into one over the entries of both."""
    (out, top, total), (more, higher, added) = one, other
    best = jnp.maximum(top, higher)
    old, new = jnp.exp(top - best), jnp.exp(higher - best)
    return out * old[..., None] + more * new[..., None], best, total * old + added * new


def finish(found: Partial) -> Float[Array, "... n E"]:
    """The normalised output of a softmax over all entries."""
    out, _, total = found
    return out / jnp.where(total > 0, total, 1.0)[..., None]


def by_xla(query, new, new_mask, cached, seen, scale, softcap):
    """Attention by plain products over blocks of slots. It skips blocks that no node sees. On a GPU all slots are one
    block."""
    first, last = (widen(x[:, :, None], query) for x in seen)
    num_slots: int = cached[0].shape[2]
    step: int = SLOTS_AT_ONCE.get(program.here().platform, num_slots)
    step = math.gcd(step, num_slots)  # capacities and rings are multiples of 256

    def add(block, found: Partial) -> Partial:
        keys, values = (lax.dynamic_slice_in_dim(x, block * step, step, 2) for x in cached)
        mask = visible(block * step + jnp.arange(step), first, last, num_slots)
        return merge(found, partial_softmax(scores(query, keys, mask, scale, softcap), values))

    found = partial_softmax(scores(query, new[0], widen(new_mask, query), scale, softcap), new[1])  # of the nodes
    if step == num_slots:
        return finish(add(jnp.int32(0), found))
    is_round = jnp.max(last) > num_slots
    begin = jnp.where(is_round, 0, jnp.min(jnp.where(last > first, first, num_slots)) // step)
    end = jnp.minimum((jnp.max(last) + step - 1) // step, num_slots // step)
    return finish(lax.fori_loop(begin, end, add, found))


def by_triton(query, new, new_mask, cached, seen, scale, softcap):
    """Attention by the flash kernel of `triton.py`."""
    first, last = (widen(x[:, :, None], query)[:, 0, :, 0] for x in seen)
    return triton.attend(query, new, widen(new_mask, query)[:, 0], cached, (first, last), scale, softcap)
