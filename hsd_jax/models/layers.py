"""The linen layers that target and drafter share: products, norms, rotary embedding, attention, MLP, block.

Weights are stored [out, in] as in Hugging Face files. `kernels/ops.py` chooses the implementation of each operation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hsd_jax.config import RopeConfig
from hsd_jax.kernels import triton
from hsd_jax.kernels.attention import attend
from hsd_jax.kernels.int8 import Kernel
from hsd_jax.kernels.ops import activate, gated_mlp, matmul, matmuls, rms_norm, rope, rounded
from hsd_jax.models.cache import take_nodes
from hsd_jax.types import NewKV

normal, zeros = nn.initializers.normal, nn.initializers.zeros


def param(module: nn.Module, name: str, init: Callable, shape: tuple[int, ...]) -> Any:
    """`module.param`, for weights that may be held in groups (`GroupedInt8`).

    flax compares the shapes of the arrays that hold a weight, and those of groups are not its own. For that it traces
    `init` in each use, which took a third of the time of a trace.
    """
    held = module.get_variable("params", name)
    return held if held is not None and held.shape == shape else module.param(name, init, shape)


class Weight(nn.Module):
    """A kernel [out, in] and its bias, or None without a bias. `out` may be several axes."""

    out_features: int | tuple[int, ...]
    in_features: int
    use_bias: bool = False
    init: Callable | None = None
    """None: normally distributed, for products of the variance of the input."""

    @nn.compact
    def __call__(self) -> tuple[Kernel, Array | None]:
        out = (self.out_features,) if isinstance(self.out_features, int) else self.out_features
        init = self.init or normal(self.in_features**-0.5)
        kernel = param(self, "kernel", init, (*out, self.in_features))
        return kernel, param(self, "bias", zeros, out) if self.use_bias else None


def linears(x: Float[Array, "... in"], *weights: Weight) -> list[Array]:
    """Multiplies `x` by several weights with the same input width and adds their biases."""
    pairs = [weight() for weight in weights]
    products = matmuls(x, tuple(kernel for kernel, _ in pairs))
    return [y if bias is None else y + bias.astype(jnp.float32) for y, (_, bias) in zip(products, pairs, strict=True)]


class RMSNorm(nn.Module):
    """`rms_norm` with its weight. `offset` is as in `ops.rms_norm`.

    `feeds_product` states that only products with kernels of the weight's dtype read the result.
    """

    eps: float
    offset: float = 0.0
    feeds_product: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        weight = param(self, "weight", nn.initializers.constant(1.0 - self.offset), (x.shape[-1],))
        dtype = weight.dtype if self.feeds_product else jnp.float32
        return rms_norm(x, weight, self.eps, self.offset, dtype)


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
    if rope.kind == "yarn":  # between the two places it goes from the plain frequencies to the scaled ones
        turns = [rope.original_max_position / (2 * math.pi * beta) for beta in (rope.beta_fast, rope.beta_slow)]
        first, last = (head_dim / 2 * math.log(n) / math.log(rope.theta) for n in turns)
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first or 0.001
        share = np.clip((np.arange(head_dim // 2, dtype=np.float32) - first) / width, 0, 1)
        return (share * inverse / rope.factor + (1 - share) * inverse).astype(np.float32)
    return inverse.astype(np.float32)


def rope_table(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B N"]
) -> tuple[Float[Array, "B N E"], Float[Array, "B N E"]]:
    """Cosine and signed sine for the half-rotation form. Angles are float32: bfloat16 angles are wrong past 256."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def attend_after(earlier: NewKV | None, layer: int) -> Callable:
    """An `attend` whose nodes also see entries of earlier passes of this round, which are not in the cache."""
    if earlier is None:
        return attend

    def joined(old: tuple[Array, ...], new: Array) -> Array:
        return jnp.concatenate([old[layer].astype(new.dtype), new], 2)

    def after(query, new, *rest):
        return attend(query, (joined(earlier.keys, new[0]), joined(earlier.values, new[1])), *rest)

    return after


