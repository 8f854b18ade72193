"""The linen layers that target and drafter share: products, norms, rotary embedding, attention, MLP, block.

Kernels are stored [out, in] as in Hugging Face files, which is also the layout XLA multiplies fastest for a few
rows on CPU. Activations are float32; a product runs in the dtype of its kernel and accumulates in float32.
Read next: `target.py`.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import RopeConfig
from hsd_jax.models import native
from hsd_jax.models.cache import take_nodes

MASKED = -1e30
"""Score of a masked position; finite, so that a row with nothing to see gives no NaN."""


def matmul(x: Float[Array, "... in"], kernel: Float[Array, "out in"]) -> Float[Array, "... out"]:
    """`x @ kernel.T` with float32 accumulation; in the kernel's dtype where the device multiplies that."""
    return matmuls(x, (kernel,))[0]


def matmuls(x: Float[Array, "... in"], kernels: tuple[Array, ...]) -> list[Array]:
    """The products of one input with several kernels: one call of the native kernel, where that applies."""
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


class Weight(nn.Module):
    """An [out, in] kernel and its bias, None without one."""

    out_features: int
    in_features: int
    use_bias: bool = False
    init_std: float | None = None

    @nn.compact
    def __call__(self) -> tuple[Array, Array | None]:
        std = self.in_features**-0.5 if self.init_std is None else self.init_std
        kernel = self.param("kernel", nn.initializers.normal(std), (self.out_features, self.in_features))
        bias = self.param("bias", nn.initializers.zeros, (self.out_features,)) if self.use_bias else None
        return kernel, bias


def linears(x: Float[Array, "... in"], *weights: Weight) -> list[Array]:
    """`x` through several weights of one width, biases added."""
    pairs = [weight() for weight in weights]
    products = matmuls(x, tuple(kernel for kernel, _ in pairs))
    return [y if bias is None else y + bias.astype(jnp.float32) for y, (_, bias) in zip(products, pairs, strict=True)]


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


class RMSNorm(nn.Module):
    """`rms_norm` with its weight; `offset` is added to the weight (Gemma stores weight - 1)."""

    eps: float
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        weight = self.param("weight", nn.initializers.constant(1.0 - self.offset), (x.shape[-1],))
        return rms_norm(x, weight.astype(jnp.float32) + self.offset, self.eps)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies in float32, [head_dim / 2], with the scaling of `rope.kind`."""
    inverse = 1.0 / (rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim))
    if rope.kind == "linear":
        return (inverse / rope.factor).astype(np.float32)
    if rope.kind == "llama3":
        wavelength = 2 * np.pi / inverse
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        middle = (1 - smooth) * inverse / rope.factor + smooth * inverse
        scaled = np.where(wavelength > low, inverse / rope.factor, inverse)
        is_middle = (wavelength <= low) & (wavelength >= high)
        return np.where(is_middle, middle, scaled).astype(np.float32)
    if rope.kind != "default":
        raise ValueError(f"rope kind {rope.kind!r}: allowed are default, linear, llama3")
    return inverse.astype(np.float32)


def rope_table(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B N"]
) -> tuple[Float[Array, "B N E"], Float[Array, "B N E"]]:
    """Cosine and signed sine for the half-rotation form; angles in float32, bf16 angles are wrong past 256."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def apply_rope(x: Float[Array, "B N h E"], table: tuple[Array, Array]) -> Float[Array, "B N h E"]:
    """Rotates heads by the angles of `rope_table`, halves paired (not neighbours)."""
    if native.is_on():
        return native.rope(x, table)
    cos, sin = table
    half = x.shape[-1] // 2
    rotated = jnp.concatenate([x[..., half:], x[..., :half]], -1)
    return x * cos[:, :, None, :] + rotated * sin[:, :, None, :]


SLOTS_AT_ONCE = 256
"""Slots of a cache that XLA's attention reads in a step; steps of which nobody sees a slot are left out."""


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


