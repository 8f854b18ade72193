"""The steering of a small model, as a linen module: one vector of the target's states, a bias in every MLP.

    g = LayerNorm(W_mix [h; m; l]),   a -> W_down((W_up a + W_steer g) * act(W_gate a))

W_mix begins as the sum of the states, W_steer as zeros: an untrained one changes no bit of the model. Products of all
layers are one, once for all tokens that share a g (Berdoz et al., arXiv:2511.09844). Read next: `drafters/steered`.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from hsd_jax.kernels import native
from hsd_jax.kernels.ops import matmul


class Kernel(nn.Module):
    """The weight of a product, [*out, in]."""

    shape: tuple[int, ...]
    init: Callable

    @nn.compact
    def __call__(self) -> Array:
        return self.param("kernel", self.init, self.shape)


class Steering(nn.Module):
    """From states of the target to a bias on the up-projection of every layer of the drafter."""

    width: int
    """Numbers of one of the target's states."""
    num_states: int
    """States of a token, side by side."""
    num_layers: int
    intermediate_size: int

    @nn.compact
    def __call__(self, features: Float[Array, "B N X"]) -> Float[Array, "B N L F"]:
        def summing(key, shape):
            return jnp.tile(jnp.eye(self.width), (1, self.num_states))

        mixed = matmul(features, Kernel((self.width, self.num_states * self.width), summing, name="mix")())
        g = nn.LayerNorm(epsilon=1e-5, name="norm", dtype=jnp.float32)(mixed)
        shape = self.num_layers, self.intermediate_size, self.width
        steer = Kernel(shape, nn.initializers.zeros, name="steer")()
        if not native.applies(steer):
            return matmul(g, steer)
        return matmul(g, steer.reshape(-1, self.width)).reshape(*g.shape[:-1], self.num_layers, -1)
