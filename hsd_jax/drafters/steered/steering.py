"""Steering a small model, as functions of its weights and configuration. The Flax module is in `models/steering.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hsd_jax.drafters.steered.config import SteeredConfig
from hsd_jax.models.steering import Steer, Steering
from hsd_jax.types import Weights

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