class Attention(nn.Module):
    """Grouped-query attention. Returns its output and the new keys and values, rotary embedding applied.

    `attend_fn` stands in for `attend` where who sees whom is no mask over nodes (`train/unroll.py`). `asking` [B, Q]
    are the nodes whose output is wanted, of all the keys and values; None: all nodes.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    scale: float
    eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    softcap: float | None = None
    output_std: float | None = None

    @nn.compact
    def __call__(self, x, table, new_mask, cached, seen, attend_fn=attend, asking=None):
        batch = len(x)
        groups, width = self.num_kv_heads, self.head_dim
        per_group = self.num_heads // groups

        counts = {"q": self.num_heads, "k": groups, "v": groups}
        projections = [Weight(n * width, x.shape[-1], self.qkv_bias, name=name) for name, n in counts.items()]
        if asking is None:
            products = linears(x, *projections)
        else:
            products = linears(take_nodes(x, asking, 1), projections[0]) + linears(x, *projections[1:])
        query, key, value = (y.reshape(batch, y.shape[1], -1, width) for y in products)
        if self.qk_norm:
            query = RMSNorm(self.eps, self.norm_offset, name="q_norm")(query)
            key = RMSNorm(self.eps, self.norm_offset, name="k_norm")(key)
        key = apply_rope(key, table)
        if asking is not None:
            table = jax.tree.map(lambda t: take_nodes(t, asking, 1), table)
            new_mask, seen = jax.tree.map(lambda m: take_nodes(m, asking, 1), (new_mask, seen))
        query = apply_rope(query, table)
        num = query.shape[1]
        query = query.reshape(batch, num, groups, per_group, width).transpose(0, 2, 1, 3, 4)
        query = query.reshape(batch, groups, num * per_group, width)
        key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
        if cached is not None:  # rounded now as the cache will round them: a node's text must not depend on the round
            key, value = key.astype(cached[0].dtype), value.astype(cached[1].dtype)
        out = attend_fn(query, (key, value), new_mask, cached, seen, self.scale, self.softcap)
        out = out.reshape(batch, groups, num, per_group, width).transpose(0, 2, 1, 3, 4)
        out = out.reshape(batch, num, self.num_heads * width)
        output = Weight(self.hidden_size, out.shape[-1], self.output_bias, self.output_std, name="o")
        return linears(out, output)[0], (key, value)


class MLP(nn.Module):
    """The gated MLP: down(act(gate(x)) * up(x))."""

    intermediate_size: int
    activation: str = "silu"
    use_bias: bool = False
    output_std: float | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        width = (self.intermediate_size, x.shape[-1], self.use_bias)
        gate_weight, up_weight = Weight(*width, name="gate"), Weight(*width, name="up")
        down_weight = Weight(x.shape[-1], self.intermediate_size, self.use_bias, self.output_std, name="down")
        is_silu = self.activation == "silu"
        if not self.use_bias:
            kernels = [weight()[0] for weight in (gate_weight, up_weight, down_weight)]
            if all(native.applies(kernel) for kernel in kernels):
                rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
                return native.gated_mlp(rows, *kernels, is_gelu=not is_silu).reshape(x.shape)
        gate, up = linears(x, gate_weight, up_weight)
        gate = jax.nn.silu(gate) if is_silu else jax.nn.gelu(gate, approximate=True)
        return linears(gate * up, down_weight)[0]


class Block(nn.Module):
    """One decoder layer, with Gemma's second norms where `post_norms` asks for them."""

    config: Any
    """A `ModelConfig` or a `DrafterConfig`; the fields a drafter lacks take their plain values."""

    @nn.compact
    def __call__(self, x, table, new_mask, cached, seen, attend_fn=attend, asking=None):
        c = self.config
        get = lambda name, default: getattr(c, name, default)  # noqa: E731
        offset, post_norms = get("norm_offset", 0.0), get("post_norms", False)
        output_std = (2 * c.num_layers * c.hidden_size) ** -0.5

        def norm(name: str, y: Array) -> Array:
            return RMSNorm(c.norm_eps, offset, name=name)(y)

        attended, kv = Attention(
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.hidden_size,
            get("attention_scale", c.head_dim**-0.5),
            c.norm_eps,
            get("qkv_bias", False),
            get("output_bias", False),
            get("qk_norm", False),
            offset,
            get("attention_softcap", None),
            output_std,
            name="attn",
        )(norm("attn_norm", x), table, new_mask, cached, seen, attend_fn, asking)
        x = x if asking is None else take_nodes(x, asking, 1)
        x = x + (norm("attn_post_norm", attended) if post_norms else attended)
        mlp = MLP(c.intermediate_size, get("activation", "silu"), get("mlp_bias", False), output_std, name="mlp")(
            norm("mlp_norm", x)
        )
        return x + (norm("mlp_post_norm", mlp) if post_norms else mlp), kv
