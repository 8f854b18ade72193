"""Pallas kernels for NVIDIA GPUs. Each replaces several kernel launches of XLA.

The time of a round of one row depends on launches as much as on bytes: each kernel costs microseconds, and a decoder
layer takes two dozen. The kernels here replace a dozen of them: a norm with its rounding; rotation and rounding of
queries, keys and values; attention over slots and nodes; and the merge of its splits. One more kernel writes the caches
of all layers. They have no gradient, so they are on only while a decode is traced. On a mesh each device
runs them on its own heads and rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.kernels import program

MASKED = -1e30
"""The score of an entry that is not seen. It is finite, so that a query that sees nothing gives no NaN."""
PROGRAMS = 256
"""The target for the number of programs of the attention kernel: about two for each multiprocessor of an H100."""
AT_ONCE = 64
"""The largest number of caches that one launch writes. Each cache and its new entries are pointer arguments."""
MOST_PARTS = 64
"""The largest number of parts that the merge holds in registers: the splits of the slots, and one for the nodes. The
merge pads their number to a power of two, so `_splits` chooses a power of two."""


def is_on() -> bool:
    """Whether the program that is being traced uses these kernels."""
    here = program.here()
    return here.interprets or (here.has_gpu_kernels and here.platform == "gpu")


def _is_tile(width: int) -> bool:
    return width >= 16 and width & (width - 1) == 0


def _power_of_two(n: int) -> int:
    """The size of the block that holds `n` values: Triton's arrays have such sizes. Masks cut off what is beyond."""
    return 1 << math.ceil(math.log2(max(n, 1)))


def _block(shape: Sequence[int], *at: int) -> pl.BlockSpec:
    """What a program reads of an array: one place of each of the first axes, given by its own places along the axes
    `at` of the grid, and `shape` of the others."""
    return pl.BlockSpec((*[None] * len(at), *shape), lambda *own: (*(own[axis] for axis in at), *[0] * len(shape)))


def rms_norm(
    x: Float[Array, "... H"], weight: Float[Array, "H"], eps: float, offset: float, dtype: Any
) -> Float[Array, "... H"]:
    """`ops.rms_norm`, rounded to `dtype`."""
    width, block = x.shape[-1], _power_of_two(x.shape[-1])

    def norm(x, weight):
        rows = x.reshape(-1, width)

        def kernel(x_ref, weight_ref, out_ref):
            inside = jnp.arange(block) < width
            row = plgpu.load(x_ref, mask=inside, other=0.0)
            scale = lax.rsqrt(jnp.sum(row * row) / width + eps)
            out = row * scale * (plgpu.load(weight_ref, mask=inside, other=0.0).astype(jnp.float32) + offset)
            plgpu.store(out_ref, out.astype(dtype), mask=inside)

        out = _call(
            kernel,
            grid=(rows.shape[0],),
            in_specs=[_block([block], 0), _block([block])],
            out_specs=_block([block], 0),
            out_shape=jax.ShapeDtypeStruct(rows.shape, dtype),
            name="rms_norm",
        )(rows, weight)
        return out.reshape(x.shape)

    is_of_heads = x.ndim == 4
    rows = ("data", None, "model", None) if is_of_heads else ("data", *[None] * (x.ndim - 1))
    groups = x.shape[2] if is_of_heads else 1
    return program.on_each_device(norm, [rows, (None,)], rows, x.shape[0], groups)(x, weight)


def rope_applies(joint: Array) -> bool:
    """Whether `rope` can rotate packed heads of this width."""
    return is_on() and _is_tile(joint.shape[-1])


