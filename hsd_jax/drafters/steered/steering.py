"""The steering of a small model, as a linen module: one vector of the target's states, a bias in every MLP.

    g = LayerNorm(W_mix [h; m; l]),   a -> W_down((W_up a + W_steer g) * act(W_gate a))

W_mix begins as the sum of the states, W_steer as zeros: an untrained one changes no bit of the model. Products of all
layers are one, once for all tokens that share a g. Read next: `draft.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.drafters.steered.config import SteeredConfig
from hsd_jax.kernels import native
from hsd_jax.kernels.ops import matmul
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.target import forward_sequence
from hsd_jax.types import ModelOutput, Weights

STEERING = "steering"
"""The name of its weights among those of the model."""


class Kernel(nn.Module):
    """The weight of a product, [*out, in]."""

    shape: tuple[int, ...]
    init: Callable

    @nn.compact
    def __call__(self) -> Array:
        return self.param("kernel", self.init, self.shape)


class Steering(nn.Module):
    """From states of the target to a bias on the up-projection of every layer of the drafter."""

    config: SteeredConfig

    @nn.compact
    def __call__(self, features: Float[Array, "B N X"]) -> Float[Array, "B N L F"]:
        c = self.config
        width, num = c.target_hidden_size, len(c.steering_layers)

        def summing(key, shape):
            return jnp.tile(jnp.eye(width), (1, num))

        mixed = matmul(features, Kernel((width, num * width), summing, name="mix")())
        g = nn.LayerNorm(epsilon=1e-5, name="norm", dtype=jnp.float32)(mixed)
        steer = Kernel((c.num_layers, c.intermediate_size, width), nn.initializers.zeros, name="steer")()
        if not native.applies(steer):
            return matmul(g, steer)
        return matmul(g, steer.reshape(-1, width)).reshape(*g.shape[:-1], c.num_layers, -1)


def up_bias(weights: Weights, config: SteeredConfig, features: Float[Array, "B N X"]) -> Float[Array, "B N L F"]:
    """What `forward` takes under that name, for tokens that the states `features` steer."""
    return Steering(config).apply({"params": weights[STEERING]}, features)  # type: ignore[return-value]


def init_steering(key: jax.Array, config: SteeredConfig) -> Weights:
    """Float32 weights that do not steer yet."""
    width = len(config.steering_layers) * config.target_hidden_size
    return dict(Steering(config).init(key, jnp.zeros((1, 1, width)))["params"])


def joined_features(features: tuple[Float[Array, "B N H"], ...]) -> Float[Array, "B N X"]:
    """The states of several layers side by side, in float32."""
    return jnp.concatenate([part.astype(jnp.float32) for part in features], -1)


def steered_sequence(
    weights: Weights,
    config: SteeredConfig,
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T X"],
    lag: Int[Array, "B T"] | int,
    starts: Int[Array, "B T"] | None = None,
    remat: bool = False,
) -> ModelOutput:
    """`forward_sequence`, each token steered by the target's states of the token `lag` places before it, at least 1.

    Args:
      features: of every token, those of the layers that steer side by side; no gradient passes into them.
      starts: as in `sequence_layout`; a token whose lag reaches before its document is steered by zeros.
    """
    at = jnp.arange(tokens.shape[1]) - jnp.broadcast_to(jnp.asarray(lag), tokens.shape)
    is_there = at >= (0 if starts is None else starts)
    before = take_nodes(jax.lax.stop_gradient(features), jnp.maximum(at, 0), axis=1)
    bias = up_bias(weights, config, jnp.where(is_there[..., None], before, 0.0))
    return forward_sequence(weights, config, tokens, starts, up_bias=bias, remat=remat)