class Attention(nn.Module):
    """Grouped-query attention. Returns its output, and the new keys and values with rotary embedding applied.

    `attend_fn` replaces `attend` if visibility is not a mask over nodes (`models/unroll.py`). `asking` [B, asked] are
    the nodes whose output is computed. None: all nodes. Keys and values are always computed for all nodes.
    """

    config: Any
    """As that of `Block`."""

    @nn.compact
    def __call__(self, x, table, new_mask, cached, seen, attend_fn=attend, asking=None):
        c, batch = self.config, len(x)
        groups, width = c.num_kv_heads, c.head_dim
        per_group = c.num_heads // groups

        is_packed = self.has_variable("params", "qkv")  # `packing.py`
        if is_packed:
            joint = Weight((c.num_heads + 2 * groups) * width, x.shape[-1], c.qkv_bias, name="qkv")
            heads = linears(x, joint)[0].reshape(batch, x.shape[1], groups, per_group + 2, width)
            query, key, value = (
                y.reshape(batch, x.shape[1], -1, width) for y in jnp.split(heads, (per_group, per_group + 1), axis=3)
            )
            query = query if asking is None else take_nodes(query, asking, 1)
        else:
            counts = {"q": c.num_heads, "k": groups, "v": groups}
            projections = [Weight(n * width, x.shape[-1], c.qkv_bias, name=name) for name, n in counts.items()]
            if asking is None:
                products = linears(x, *projections)
            else:
                products = linears(take_nodes(x, asking, 1), projections[0]) + linears(x, *projections[1:])
            query, key, value = (y.reshape(batch, y.shape[1], -1, width) for y in products)
        if c.qk_norm:
            query = RMSNorm(c.norm_eps, c.norm_offset, name="q_norm")(query)
            key = RMSNorm(c.norm_eps, c.norm_offset, name="k_norm")(key)
        if is_packed and cached is not None and asking is None and not c.qk_norm and triton.rope_applies(heads):
            query, key, value = triton.rope(heads, table, cached[0].dtype)
        else:
            query_table = table
            if asking is not None:
                query_table, new_mask, seen = jax.tree.map(lambda x: take_nodes(x, asking, 1), (table, new_mask, seen))
            query, key, value = rope(query, key, value, query_table, table)
            if cached is not None:  # round as the cache does: a node's logits must not depend on the round
                key, value = rounded(key, cached[0].dtype), rounded(value, cached[1].dtype)
        out = attend_fn(query, (key, value), new_mask, cached, seen, c.attention_scale, c.attention_softcap)
        output = Weight(c.hidden_size, out.shape[-1], c.output_bias, residual_init(c), name="o")
        return linears(out, output)[0], (key, value)


class MLP(nn.Module):
    """The gated MLP: down(act(gate(x)) * (up(x) + up_bias)).

    `up_bias` is an input: one bias per node, the two factors of it, or None.
    """

    intermediate_size: int
    activation: str = "silu"
    use_bias: bool = False
    down_init: Callable | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "... H"], up_bias: Float[Array, "... F"] | tuple[Array, Array] | None = None
    ) -> Float[Array, "... H"]:
        if isinstance(up_bias, tuple):
            up_bias = matmul(*up_bias)
        width, wider = x.shape[-1], self.intermediate_size
        down_weight = Weight(width, wider, self.use_bias, self.down_init, name="down")
        if self.has_variable("params", "gate_up"):  # `packing.py`
            joint = Weight((2, wider), width, self.use_bias, name="gate_up")
            gate, up = jnp.moveaxis(linears(x, joint)[0], -2, 0)
        else:
            gate_weight, up_weight = (Weight(wider, width, self.use_bias, name=name) for name in ("gate", "up"))
            if not self.use_bias:
                gate, up, down = (weight()[0] for weight in (gate_weight, up_weight, down_weight))
                return gated_mlp(x, gate, up, down, self.activation, up_bias)
            gate, up = linears(x, gate_weight, up_weight)
        up = up if up_bias is None else up + up_bias
        return linears(activate(gate, self.activation) * up, down_weight)[0]


def residual_init(config: Any) -> Callable:
    """How kernels begin whose products are added to the residual stream."""
    return normal((2 * config.num_layers * config.hidden_size) ** -0.5)


class Block(nn.Module):
    """One decoder layer, with Gemma's second norms if `post_norms` is set.

    With `embeddings` it is the first layer of an EAGLE-3 drafter: its attention reads each normalised embedding and the
    normalised state side by side. What follows is added to the state.
    """

    config: Any
    """A `ModelConfig` or a `TrunkConfig`."""

    @nn.compact
    def __call__(self, x, table, new_mask, cached, seen, attend_fn=attend, asking=None, up_bias=None, embeddings=None):
        c = self.config
        norm = functools.partial(RMSNorm, c.norm_eps, c.norm_offset)
        if embeddings is None:
            normed = norm(feeds_product=True, name="attn_norm")(x)
        else:
            state = norm(name="hidden_norm")(x)
            normed = jnp.concatenate([norm(name="attn_norm")(embeddings), state], -1)
            x = state if c.norm_before_residual else x
        attended, kv = Attention(c, name="attn")(normed, table, new_mask, cached, seen, attend_fn, asking)
        x = x if asking is None else take_nodes(x, asking, 1)
        x = x + (norm(name="attn_post_norm")(attended) if c.post_norms else attended)
        mlp = MLP(c.intermediate_size, c.activation, c.mlp_bias, residual_init(c), name="mlp")(
            norm(feeds_product=True, name="mlp_norm")(x), up_bias
        )
        return x + (norm(name="mlp_post_norm")(mlp) if c.post_norms else mlp), kv