def rope(
    joint: Float[Array, "B N G heads E"], table: tuple[Array, Array], dtype: Any
) -> tuple[Float[Array, "B G n E"], Float[Array, "B G N E"], Float[Array, "B G N E"]]:
    """Rotated queries and keys, and values, of packed heads: each key/value head holds its queries, key and value.

    All three are rounded to `dtype` and have the layout that attention reads.
    """

    def rotate(joint, cos, sin):
        batch, num, groups, heads, width = joint.shape
        per_group, half = heads - 2, width // 2
        block = _power_of_two(per_group)

        def kernel(joint_ref, cos_ref, sin_ref, query_ref, key_ref, value_ref):
            rows, inside = pl.ds(0, block), jnp.arange(block)[:, None] < per_group
            halves = low, high = pl.ds(0, half), pl.ds(half, half)
            query = [plgpu.load(joint_ref.at[rows, at], mask=inside, other=0.0) for at in halves]
            key = [joint_ref[per_group, at] for at in halves]
            for at, own, other in ((low, 0, 1), (high, 1, 0)):
                cos, sin = cos_ref[at], sin_ref[at]
                turned = query[own] * cos[None, :] + query[other] * sin[None, :]
                plgpu.store(query_ref.at[rows, at], turned.astype(dtype), mask=inside)
                key_ref[0, at] = (key[own] * cos + key[other] * sin).astype(dtype)
            value_ref[0, :] = joint_ref[per_group + 1, :].astype(dtype)

        shapes = (batch, groups, num, per_group, width), *[(batch, groups, num, 1, width)] * 2
        query, key, value = _call(
            kernel,
            grid=(batch, num, groups),
            in_specs=[_block([max(heads, block), width], 0, 1, 2), *[_block([width], 0, 1)] * 2],
            out_specs=[_block([n, width], 0, 2, 1) for n in (block, 1, 1)],
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
            name="rope",
        )(joint, cos, sin)
        return query.reshape(batch, groups, num * per_group, width), key[:, :, :, 0], value[:, :, :, 0]

    heads, nodes = ("data", "model", None, None), ("data", None, None)
    ins = [("data", None, "model", None, None), nodes, nodes]
    return program.on_each_device(rotate, ins, (heads, heads, heads), joint.shape[0], joint.shape[2])(joint, *table)


def visible(slots: Array, first: Array, last: Array, num_slots: int) -> Array:
    """Whether slots hold positions from `first` to before `last`.

    Slot s holds the largest position below `last` that equals s modulo the number of slots. With a slot for every
    position this is position s. In a ring it is the position that was written there last.
    """
    rounds = (jnp.maximum(last - 1 - slots, 0)) // num_slots
    return (slots < last) & (slots + rounds * num_slots >= first)


def attend_applies(query: Array, cached: tuple[Array, Array]) -> bool:
    """Whether `attend` applies: it needs 16-bit caches, and widths and numbers of slots that fit its tiles."""
    num_slots, width = cached[0].shape[2:]
    return is_on() and cached[0].dtype.itemsize == 2 and _is_tile(width) and num_slots % 16 == 0


def attend(query, new, new_mask, cached, seen, scale: float, softcap: float | None) -> Float[Array, "B G n E"]:
    """`attention.attend` with `new_mask` [B, n, X] and `seen` [B, n] per query, in two launches.

    The result is rounded to the dtype of `query`, as the product that reads it would round it. The visible slots are
    divided evenly into splits. The nodes of the pass are one further split.
    """

    def both(query, new_keys, new_values, new_mask, keys, values, first, last):
        new = new_keys, new_values
        outs, tops, totals = _splits(query, new, new_mask, (keys, values), first, last, scale, softcap)
        return _merged(outs, tops, totals, query.dtype)

    heads, rows = ("data", "model", None, None), ("data", None)
    ins = [heads, heads, heads, ("data", None, None), heads, heads, rows, rows]
    arrays = query.astype(cached[0].dtype), *new, new_mask.astype(jnp.int8), *cached, *seen
    return program.on_each_device(both, ins, heads, query.shape[0], query.shape[1])(*arrays)


