"""The operations of a pass and of a draw, each where it runs best: our CPU kernels where they are on, else XLA.

Kernels are stored [out, in] as in Hugging Face files, which is also the layout XLA multiplies fastest for a few rows
on CPU. Activations are float32; a product runs in the dtype of its kernel and accumulates in float32. Read next:
`native.py`, the binding of the CPU kernels.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.kernels import native

MASKED = -1e30
"""Score of a masked position; finite, so that a row with nothing to see gives no NaN."""
SLOTS_AT_ONCE = 256
"""Slots of a cache that XLA's attention reads in a step; steps of which nobody sees a slot are left out."""


def matmul(x: Float[Array, "... in"], kernel: Float[Array, "out in"]) -> Float[Array, "... out"]:
    """`x @ kernel.T` with float32 accumulation; in the kernel's dtype where the device multiplies that."""
    return matmuls(x, (kernel,))[0]


def matmuls(x: Float[Array, "... in"], kernels: tuple[Array, ...]) -> list[Array]:
    """The products of one input with several kernels: one call where the CPU kernels apply."""
    if all(native.applies(kernel) for kernel in kernels):
        num_rows = math.prod(x.shape[:-1])
        products = native.rows_matmul(x.reshape(num_rows, x.shape[-1]), kernels)
        return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in products]

    def one(kernel: Array) -> Array:
        if native.is_emulated(kernel.dtype):
            kernel = kernel.astype(jnp.float32)
        return lax.dot_general(
            x.astype(kernel.dtype), kernel, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

    return [one(kernel) for kernel in kernels]


def activate(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """The activation of an MLP, "silu" or "gelu_pytorch_tanh"."""
    return jax.nn.silu(x) if name == "silu" else jax.nn.gelu(x, approximate=True)


def gated_mlp(
    x: Float[Array, "... H"],
    gate: Float[Array, "I H"],
    up: Float[Array, "I H"],
    down: Float[Array, "H I"],
    activation: str,
) -> Float[Array, "... H"]:
    """`down . (activate(gate . x) * (up . x))`."""
    if all(native.applies(kernel) for kernel in (gate, up, down)):
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return native.gated_mlp(rows, gate, up, down, is_gelu=activation != "silu").reshape(x.shape)
    gated, raised = matmuls(x, (gate, up))
    return matmul(activate(gated, activation) * raised, down)


def rows_of(table: Float[Array, "V H"], index: Int[Array, "..."]) -> Float[Array, "... H"]:
    """`table[index]` in float32.

    On a CPU XLA gathers no bfloat16: it would widen the whole table, at every call of the decode loop. So bits are
    gathered, where nothing asks for a gradient.
    """
    if table.dtype != jnp.bfloat16 or not native.is_on():
        return table[index].astype(jnp.float32)
    bits = lax.bitcast_convert_type(table, jnp.uint16)[index]
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def rms_norm(x: Float[Array, "... H"], weight: Float[Array, "H"], eps: float) -> Float[Array, "... H"]:
    """Root-mean-square norm over the last axis, in float32."""
    x = x.astype(jnp.float32)
    if native.is_on():
        return native.rms_norm(x, weight, eps)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def apply_rope(x: Float[Array, "B N h E"], table: tuple[Array, Array]) -> Float[Array, "B N h E"]:
    """Rotates heads by the angles of `layers.rope_table`, halves paired (not neighbours)."""
    if native.is_on():
        return native.rope(x, table)
    cos, sin = table
    half = x.shape[-1] // 2
    rotated = jnp.concatenate([x[..., half:], x[..., :half]], -1)
    return x * cos[:, :, None, :] + rotated * sin[:, :, None, :]


def widen(mask: Array, query: Float[Array, "B G n E"]) -> Array:
    """A mask [B, N, X] over nodes as one over their queries, [B, 1, n, X]: a node's query heads stand together."""
    return jnp.repeat(mask, query.shape[2] // mask.shape[1], axis=1)[:, None]


def attend(
    query: Float[Array, "B G n E"],
    new: tuple[Array, Array],
    new_mask: Bool[Array, "B N X"],
    cached: tuple[Array, Array] | None,
    seen: tuple[Int[Array, "B N"], Int[Array, "B N"]] | None,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B G n E"]:
    """Attention over committed slots and over the nodes of this pass, in one softmax.

    `query` already stands grouped by key/value head: n = nodes x (query heads per key/value head).

    Args:
      new_mask: which entries of this pass each node sees.
      seen: the first slot each node sees, and the one behind the last.
    """
    if cached is not None and seen is not None and native.attend_applies(query, cached):
        return native.attend(query, new, new_mask, cached, seen, scale, softcap)

    def scores(keys: Array, mask: Array) -> Array:
        s = lax.dot_general(query, keys.astype(jnp.float32), (((3,), (3,)), ((0, 1), (0, 1)))) * scale
        if softcap is not None:
            s = jnp.tanh(s / softcap) * softcap
        return jnp.where(mask, s, MASKED)

    def mix(weights: Array, values: Array) -> Array:
        return lax.dot_general(weights, values.astype(jnp.float32), (((3,), (2,)), ((0, 1), (0, 1))))

    new_scores = scores(new[0], widen(new_mask, query))
    if cached is None or seen is None:
        return mix(jax.nn.softmax(new_scores, -1), new[1])
    first, last = (widen(x[:, :, None], query) for x in seen)
    num_slots = cached[0].shape[2]
    step = SLOTS_AT_ONCE if num_slots % SLOTS_AT_ONCE == 0 else num_slots

    def add(block, carry):
        """The softmax so far, as maximum, sum and unscaled output, with a block of slots added."""
        top, total, out = carry
        keys, values = (lax.dynamic_slice_in_dim(x, block * step, step, 2) for x in cached)
        slots = block * step + jnp.arange(step)
        found = scores(keys, (slots >= first) & (slots < last))
        higher = jnp.maximum(top, found.max(-1, keepdims=True))
        weights, kept = jnp.exp(found - higher), jnp.exp(top - higher)
        return higher, total * kept + weights.sum(-1, keepdims=True), out * kept + mix(weights, values)

    top = new_scores.max(-1, keepdims=True)
    weights = jnp.exp(new_scores - top)
    carry = top, weights.sum(-1, keepdims=True), mix(weights, new[1])
    if step == num_slots:
        _, total, out = add(0, carry)
    else:
        begin = jnp.min(jnp.where(last > first, first, num_slots)) // step
        end = jnp.minimum((jnp.max(last) + step - 1) // step, num_slots // step)
        _, total, out = lax.fori_loop(begin, end, add, carry)
    return out / total


def gumbel(keys: jax.Array, num: int) -> Float[Array, "R num"]:
    """`jax.random.gumbel(key, (num,))` of each key [R]; its bits from our own kernel where that is on."""
    if native.random_bits_applies(keys):
        bits = native.random_bits(keys, num)
    else:
        bits = jax.vmap(lambda key: jax.random.bits(key, (num,)))(keys)
    one_to_two = lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    uniform = jnp.maximum(one_to_two - 1.0, jnp.finfo(jnp.float32).tiny)
    return -jnp.log(-jnp.log(uniform))


def argmax(x: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """`jnp.argmax` over the last axis, by a maximum and a minimum.

    XLA on CPU runs a reduction of pairs one element at a time, and draws whatever feeds it into that loop: with the two
    logarithms of the noise in it, 8 rows of 4,096 took 0.8 ms instead of 0.1.
    """
    if native.is_on() and x.dtype == jnp.float32:
        return native.argmax(x)
    vocab_size = x.shape[-1]
    is_best = x == jnp.max(x, -1, keepdims=True)
    # Nothing may equal the maximum of a row with a NaN: the last index then. `step.is_lawless` finds such rows.
    return jnp.min(jnp.where(is_best, jnp.arange(vocab_size, dtype=jnp.int32), vocab_size - 1), -1)
