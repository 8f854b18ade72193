"""The key/value cache: allocate, write at per-row lengths, commit an accepted path, grow.

A pass of a model reads the cache and returns `NewKV`; only `commit` writes. So the entries of rejected drafts never
reach the cache, and slot index equals absolute position. Knows nothing about trees or acceptance.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Int

from hsd_jax.kernels.native import traced_platform
from hsd_jax.types import KVCache, NewKV


def fastest_dtype(weights_dtype) -> jnp.dtype:
    """What a cache for such weights is kept in: float32 on CPU, which would convert it in every pass."""
    return jnp.dtype(jnp.float32 if traced_platform() == "cpu" else weights_dtype)


def empty_cache(num_layers: int, batch: int, num_kv_heads: int, capacity: int, head_dim: int, dtype) -> KVCache:
    """Allocates a cache of `capacity` slots a row, none of them valid."""
    shape = (batch, num_kv_heads, capacity, head_dim)
    layers = tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
    return KVCache(layers, tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)), jnp.zeros(batch, jnp.int32))


def write_rows(buffer: Array, rows: Array, start: Int[Array, "B"] | Int[Array, ""], axis: int) -> Array:
    """Writes `rows` into `buffer` along `axis`, each batch row at its own `start`, or all of them at one.

    The caller guarantees room: XLA would otherwise shift the write to the left, over committed entries.
    """
    rows = rows.astype(buffer.dtype)
    if start.ndim == 0 or buffer.shape[0] == 1:  # an update in place; the batched form below is a scatter
        return lax.dynamic_update_slice_in_dim(buffer, rows, start.reshape(-1)[0], axis)
    return jax.vmap(lambda b, r, s: lax.dynamic_update_slice_in_dim(b, r, s, axis - 1))(buffer, rows, start)


def take_nodes(values: Array, index: Int[Array, "B M"], axis: int) -> Array:
    """Gathers `index[b]` along `axis` in every batch row."""
    return jax.vmap(lambda v, i: jnp.take(v, i, axis=axis - 1, mode="clip"))(values, index)


def commit(
    cache: KVCache,
    new: NewKV,
    path: Int[Array, "B M"] | None,
    num_committed: Int[Array, "B"],
    after: Array | None = None,
    start: Int[Array, ""] | int | None = None,
) -> KVCache:
    """Writes the nodes of `path` contiguously behind each row's committed slots.

    All M nodes are written, so that shapes are static; only `num_committed` count, and the next commit overwrites
    the rest. Needs `length + M <= capacity`. `path=None` commits the nodes in their order (prefill).

    Args:
      after: a result [B, ...] of the pass that reads `cache`. The write then waits for that pass. Without it XLA may
        write first and copy the whole cache for the reader. (A `path` from the verdict waits by itself.)
      start: the slot of the first node in every row, where rows go in step (prefill); None: each row's length.
    """
    first = cache.length if start is None else jnp.asarray(start, jnp.int32)
    if after is not None:
        waited = _zero_known_after(after)
        first = first + (waited if start is None else waited[0])

    def move(buffers, rows):
        if path is not None:
            rows = tuple(take_nodes(r, path, axis=2) for r in rows)
        return tuple(write_rows(b, r, first, axis=2) for b, r in zip(buffers, rows, strict=True))

    return KVCache(move(cache.keys, new.keys), move(cache.values, new.values), cache.length + num_committed)


def _zero_known_after(x: Array) -> Int[Array, "B"]:
    """Zeros that cannot be computed before `x`; XLA on CPU drops optimization barriers before it places buffers."""
    return jnp.minimum((x.reshape(x.shape[0], -1)[:, 0] > 0).astype(jnp.int32), 0)


def keep_idle(num_committed: Int[Array, "B"], before: Any, after: Any) -> Any:
    """A drafter's state `after` a block of rounds, but `before` in rows that committed nothing in it.

    Of cache buffers nothing is put back: what was written stands behind the length that counts.
    """

    def one(old: Array, new: Array) -> Array:
        if old.ndim == 4:
            return new
        moved = (num_committed > 0).reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(moved, new, old)

    return jax.tree.map(one, before, after)


def grow(cache: KVCache, capacity: int) -> KVCache:
    """The same cache with room for `capacity` slots; outside of jit each old buffer is freed as its copy is made."""

    def pad(buffer: Array) -> Array:
        return pad_to(buffer, capacity, axis=2)

    return KVCache(tuple(map(pad, cache.keys)), tuple(map(pad, cache.values)), cache.length)


def pad_to(buffer: Array, size: int, axis: int, value: int = 0) -> Array:
    """The buffer with `axis` grown to `size`; a concrete one is gone afterwards: two of a cache may not fit."""
    widths = [(0, size - buffer.shape[i] if i == axis else 0) for i in range(buffer.ndim)]
    grown = jnp.pad(buffer, widths, constant_values=value)
    if not isinstance(buffer, Tracer):
        grown.block_until_ready()
        buffer.delete()
    return grown
