"""Attention of the nodes of a pass to the committed slots of a cache and to each other, in one softmax.

Every node sees a range of slots; the tree concerns the nodes alone. So the slots go through a flash kernel, and what
it found is merged with the nodes by maximum and sum. Products are in the dtype of the cache, sums in float32: nothing
converts a cache. `BACKENDS` are the ways to compute it where the CPU kernel (`native.attend`) does not apply. Read
next: `ops.py`, which calls `attend`.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
from collections.abc import Callable, Iterator
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.kernels import triton
from hsd_jax.kernels.native import traced_platform
from hsd_jax.kernels.triton import MASKED, visible
from hsd_jax.settings import OneOf, take

VARIABLE = "HSD_ATTENTION"
"""Environment variable that names a backend; "auto", the default, takes the first that applies."""
SLOTS_AT_ONCE = {"cpu": 256, "tpu": 512}
"""Slots that XLA's attention reads in a step, by platform; steps of which nobody sees a slot are left out. On a GPU,
where each step of a loop waits for the host, all slots are read at once."""

Seen = tuple[Int[Array, "B N"], Int[Array, "B N"]]
"""The first slot that each node sees, and the one after the last."""
Partial = tuple[Float[Array, "... n E"], Float[Array, "... n"], Float[Array, "... n"]]
"""A softmax over some of the entries: unscaled output, maximum of the scores, sum of the weights."""

_wanted: contextvars.ContextVar[str | None] = contextvars.ContextVar("hsd_attention", default=None)


@contextlib.contextmanager
def using(backend: str) -> Iterator[None]:
    """What is traced inside attends by this backend, one of BACKENDS, or "auto".

    Raises:
      ValueError: for an unknown backend.
    """
    token = _wanted.set(take(Backend, backend, "attention"))
    try:
        yield
    finally:
        _wanted.reset(token)


def widen(mask: Array, query: Float[Array, "B G n E"]) -> Array:
    """A mask [B, N, X] over nodes as one over their queries, [B, 1, n, X]: a node's query heads are together."""
    return jnp.repeat(mask, query.shape[2] // mask.shape[1], axis=1)[:, None]


def attend(
    query: Float[Array, "B G n E"],
    new: tuple[Array, Array],
    new_mask: Bool[Array, "B N X"],
    cached: tuple[Array, Array] | None,
    seen: Seen | None,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B G n E"]:
    """`ops.attend` by the backend that suits the platform of the program.

    Where there is a cache, queries that see nothing give zeros.
    """
    if cached is None or seen is None:
        found = scores(query, new[0], widen(new_mask, query), scale, softcap)
        return _product(jax.nn.softmax(found, -1), new[1], (3, 2))
    wanted = _wanted.get() or take(Backend, os.environ.get(VARIABLE, "auto"), VARIABLE)
    if wanted == "auto":
        wanted = "triton" if triton.attend_applies(query, cached) else "xla"
    return BACKENDS[wanted](query, new, new_mask, cached, seen, scale, softcap)


def within(query, new, new_mask, scale: float, softcap: float | None) -> Partial:
    """The nodes' attention to each other, by dense products."""
    found = scores(query, new[0], widen(new_mask, query), scale, softcap)
    return partial_softmax(found, new[1])


def scores(query: Array, keys: Array, mask: Array, scale: float, softcap: float | None) -> Float[Array, "B G n X"]:
    """Scaled products, soft-capped; MASKED where `mask` is False."""
    found = _product(query, keys, (3, 3)) * scale
    if softcap is not None:
        found = jnp.tanh(found / softcap) * softcap
    return jnp.where(mask, found, MASKED)


def partial_softmax(found: Float[Array, "B G n X"], values: Float[Array, "B G X E"]) -> Partial:
    """The softmax of scores so far, unscaled."""
    top = found.max(-1, keepdims=True)
    weights = jnp.where(found > MASKED, jnp.exp(found - top), 0.0)
    return _product(weights, values, (3, 2)), top[..., 0], weights.sum(-1)


def _product(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """A batched product in the dtype of `y`, which is a cache or will be in one, summed in float32."""
    dimensions = ((axes[0],), (axes[1],)), ((0, 1), (0, 1))
    return lax.dot_general(x.astype(y.dtype), y, dimensions, preferred_element_type=jnp.float32)


def merge(one: Partial, other: Partial) -> Partial:
    """The softmax over the entries of both."""
    (out, top, total), (more, higher, added) = one, other
    best = jnp.maximum(top, higher)
    old, new = jnp.exp(top - best), jnp.exp(higher - best)
    return out * old[..., None] + more * new[..., None], best, total * old + added * new


def finish(found: Partial) -> Float[Array, "... n E"]:
    """The output of a softmax over all entries."""
    out, _, total = found
    return out / jnp.where(total > 0, total, 1.0)[..., None]


def by_xla(query, new, new_mask, cached, seen, scale, softcap):
    """Plain products over blocks of slots, of which only those are read that somebody sees; on a GPU over all slots."""
    first, last = (widen(x[:, :, None], query) for x in seen)
    num_slots: int = cached[0].shape[2]
    step: int = SLOTS_AT_ONCE.get(traced_platform(), num_slots)
    step = math.gcd(step, num_slots)  # capacities and rings are multiples of 256

    def add(block, found: Partial) -> Partial:
        keys, values = (lax.dynamic_slice_in_dim(x, block * step, step, 2) for x in cached)
        mask = visible(block * step + jnp.arange(step), first, last, num_slots)
        return merge(found, partial_softmax(scores(query, keys, mask, scale, softcap), values))

    found = within(query, new, new_mask, scale, softcap)
    if step == num_slots:
        return finish(add(jnp.int32(0), found))
    is_round = jnp.max(last) > num_slots
    begin = jnp.where(is_round, 0, jnp.min(jnp.where(last > first, first, num_slots)) // step)
    end = jnp.minimum((jnp.max(last) + step - 1) // step, num_slots // step)
    return finish(lax.fori_loop(begin, end, add, found))


def by_triton(query, new, new_mask, cached, seen, scale, softcap):
    """The flash kernel of `triton.py`."""
    first, last = (widen(x[:, :, None], query)[:, 0, :, 0] for x in seen)
    return triton.attend(query, new, widen(new_mask, query)[:, 0], cached, (first, last), scale, softcap)


BACKENDS: dict[str, Callable[..., Array]] = {"xla": by_xla, "triton": by_triton}
Backend = Annotated[str, OneOf(("auto", *BACKENDS))]
