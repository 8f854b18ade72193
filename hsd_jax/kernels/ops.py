"""The operations of a pass and of a draw. Each uses our CPU or GPU kernels if they are on, else XLA.

Weights are stored [out, in] as in Hugging Face files. XLA on CPU also multiplies this layout fastest for a few rows.
Activations are float32. A product runs in the dtype of its kernel and accumulates in float32. An 8-bit kernel is
converted to floats inside the product, unless the CPU kernels multiply it in whole numbers (`int8.py`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.kernels import native, program, triton
from hsd_jax.kernels.int8 import GroupedInt8, Int8, Kernel, Quantized
from hsd_jax.types import INVALID_TOKEN

MOST_BEST = 32
"""The largest k for which the CPU kernel, which keeps a sorted list, is used."""


def matmul(x: Float[Array, "... in"], kernel: Kernel) -> Float[Array, "... out"]:
    """`x @ kernel.T` with float32 accumulation, in the kernel's dtype if the device multiplies it."""
    return matmuls(x, (kernel,))[0]


def matmuls(x: Float[Array, "... in"], kernels: tuple[Kernel, ...]) -> list[Array]:
    """The products of one input with several kernels, in one call if the CPU kernels apply.

    In these a row's result is bitwise the same for any number of rows, and `native.ISAS` says what is rounded.
    Without them a kernel may be [*out, in]. The product then is [..., *out].
    """
    if all(native.applies(kernel) for kernel in kernels):
        num_rows = math.prod(x.shape[:-1])
        rows, outs = _rows(x), [native.floats(num_rows, kernel.shape[0]) for kernel in kernels]
        products = native.call("rows_matmul", outs)(rows, native.flags(num_rows), *native.operands(*kernels))
        return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in products]
    return [_matmul(x, kernel) for kernel in kernels]


def _rows(x: Float[Array, "... in"]) -> Float[Array, "rows in"]:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)


def _matmul(x: Float[Array, "... in"], kernel: Kernel) -> Array:
    if isinstance(kernel, GroupedInt8):
        kernel = kernel.ungrouped()
    if isinstance(kernel, Int8):
        return _matmul(x, kernel.values.astype(kernel.dtype)) * kernel.scale
    if native.is_emulated(kernel.dtype):
        kernel = kernel.astype(jnp.float32)
    product = _product if kernel.dtype == jnp.float32 else _narrow_product
    return product(x.astype(kernel.dtype), kernel)


def _product(x: Array, kernel: Array) -> Array:
    dimensions = ((x.ndim - 1,), (kernel.ndim - 1,)), ((), ())
    return lax.dot_general(x, kernel, dimensions, preferred_element_type=jnp.float32)


_narrow_product = jax.custom_vjp(_product)
"""`_product` whose backward products are also in the kernel's dtype. Otherwise XLA widens the kernel to float32 for the
product with the gradient, which takes gigabytes for an LM head."""


def _narrow_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, kernel), (x, kernel)


