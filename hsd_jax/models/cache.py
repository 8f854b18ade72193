"""The key/value cache: allocate, write at per-row lengths, commit an accepted path, grow.

A pass of a model reads the cache and returns `NewKV`; only `commit` writes. So the entries of refused drafts never
reach the cache, and slot index equals absolute position. Knows nothing about trees or acceptance.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from hsd_jax.types import KVCache, NewKV


def fastest_dtype(weights_dtype) -> jnp.dtype:
    """What a cache for such weights is kept in: float32 on CPU, which would convert it in every pass."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else weights_dtype)


def empty_cache(num_layers: int, batch: int, num_kv_heads: int, capacity: int, head_dim: int, dtype) -> KVCache:
    """Allocates a cache of `capacity` slots a row, none of them valid."""
    shape = (batch, num_kv_heads, capacity, head_dim)
    layers = tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
    return KVCache(layers, tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)), jnp.zeros(batch, jnp.int32))


def write_rows(buffer: Array, rows: Array, start: Int[Array, "B"], axis: int) -> Array:
    """Writes `rows` into `buffer` along `axis`, each batch row at its own `start`.

    The caller guarantees room: XLA would otherwise shift the write to the left, over committed entries.
    """
    rows = rows.astype(buffer.dtype)
    if buffer.shape[0] == 1:  # an update in place; the batched form below is a scatter
        index: list[int | Array] = [0] * buffer.ndim
        index[axis] = start[0]
        return lax.dynamic_update_slice(buffer, rows, index)
    return jax.vmap(lambda b, r, s: lax.dynamic_update_slice_in_dim(b, r, s, axis - 1))(buffer, rows, start)


def last_slots(cache: KVCache, num: int) -> tuple[KVCache, Int[Array, "B"]]:
    """The last `num` committed slots of every row, for a sliding window, and the position of the first.

    All slots where there are no more than `num`; rows shorter than that begin at slot 0. `length` stays absolute.
    """
    capacity = cache.keys[0].shape[2]
    num = min(num, capacity)
    first = jnp.maximum(cache.length - num, 0)
    if num == capacity:
        return cache, jnp.zeros_like(first)

    def cut(buffer: Array) -> Array:
        if buffer.shape[0] == 1:  # as in `write_rows`
            return lax.dynamic_slice_in_dim(buffer, first[0], num, axis=2)
        return jax.vmap(lambda b, start: lax.dynamic_slice_in_dim(b, start, num, axis=1))(buffer, first)

    return KVCache(tuple(map(cut, cache.keys)), tuple(map(cut, cache.values)), cache.length), first


def take_nodes(values: Array, index: Int[Array, "B M"], axis: int) -> Array:
    """Gathers `index[b]` along `axis` in every batch row."""
    return jax.vmap(lambda v, i: jnp.take(v, i, axis=axis - 1, mode="clip"))(values, index)


def commit(
    cache: KVCache,
    new: NewKV,
    path: Int[Array, "B M"] | None,
    num_committed: Int[Array, "B"],
    after: Array | None = None,
) -> KVCache:
    """Writes the nodes of `path` contiguously behind each row's committed slots.

    All M nodes are written, so that shapes are static; only `num_committed` count, and the next commit overwrites
    the rest. Needs `length + M <= capacity`. `path=None` commits the nodes in their order (prefill).

    Args:
      after: a result [B, ...] of the pass that reads `cache`. The write then waits for that pass. Without it XLA may
        write first and copy the whole cache for the reader. (A `path` from the verdict waits by itself.)
    """
    start = cache.length if after is None else cache.length + _zero_known_after(after)

    def move(buffers, rows):
        if path is not None:
            rows = tuple(take_nodes(r, path, axis=2) for r in rows)
        return tuple(write_rows(b, r, start, axis=2) for b, r in zip(buffers, rows, strict=True))

    return KVCache(move(cache.keys, new.keys), move(cache.values, new.values), cache.length + num_committed)


def _zero_known_after(x: Array) -> Int[Array, "B"]:
    """Zeros that cannot be computed before `x`; XLA on CPU drops optimization barriers before it places buffers."""
    return jnp.minimum((x.reshape(x.shape[0], -1)[:, 0] > 0).astype(jnp.int32), 0)


def grow(cache: KVCache, capacity: int) -> KVCache:
    """The same cache with room for `capacity` slots."""

    def pad(buffer: Array) -> Array:
        return jnp.pad(buffer, ((0, 0), (0, 0), (0, capacity - buffer.shape[2]), (0, 0)))

    return KVCache(tuple(map(pad, cache.keys)), tuple(map(pad, cache.values)), cache.length)
