"""The steering of a small model as a linen module: a vector g, made from states of the target, biases every MLP.

    g = LayerNorm(W_mix [h; m; l]),   a -> W_down((W_up a + W_steer g) * act(W_gate a))

W_mix is initialised to the sum of the states and W_steer to zeros, so untrained steering does not change the model
(Berdoz et al., arXiv:2511.09844).
"""

from __future__ import annotations

from typing import NamedTuple, cast

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from hsd_jax.kernels import native
from hsd_jax.kernels.ops import matmul
from hsd_jax.models.layers import Weight, zeros


class Steer(NamedTuple):
    """The steering of some tokens: a vector for each token, and the kernel that makes each layer's bias from it."""

    vectors: Float[Array, "B N W"]
    kernel: Float[Array, "L F W"]

    def up_bias(self) -> Float[Array, "B N L F"]:
        """The biases of all layers, in one product.

        This is for the few tokens of a round. For the many tokens of a prompt or of training, each layer computes its
        own bias.
        """
        if not native.applies(self.kernel):
            return matmul(self.vectors, self.kernel)
        num_layers, num_outputs, width = self.kernel.shape
        product = matmul(self.vectors, self.kernel.reshape(-1, width))
        return product.reshape(*self.vectors.shape[:-1], num_layers, num_outputs)


def of_layer(up_bias: Float[Array, "B N L F"] | Steer | None, layer: int) -> Array | tuple[Array, Array] | None:
    """The bias of one layer, or its two factors."""
    if up_bias is None:
        return None
    return (up_bias.vectors, up_bias.kernel[layer]) if isinstance(up_bias, Steer) else up_bias[:, :, layer]


class Steering(nn.Module):
    """Computes the steering of every layer of the drafter from states of the target."""

    width: int
    """The width of one of the target's states."""
    num_states: int
    """The number of states per token, concatenated in `features`."""
    num_layers: int
    intermediate_size: int

    @nn.compact
    def __call__(self, features: Float[Array, "B N X"]) -> Steer:
        def summing(key, shape):
            return jnp.tile(jnp.eye(self.width), (1, self.num_states))

        mix, _ = Weight(self.width, self.num_states * self.width, init=summing, name="mix")()
        g = nn.LayerNorm(epsilon=1e-5, name="norm", dtype=jnp.float32)(matmul(features, mix))
        shape = self.num_layers, self.intermediate_size
        return Steer(g, cast(Array, Weight(shape, self.width, init=zeros, name="steer")()[0]))
