"""Steering a small model, as functions of its weights and configuration. The Flax module is in `models/steering.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.drafters.steered.config import SteeredConfig
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.steering import Steer, Steering
from hsd_jax.models.target import forward_sequence
from hsd_jax.types import ModelOutput, Weights

STEERING = "steering"
"""The key of the steering weights among the weights of the model."""


def _module(config: SteeredConfig) -> Steering:
    return Steering(config.target_hidden_size, len(config.steering_layers), config.num_layers, config.intermediate_size)


def steer(weights: Weights, config: SteeredConfig, features: Float[Array, "B N X"]) -> Steer:
    """The `up_bias` of `forward` for tokens that are steered by the states `features`."""
    return _module(config).apply({"params": weights[STEERING]}, features)  # type: ignore[return-value]


def init_steering(key: jax.Array, config: SteeredConfig) -> Weights:
    """Float32 weights with which the bias is still zero."""
    width = len(config.steering_layers) * config.target_hidden_size
    return dict(_module(config).init(key, jnp.zeros((1, 1, width)))["params"])


def steered_sequence(
    weights: Weights,
    config: SteeredConfig,
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T X"],
    lag: Int[Array, "B T"] | int,
    starts: Int[Array, "B T"] | None = None,
    remat: bool = False,
) -> ModelOutput:
    """`forward_sequence`, each token steered by the target's states `features` of the token `lag` >= 1 before it.

    No gradient flows into the features. A token whose lag reaches before its document's start is steered by zeros.
    """
    at = jnp.arange(tokens.shape[1]) - jnp.broadcast_to(jnp.asarray(lag), tokens.shape)
    is_there = at >= (0 if starts is None else starts)
    before = take_nodes(jax.lax.stop_gradient(features), jnp.maximum(at, 0), axis=1)
    own = steer(weights, config, jnp.where(is_there[..., None], before, 0.0))
    return forward_sequence(weights, config, tokens, starts, up_bias=own, remat=remat)