def _splits(query, new, new_mask, cached, first, last, scale, softcap):
    """The parts of a softmax: outputs before normalisation [splits, B, G, n, E], maxima and sums [splits, B, G, n]."""
    batch, groups, num, width = query.shape
    num_slots, num_new = cached[0].shape[2], new[0].shape[2]
    block_q, block_k = min(64, max(16, _power_of_two(num))), min(64, num_slots & -num_slots)
    blocks = pl.cdiv(num, block_q)
    parts = min(PROGRAMS // (batch * groups * blocks), num_slots // block_k, MOST_PARTS - 1) + 1
    splits = max(1, (1 << parts.bit_length() - 1) - 1)

    shape, sizes = (splits + 1, batch, groups, num), (block_q, block_k, splits, num_slots)
    return _call(
        functools.partial(_flash, scale=scale, softcap=softcap, num=num, num_new=num_new, sizes=sizes),
        grid=(batch, groups, blocks, splits + 1),
        in_specs=[
            _block([num, width], 0, 1),
            *[_block([num_new, width], 0, 1)] * 2,
            _block([num, num_new], 0),
            *[_block([num_slots, width], 0, 1)] * 2,
            *[_block([num], 0)] * 2,
        ],
        out_specs=[_block(shape, 3, 0, 1) for shape in ([num, width], [num], [num])],
        out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, width), shape, shape)],
        name="tree_attention",
    )(query, *new, new_mask, *cached, first, last)


