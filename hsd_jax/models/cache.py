"""The key/value cache: allocate it, write at per-row lengths, commit an accepted path, grow it.

A pass of a model reads the cache and returns `NewKV`. Only `commit` writes to the cache, so the entries of rejected
drafts never reach it. The index of a slot is the absolute position. In a ring, which serves a layer with a sliding
window, it is the position modulo the number of slots. This module knows nothing about trees or acceptance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from hsd_jax.axes import CACHE, ROWS, SLOTS, Axes, map_named
from hsd_jax.config import SLIDING, ModelConfig
from hsd_jax.kernels import program, triton
from hsd_jax.types import KVCache, NewKV


def cache_dtype(weights_dtype) -> jnp.dtype:
    """The dtype of a cache for weights of this dtype: float32 on a CPU, which would else convert it in every pass."""
    return jnp.dtype(jnp.float32 if program.here().platform == "cpu" else weights_dtype)


RING_UNIT = 256
"""The smallest number of slots of a ring beyond its window. The size of a ring is a multiple of it. The largest tree
and a chunk of a prompt fit into these slots, so entries after the committed tokens never replace an entry that a layer
still sees."""


def layer_slots(config: ModelConfig, capacity: int) -> tuple[int, ...]:
    """The number of slots of each layer's cache: `capacity`, or fewer for a layer with a sliding window (a ring).

    On a CPU every layer has `capacity` slots, because the CPU kernels read slots in order and only those in the window.
    """
    if config.sliding_window is None or program.here().platform == "cpu":
        return (capacity,) * config.num_layers
    ring = -(-(config.sliding_window + RING_UNIT) // RING_UNIT) * RING_UNIT
    kinds = map(config.layer_type, range(config.num_layers))
    return tuple(min(capacity, ring) if kind == SLIDING else capacity for kind in kinds)


def empty_cache(
    slots: Sequence[int], batch: int, num_kv_heads: int, head_dim: int, dtype, capacity: int | None = None
) -> KVCache:
    """A cache without valid entries. Layers with fewer slots than `capacity` are rings. None: no layer is a ring."""
    capacity = max(slots) if capacity is None else capacity
    keys, values = (tuple(jnp.zeros((batch, num_kv_heads, n, head_dim), dtype) for n in slots) for _ in range(2))
    return KVCache(keys, values, jnp.zeros(batch, jnp.int32), capacity)


def cache_of(config: Any, batch: int, capacity: int, dtype: Any) -> KVCache:
    """An empty cache of a model or a trunk. No layer is a ring."""
    return empty_cache((capacity,) * config.num_layers, batch, config.num_kv_heads, config.head_dim, dtype)


def write_rows(
    buffer: Array, rows: Array, start: Int[Array, "B"] | Int[Array, ""], axis: int, axes: Axes = (ROWS,)
) -> Array:
    """Writes `rows` into `buffer` along `axis`. `start` holds one position for each batch row, or one for all.

    `axes` are the names of the first axes. The caller must guarantee enough room: otherwise XLA shifts the write to the
    left, over committed entries.
    """
    rows = rows.astype(buffer.dtype)
    if start.ndim == 0:
        return lax.dynamic_update_slice_in_dim(buffer, rows, start, axis)

    return _on_own_rows(functools.partial(_write_rows, axis=axis), axes, buffer, rows, start)


@functools.partial(jax.jit, static_argnames="axis")  # traced once for all layers
def _write_rows(buffer: Array, rows: Array, start: Int[Array, "B"], axis: int) -> Array:
    if buffer.shape[0] == 1:  # this updates in place; the batched form below is a scatter
        return lax.dynamic_update_slice_in_dim(buffer, rows, start[0], axis)
    return jax.vmap(lambda b, r, s: lax.dynamic_update_slice_in_dim(b, r, s, axis - 1))(buffer, rows, start)


def _write_ring(
    buffer: Array, rows: Array, start: Int[Array, "B"] | Int[Array, ""], valid: Bool[Array, "B M"] | None
) -> Array:
    """`write_rows` along the slots of a ring."""
    num, rows = buffer.shape[2], rows.astype(buffer.dtype)
    slots = (start.reshape(-1, 1) + jnp.arange(rows.shape[2])) % num
    slots = jnp.broadcast_to(slots, (buffer.shape[0], rows.shape[2]))
    if valid is not None:
        slots = jnp.where(valid, slots, num)  # `num` is out of bounds, so the write is dropped
    write = jax.vmap(lambda b, r, s: b.at[:, s].set(r, mode="drop", unique_indices=valid is None))
    return _on_own_rows(write, CACHE, buffer, rows, slots)


def _on_own_rows(write: Callable[..., Array], axes: Axes, buffer: Array, rows: Array, where: Array) -> Array:
    """Lets each device write its own rows. Otherwise XLA for TPUs copies the whole cache for the scatter."""
    has_heads = axes == CACHE
    whole = ("data", "model" if has_heads else None, *[None] * (buffer.ndim - 2))
    groups = buffer.shape[1] if has_heads else 1
    ins = [whole, whole, ("data", *[None] * (where.ndim - 1))]
    return program.on_each_device(write, ins, whole, buffer.shape[0], groups)(buffer, rows, where)


@functools.partial(jax.jit, static_argnames="axis")
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
    valid: Bool[Array, "B M"] | None = None,
) -> KVCache:
    """Writes the nodes of `path` contiguously after each row's committed slots.

    All M nodes are written, so that shapes are static. Only the first `num_committed` become valid, and the next commit
    overwrites the others. This needs `length + M <= capacity`. `path=None` commits the nodes in their order (prefill).

    Args:
      after: a result [B, ...] of the pass that reads `cache`. The write then waits for that pass. Without it XLA may
        write first and copy the whole cache for the reader. (A `path` from the verdict waits by itself.)
      start: the slot of the first node, the same in every row (prefill). None: each row's length.
      valid: nodes that are written to a ring. None: all. Other nodes would overwrite earlier tokens in a ring.
    """
    first = cache.length if start is None else jnp.asarray(start, jnp.int32)
    if after is not None:
        waited = _zero_known_after(after)
        first = first + (waited if start is None else waited[0])

    buffers, rows = (*cache.keys, *cache.values), (*new.keys, *new.values)
    if triton.write_applies(buffers):
        nodes = jnp.arange(rows[0].shape[2]) if path is None else path
        nodes = jnp.broadcast_to(nodes, (len(cache.length), nodes.shape[-1]))
        written = triton.write(buffers, rows, nodes, jnp.broadcast_to(first, cache.length.shape), cache.capacity, valid)
    else:
        if path is not None:
            rows = [take_nodes(r, path, axis=2) for r in rows]
        written = [
            write_rows(b, r, first, 2, CACHE) if b.shape[2] == cache.capacity else _write_ring(b, r, first, valid)
            for b, r in zip(buffers, rows, strict=True)
        ]
    num = len(cache.keys)
    return KVCache(tuple(written[:num]), tuple(written[num:]), cache.length + num_committed, cache.capacity)


def _zero_known_after(x: Array) -> Int[Array, "B"]:
    """Zeros that XLA cannot compute before `x`. On a CPU it would drop an optimization barrier."""
    return jnp.minimum((x.reshape(x.shape[0], -1)[:, 0] > 0).astype(jnp.int32), 0)


def undo_idle_rows(num_committed: Int[Array, "B"], before: Any, after: Any) -> Any:
    """A drafter's state after a block of rounds. Rows that committed nothing get their old state back.

    The kernels skip such rows and give zeros for them. Buffers with slots are not restored, because the new entries lie
    after the valid length.
    """

    def one(axes: Axes, old: Array, new: Array) -> Array:
        if SLOTS in axes:
            return new
        moved = (num_committed > 0).reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(moved, new, old)

    return map_named(one, before, after)


def rolled_back(before: Any, after: Any) -> Any:
    """A drafter's state `before` some rounds, with the slot buffers of the state `after` them.

    These buffers hold further entries after the valid length, which do no harm, and no buffer is copied.
    """
    return map_named(lambda axes, old, new: new if SLOTS in axes else old, before, after)


def grow(cache: KVCache, capacity: int, slots: Sequence[int] | None = None) -> KVCache:
    """The same cache with room for `capacity` tokens per row. Without `slots` of each layer, none is a ring."""
    sizes = [capacity] * len(cache.keys) if slots is None else slots

    def pad(buffers: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(b if b.shape[2] == n else pad_to(b, n, axis=2) for b, n in zip(buffers, sizes, strict=True))

    return KVCache(pad(cache.keys), pad(cache.values), cache.length, capacity)


def grow_all(state: Any, capacity: int) -> Any:
    """A drafter's state with room for `capacity` tokens per row in all its caches and texts. No cache is a ring."""

    def larger(axes: Axes, x: Array) -> Array:
        return pad_to(x, capacity + 1, axis=1) if axes[:2] == (ROWS, SLOTS) else x

    is_cache = lambda x: isinstance(x, KVCache)  # noqa: E731
    state = jax.tree.map(lambda x: grow(x, capacity) if is_cache(x) else x, state, is_leaf=is_cache)
    return map_named(larger, state)


def pad_to(buffer: Array, size: int, axis: int, value: int = 0) -> Array:
    """The buffer with `axis` grown to `size`. Outside of jit the old one is deleted: two copies might not fit."""
    widths = [(0, size - buffer.shape[i] if i == axis else 0) for i in range(buffer.ndim)]
    grown = jnp.pad(buffer, widths, constant_values=value)
    if not isinstance(buffer, Tracer):
        grown.block_until_ready()
        buffer.delete()
    return grown
