"""The steering of a small model, as a linen module: one vector of the target's states, a bias in every MLP.

    g = LayerNorm(W_mix [h; m; l]),   a -> W_down((W_up a + W_steer g) * act(W_gate a))

W_mix begins as the sum of the states, W_steer as zeros: an untrained one changes no bit of the model (Berdoz et al.,
arXiv:2511.09844). Read next: `drafters/steered`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from hsd_jax.kernels import native
from hsd_jax.kernels.ops import matmul


class Steer(NamedTuple):
    """What steers tokens: a vector for each, and what makes a bias of it in every layer."""

    vectors: Float[Array, "B N W"]
    kernel: Float[Array, "L F W"]

    def up_bias(self) -> Float[Array, "B N L F"]:
        """The biases of all layers, in one product: for the few tokens of a round. A prompt or a row of training has
        many, and a layer makes its own."""
        if not native.applies(self.kernel):
            return matmul(self.vectors, self.kernel)
        num_layers, num_outputs, width = self.kernel.shape
        product = matmul(self.vectors, self.kernel.reshape(-1, width))
        return product.reshape(*self.vectors.shape[:-1], num_layers, num_outputs)


def of_layer(up_bias: Float[Array, "B N L F"] | Steer | None, layer: int) -> Array | tuple[Array, Array] | None:
    """The bias of one layer, or the two that it is the product of."""
    if up_bias is None:
        return None
    return (up_bias.vectors, up_bias.kernel[layer]) if isinstance(up_bias, Steer) else up_bias[:, :, layer]


class Kernel(nn.Module):
    """The weight of a product, [*out, in]."""

    shape: tuple[int, ...]
    init: Callable

    @nn.compact
    def __call__(self) -> Array:
        return self.param("kernel", self.init, self.shape)


class Steering(nn.Module):
    """From states of the target to what steers every layer of the drafter."""

    width: int
    """Numbers of one of the target's states."""
    num_states: int
    """States of a token, side by side."""
    num_layers: int
    intermediate_size: int

    @nn.compact
    def __call__(self, features: Float[Array, "B N X"]) -> Steer:
        def summing(key, shape):
            return jnp.tile(jnp.eye(self.width), (1, self.num_states))

        mixed = matmul(features, Kernel((self.width, self.num_states * self.width), summing, name="mix")())
        g = nn.LayerNorm(epsilon=1e-5, name="norm", dtype=jnp.float32)(mixed)
        shape = self.num_layers, self.intermediate_size, self.width
        return Steer(g, Kernel(shape, nn.initializers.zeros, name="steer")())
