"""Saves and loads a steered model: a Hugging Face folder of the model, with two more files for its steering."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hsd_jax import validation
from hsd_jax.config import ChainLength
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.small_lm import drafting_model
from hsd_jax.drafters.steered.config import Layer, SteeredConfig
from hsd_jax.drafters.steered.steering import STEERING, init_steering
from hsd_jax.host.files import read_object
from hsd_jax.models.checkpoint import Checkpoint
from hsd_jax.models.placement import Placement
from hsd_jax.models.tensor_files import config_file, is_stored, read, store
from hsd_jax.types import Weights
from hsd_jax.validation import Count


@validation.dataclass
class SteeringFields:
    """The content of `steering_config.json`: the fields of a `SteeredConfig` that are not the model's."""

    target_hidden_size: Count
    steering_layers: tuple[Layer, ...]
    num_steps: ChainLength
    target_hash: str


def save_steering(folder: str | Path, config: SteeredConfig, weights: Weights) -> None:
    """Writes the two files into the folder of the model, which `convert.save_target` writes."""
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(SteeringFields)}
    store(folder, STEERING, own, weights, init_steering, config)


def read_stored(folder: Path) -> SteeringFields | None:
    """The steering configuration in a folder; None if the model there is not steered."""
    if not is_stored(folder, STEERING):
        return None
    path = config_file(folder, STEERING)
    return validation.read(SteeringFields, read_object(path), str(path))


def load_steered(
    checkpoint: Checkpoint, target: DraftedFor, dtype: Any, placement: Placement, strict: bool = False
) -> tuple[SteeredConfig, Weights] | None:
    """Loads a steered model that the trainer wrote. Returns None for a model that is not steered."""
    own = read_stored(checkpoint.path)
    if own is None:
        return None
    config = SteeredConfig(**vars(drafting_model(checkpoint, target)), **vars(own))
    config.check_target(target.config)
    trained_for = f"{checkpoint}: trained for target {own.target_hash[:12]}"
    # The target's own vocabulary hash, because `drafting_model` compares the vocabularies.
    target.check_weights(trained_for, own.target_hash, target.vocabulary_hash, strict)
    weights = checkpoint.weights(dtype, placement, config.vocab_size)
    return config, {**weights, STEERING: read(checkpoint.path, STEERING, init_steering, config, dtype, placement)}