def _narrow_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = saved
    gradient, rows = gradient.astype(kernel.dtype), tuple(range(x.ndim - 1))
    outputs = tuple(range(len(rows), gradient.ndim)), tuple(range(kernel.ndim - 1))
    to_x = lax.dot_general(gradient, kernel, (outputs, ((), ())), preferred_element_type=jnp.float32)
    to_kernel = lax.dot_general(gradient, x, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
    return to_x.astype(x.dtype), to_kernel.astype(kernel.dtype)


_narrow_product.defvjp(_narrow_forward, _narrow_backward)


def activate(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """The activation of an MLP, "silu" or "gelu_pytorch_tanh"."""
    return jax.nn.silu(x) if name == "silu" else jax.nn.gelu(x, approximate=True)


def gated_mlp(
    x: Float[Array, "... H"],
    gate: Float[Array, "F H"] | Quantized,
    up: Float[Array, "F H"] | Quantized,
    down: Float[Array, "H F"] | Quantized,
    activation: str,
    up_bias: Float[Array, "... F"] | None = None,
) -> Float[Array, "... H"]:
    """`down . (activate(gate . x) * (up . x + up_bias))`."""
    if all(native.applies(kernel) for kernel in (gate, up, down)):
        num_rows = math.prod(x.shape[:-1])
        rows, bias = _rows(x), jnp.zeros((0, gate.shape[0])) if up_bias is None else _rows(up_bias)
        arrays = rows, native.flags(num_rows), bias, *native.operands(gate, up, down)
        out = native.call("gated_mlp", native.floats(num_rows, down.shape[0]))
        return out(*arrays, is_gelu=activation != "silu").reshape(x.shape)
    gated, raised = matmuls(x, (gate, up))
    raised = raised if up_bias is None else raised + up_bias
    return matmul(activate(gated, activation) * raised, down)


def take_rows(table: Kernel, index: Int[Array, "..."]) -> Float[Array, "... H"]:
    """`table[index]` in float32.

    XLA on a CPU cannot gather bfloat16 or other 16-bit words: it converts the whole table at every call of the decode
    loop. Our kernel gathers them instead. It has no gradient, so it is used only while a decode is traced.
    """
    if isinstance(table, Quantized):
        return table.floats(index)
    if table.dtype == jnp.bfloat16 and native.is_on():
        return native.call("gather", native.floats(*index.shape, table.shape[1]))(table, index)
    return table[index].astype(jnp.float32)


def embed(table: Kernel, tokens: Int[Array, "B N"]) -> Float[Array, "B N H"]:
    """`take_rows` of a table that a mesh for decoding may split by rows.

    Each device looks up the tokens of its own part, and one sum combines the parts. XLA alone treats the lookup of one
    row as a slice, and on GPUs it gathers the whole table for it in every round.
    """
    num_shards, mesh = program.shards("model", table.shape[0]), program.here().mesh
    if num_shards == 1 or mesh is None or "fsdp" in mesh.axis_names:  # for training, which splits weights further
        return take_rows(table, tokens)
    part = table.shape[0] // num_shards
    exact = jnp.float32 if isinstance(table, Quantized) else table.dtype  # the sum is exact: all summands but one are 0

    def on_one(table: Kernel, tokens: Array) -> Array:
        at = tokens - lax.axis_index("model") * part
        is_here = (at >= 0) & (at < part)
        rows = jnp.where(is_here[..., None], take_rows(table, jnp.clip(at, 0, part - 1)), 0.0)
        return lax.psum(rows.astype(exact), "model").astype(jnp.float32)

    of_each = program.on_each_device(on_one, [("model",), ("data",)], ("data",), len(tokens), table.shape[0])
    return of_each(table, tokens)


def rms_norm(
    x: Float[Array, "... H"],
    weight: Float[Array, "H"],
    eps: float,
    offset: float = 0.0,
    dtype: Any = jnp.float32,
) -> Float[Array, "... H"]:
    """Root-mean-square norm over the last axis, in float32.

    Args:
      offset: added to the weight.
      dtype: the dtype to which a GPU kernel may round the result, because only products in this dtype read it.
    """
    x = x.astype(jnp.float32)
    if triton.is_on():
        return triton.rms_norm(x, weight, eps, offset, dtype)
    weight = weight.astype(jnp.float32) + offset
    if native.is_on():
        return native.call("rms_norm", native.floats(*x.shape))(x, weight, eps=np.float32(eps))
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(
    query: Float[Array, "B asked heads E"],
    key: Float[Array, "B N G E"],
    value: Float[Array, "B N G E"],
    query_table: tuple[Array, Array],
    key_table: tuple[Array, Array],
) -> tuple[Float[Array, "B G n E"], Float[Array, "B G N E"], Float[Array, "B G N E"]]:
    """Rotates queries and keys by their `layers.rope_table`, and groups both and the values by key/value head.

    That is how attention reads them: n = asked x (query heads per key/value head).
    """
    batch, num, groups, width = key.shape
    num_asked = query.shape[1]
    per_group = query.shape[2] // groups
    shapes = (batch, groups, num_asked * per_group, width), *[(batch, groups, num, width)] * 2
    if native.is_on():
        kernel = native.call("rope", [native.floats(*shape) for shape in shapes])
        return tuple(kernel(query, key, value, *query_table, *key_table))
    queries = rotated(query, query_table).reshape(batch, num_asked, groups, per_group, width)
    grouped = queries.transpose(0, 2, 1, 3, 4), *(x.transpose(0, 2, 1, 3) for x in (rotated(key, key_table), value))
    return grouped[0].reshape(shapes[0]), grouped[1], grouped[2]


def rotated(x: Float[Array, "B N heads E"], table: tuple[Array, Array]) -> Float[Array, "B N heads E"]:
    """Heads rotated by XLA. Element i is paired with element i + E/2, not a neighbour."""
    cos, sin = table
    half = x.shape[-1] // 2
    swapped = jnp.concatenate([x[..., half:], x[..., :half]], -1)
    return x * cos[:, :, None, :] + swapped * sin[:, :, None, :]


def rounded(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """`x` in another float dtype. XLA cannot remove this rounding, even if the next operation is in float32."""
    if x.dtype == dtype:
        return x
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


def gumbel(keys: jax.Array, num: int) -> Float[Array, "keys num"]:
    """`jax.random.gumbel(key, (num,))` for each of the `keys` [keys]. The last bits of its logarithms may differ."""
    is_default = str(jax.random.key_impl(keys)) == "threefry2x32"
    if native.is_on() and is_default and getattr(jax.config, "jax_threefry_partitionable", True):
        out = native.call("gumbel", native.floats(len(keys), num))
        return out(jax.random.key_data(keys), native.flags(len(keys)))
    bits = jax.vmap(lambda key: jax.random.bits(key, (num,)))(keys)
    one_to_two = lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    uniform = jnp.maximum(one_to_two - 1.0, jnp.finfo(jnp.float32).tiny)
    return -jnp.log(-jnp.log(uniform))


def argmax(x: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """`jnp.argmax` over the last axis, computed by a maximum and a minimum.

    On a mesh the result is INVALID_TOKEN for a row with a NaN or with only -inf. If V is split, each device searches
    its own part, and one collective exchanges only the results.

    XLA on CPU runs a reduction of pairs one element at a time and fuses its inputs into that loop. With the two
    logarithms of the noise in it, 8 rows of 4,096 took 0.8 ms instead of 0.1.
    """
    if native.is_on() and x.dtype == jnp.float32:
        out = jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32)
        return native.call("first_best", out)(x, native.flags(math.prod(out.shape)))
    if triton.is_on() and program.here().mesh is None:  # two launches, not four; a mesh would gather the sharded axis
        return lax.argmax(x, x.ndim - 1, jnp.int32)
    vocab_size = x.shape[-1]
    index = jnp.arange(vocab_size, dtype=jnp.int32)
    if program.here().mesh is None:
        # In a row with a NaN no element may equal the maximum. It gives the last index; `round.or_invalid` finds it.
        return jnp.min(jnp.where(x == jnp.max(x, -1, keepdims=True), index, vocab_size - 1), -1)
    num_shards = program.shards("model", vocab_size)  # on a mesh a later check as in `step` would cost collectives
    if num_shards > 1:
        parts = _in_parts(x, num_shards)
        best = jnp.max(parts, -1, keepdims=True)
        at = jnp.min(jnp.where(parts == best, index.reshape(num_shards, -1), vocab_size), -1, keepdims=True)
        index, x = (found.reshape(*x.shape[:-1], num_shards) for found in _met(at, best))
    best = jnp.max(x, -1, keepdims=True)
    found = jnp.min(jnp.where((x == best) & (best > -jnp.inf), index, vocab_size), -1)
    return jnp.where(found == vocab_size, INVALID_TOKEN, found)


def _in_parts(x: Float[Array, "*rows V"], num_shards: int) -> Float[Array, "all_rows shards part"]:
    """The last axis in one part per device of "model", over which it is split."""
    rows = x.reshape(math.prod(x.shape[:-1]), num_shards, -1)
    return program.placed(rows, "data", "model", None)


def _met(
    index: Int[Array, "rows shards j"], numbers: Float[Array, "rows shards k"]
) -> tuple[Int[Array, "rows shards j"], Float[Array, "rows shards k"]]:
    """The results of all devices on each of them, by one collective."""
    # Everything is sent as integers: indices read as floats are subnormal, and a device may flush them to 0.
    together = jnp.concatenate([index, lax.bitcast_convert_type(numbers, jnp.int32)], -1)
    met, num = program.placed(together, "data", None, None), index.shape[-1]
    return met[..., :num], lax.bitcast_convert_type(met[..., num:], jnp.float32)


def top_k(
    x: Float[Array, "*rows V"], k: int
) -> tuple[Float[Array, "*rows _"], Int[Array, "*rows _"], Float[Array, "*rows 1"]]:
    """The k largest numbers of the last axis in falling order, their indices, and the log-sum-exp of all numbers.

    On the CPU a NaN is never among the largest. On a tie the lower index comes first. XLA has a fast path for matrices
    on a GPU; arrays of more axes it sorts. On a mesh each device finds its own k largest, and one collective exchanges
    only these.
    """
    if native.is_on() and x.dtype == jnp.float32 and k <= MOST_BEST:
        rows = x.shape[:-1]
        outs = native.floats(*rows, k), jax.ShapeDtypeStruct((*rows, k), jnp.int32), native.floats(*rows, 1)
        return tuple(native.call("top_k", outs)(x, native.flags(math.prod(rows))))
    num_shards = program.shards("model", x.shape[-1])
    if num_shards == 1:
        rows = x if program.here().platform == "cpu" else x.reshape(-1, x.shape[-1])
        best, index = lax.top_k(rows, k)
        total = jax.nn.logsumexp(x, axis=-1, keepdims=True)
        return best.reshape(*x.shape[:-1], k), index.reshape(*x.shape[:-1], k), total
    parts = _in_parts(x, num_shards)
    best, at = lax.top_k(parts, min(k, parts.shape[-1]))
    at = at + jnp.arange(num_shards)[:, None] * parts.shape[-1]
    at, numbers = _met(at, jnp.concatenate([best, jax.nn.logsumexp(parts, axis=-1, keepdims=True)], -1))
    best, total = numbers[..., :-1], numbers[..., -1:]
    num_rows = len(parts)
    best, place = lax.top_k(best.reshape(num_rows, -1), k)
    index = jnp.take_along_axis(at.reshape(num_rows, -1), place, 1)
    total = jax.nn.logsumexp(total[..., 0], axis=-1, keepdims=True)
    leading = x.shape[:-1]
    return best.reshape(*leading, k), index.reshape(*leading, k), total.reshape(*leading, 1)
