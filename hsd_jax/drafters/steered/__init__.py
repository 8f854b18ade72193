"""SD²: a small language model that drafts, steered by the target's states (arXiv:2511.09844)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.config import ModelConfig, TreeConfig, model_of
from hsd_jax.drafters import small_lm
from hsd_jax.drafters.method import Distilled, DraftingMethod, Planning
from hsd_jax.drafters.small_lm.tree import joined_features
from hsd_jax.drafters.steered.config import SteeredConfig, default_layers
from hsd_jax.drafters.steered.draft import steered_drafter
from hsd_jax.drafters.steered.files import load_steered, save_steering
from hsd_jax.drafters.steered.steering import STEERING, init_steering, steer
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.target import forward_sequence
from hsd_jax.types import Weights


def drafting_seconds(model: Any, config: SteeredConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of the small model, and of computing the steering bias once per round."""
    width = config.target_hidden_size
    numbers = width * (config.num_layers * config.intermediate_size + len(config.steering_layers) * width)
    once = float(model.product(numbers, rows))
    return once + small_lm.drafting_seconds(model, config, rows, tree)


def config_of(
    model: ModelConfig, target: ModelConfig, target_hash: str, layers: tuple[int, ...], num_steps: int
) -> SteeredConfig:
    """As `Distilled.config_of`. Without `layers` it takes the default ones."""
    layers = layers or default_layers(target.num_layers)
    if isinstance(model, SteeredConfig) and model.steering_layers != layers:
        raise ValueError(f"steering_layers={layers}: the model to start from is steered by {model.steering_layers}")
    about = {"target_hidden_size": target.hidden_size, "target_hash": target_hash}
    own = vars(model_of(model)) | {"stored_vocab_size": model.stored_vocab_size}
    config = SteeredConfig(**own, **about, steering_layers=layers, num_steps=num_steps)
    config.check_target(target)
    return config


def logits(
    weights: Weights,
    config: SteeredConfig,
    tokens: Int[Array, "B T"],
    features: tuple[Float[Array, "B T H"], ...],
    key: jax.Array | None = None,
    starts: Int[Array, "B T"] | None = None,
    remat: bool = False,
) -> Float[Array, "B T V"]:
    """As `Distilled.logits`. Each token is steered by the target's states of an earlier token. The distance is random,
    from 1 to `num_steps`, as in the drafts of a round. Without a key it is 1.

    No gradient flows into the features. A token whose distance reaches before its document's start is steered by zeros.
    """
    lag = jnp.ones_like(tokens) if key is None else jax.random.randint(key, tokens.shape, 1, config.num_steps + 1)
    at = jnp.arange(tokens.shape[1]) - lag
    is_there = at >= (0 if starts is None else starts)
    states = jax.lax.stop_gradient(joined_features(features))
    before = jnp.where(is_there[..., None], take_nodes(states, jnp.maximum(at, 0), axis=1), 0.0)
    steered = steer(weights, config, before)
    return forward_sequence(weights, config, tokens, starts, up_bias=steered, remat=remat).logits


STEERED = DraftingMethod(
    SteeredConfig,
    steered_drafter,
    Planning(
        drafting_seconds,
        lambda config: TreeConfig.chain(min(small_lm.DEFAULT_CHAIN.depth, config.num_steps)),
        lambda config: min(small_lm.SMALL_LM.planning.max_depth(config), config.num_steps),
        ends_early=True,
    ),
    load=load_steered,
    distilled=Distilled(
        config_of,
        logits,
        lambda key, config: {STEERING: init_steering(key, config)},
        lambda folder, config, weights: save_steering(folder, config, weights[STEERING]),
        is_steered=True,
    ),
)