def _flash(
    query_ref, new_keys_ref, new_values_ref, mask_ref, keys_ref, values_ref, first_ref, last_ref,
    out_ref, top_ref, total_ref, *, scale: float, softcap: float | None, num: int, num_new: int, sizes: tuple,
):  # fmt: skip
    """The attention of a block of queries to a split of the slots or, in the last split, to the nodes."""
    block_q, block_k, splits, num_slots = sizes
    split, begin_row = pl.program_id(3), pl.program_id(2) * block_q
    take, is_row = pl.ds(begin_row, block_q), begin_row + jnp.arange(block_q) < num
    query = plgpu.load(query_ref.at[take, :], mask=is_row[:, None], other=0.0)
    first, last = (plgpu.load(x.at[take], mask=is_row, other=0) for x in (first_ref, last_ref))

    def add(keys: Array, values: Array, visible: Array, found: Any):
        out, top, total = found
        score = plgpu.dot(query, keys.T) * scale
        if softcap is not None:
            score = jnp.tanh(score / softcap) * softcap
        score = jnp.where(visible, score, MASKED)
        higher = jnp.maximum(top, score.max(1))
        weights, kept = jnp.where(visible, jnp.exp(score - higher[:, None]), 0.0), jnp.exp(top - higher)
        out = out * kept[:, None] + plgpu.dot(weights.astype(values.dtype), values)
        return out, higher, total * kept + weights.sum(1)

    def over_slots(found):
        is_round = jnp.max(last) > num_slots
        begin = jnp.where(is_round, 0, jnp.min(jnp.where(last > first, first, 2**30)) // block_k)
        end = (jnp.minimum(jnp.max(last), num_slots) + block_k - 1) // block_k
        share = (jnp.maximum(end - begin, 0) + splits - 1) // splits
        start = begin + split * share

        def block(i, found):
            slots, at = i * block_k + jnp.arange(block_k), pl.ds(i * block_k, block_k)
            seen = visible(slots[None, :], first[:, None], last[:, None], num_slots)
            return add(keys_ref[at, :], values_ref[at, :], seen, found)

        return lax.fori_loop(start, jnp.minimum(start + share, end), block, found)

    def over_nodes(found):
        def block(i, found):
            at, is_node = pl.ds(i * block_k, block_k), i * block_k + jnp.arange(block_k) < num_new
            refs = new_keys_ref, new_values_ref
            entries = [plgpu.load(x.at[at, :], mask=is_node[:, None], other=0.0) for x in refs]
            is_pair = is_row[:, None] & is_node[None, :]
            visible = plgpu.load(mask_ref.at[take, at], mask=is_pair, other=0) != 0
            return add(entries[0], entries[1], visible, found)

        return lax.fori_loop(0, pl.cdiv(num_new, block_k), block, found)

    nothing = jnp.zeros((block_q, query.shape[1]), jnp.float32), jnp.full(block_q, MASKED), jnp.zeros(block_q)
    out, top, total = lax.cond(split < splits, over_slots, over_nodes, nothing)
    plgpu.store(out_ref.at[take, :], out, mask=is_row[:, None])
    plgpu.store(top_ref.at[take], top, mask=is_row)
    plgpu.store(total_ref.at[take], total, mask=is_row)


def _merged(outs: Array, tops: Array, totals: Array, dtype: Any) -> Float[Array, "B G n E"]:
    """Merges the parts of a softmax. A query that sees nothing gives zeros."""
    splits, batch, groups, num, width = outs.shape

    def kernel(outs_ref, tops_ref, totals_ref, out_ref):
        at, inside = pl.ds(0, _power_of_two(splits)), jnp.arange(_power_of_two(splits)) < splits
        top = plgpu.load(tops_ref.at[at], mask=inside, other=MASKED)
        share = jnp.exp(top - jnp.max(top))
        total = jnp.sum(share * plgpu.load(totals_ref.at[at], mask=inside, other=0.0))
        parts = plgpu.load(outs_ref.at[at, :], mask=inside[:, None], other=0.0)
        out_ref[:] = (jnp.sum(parts * share[:, None], 0) / jnp.where(total > 0, total, 1.0)).astype(dtype)

    def part(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((splits, None, None, None, *shape), lambda b, g, q: (0, b, g, q, *(0 for _ in shape)))

    return _call(
        kernel,
        grid=(batch, groups, num),
        in_specs=[part(width), part(), part()],
        out_specs=_block([width], 0, 1, 2),
        out_shape=jax.ShapeDtypeStruct((batch, groups, num, width), dtype),
        name="merge_splits",
    )(outs, tops, totals)


def write_applies(buffers: Sequence[Array]) -> bool:
    """Whether `write` applies to caches with heads of this width."""
    return is_on() and all(_is_tile(buffer.shape[3]) for buffer in buffers)


def write(
    buffers: Sequence[Float[Array, "B G _ E"]],
    rows: Sequence[Float[Array, "B G N E"]],
    nodes: Int[Array, "B M"],
    start: Int[Array, "B"],
    capacity: int,
    valid: Bool[Array, "B M"] | None,
) -> list[Float[Array, "B G _ E"]]:
    """Writes `nodes` of `rows` to the caches of all layers, in the slots from `start` on, `AT_ONCE` caches per launch.

    A cache with fewer than `capacity` slots is a ring, to which only `valid` nodes are written (None: all).
    """
    batch, groups = buffers[0].shape[:2]
    takes = jnp.ones_like(nodes) if valid is None else valid.astype(jnp.int32)
    heads, row = ("data", "model", None, None), ("data", None)

    put = functools.partial(_written, capacity=capacity)
    found = []
    for first in range(0, len(buffers), AT_ONCE):
        some = [tuple(x[first : first + AT_ONCE]) for x in (buffers, rows)]
        whole = (heads,) * len(some[0])
        ins = [whole, whole, row, row, row]
        found += program.on_each_device(put, ins, whole, batch, groups)(*some, nodes, start[:, None], takes)
    return found


def _written(buffers, rows, nodes, start, valid, capacity: int):
    num = len(buffers)
    batch, groups, _, width = buffers[0].shape

    def kernel(*refs):
        rows_refs, (nodes_ref, start_ref, valid_ref), out_refs = refs[num : 2 * num], refs[-3 - num : -num], refs[-num:]
        place = pl.program_id(2)
        node, slot, is_valid = nodes_ref[place], start_ref[0] + place, valid_ref[place] != 0
        for row_ref, out_ref in zip(rows_refs, out_refs, strict=True):
            slots = out_ref.shape[0]
            takes = is_valid if slots < capacity else True
            mask = jnp.broadcast_to(jnp.asarray(takes), (width,))
            plgpu.store(out_ref.at[slot % slots, :], row_ref[node, :].astype(out_ref.dtype), mask=mask)

    caches, row = [_block(x.shape[2:], 0, 1) for x in buffers], _block([nodes.shape[1]], 0)
    return _call(
        kernel,
        grid=(batch, groups, nodes.shape[1]),
        in_specs=[*caches, *[_block(x.shape[2:], 0, 1) for x in rows], row, _block([1], 0), row],
        out_specs=caches,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in buffers],
        input_output_aliases={i: i for i in range(num)},
        name="write_caches",
    )(*buffers, *rows, nodes, start, valid)


def _call(kernel: Callable, **options: Any) -> Callable:
    params = plgpu.CompilerParams(num_warps=4, num_stages=2)
    return pl.pallas_call(kernel, compiler_params=params, interpret=program.here().interprets, **options)
