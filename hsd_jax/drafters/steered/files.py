"""Saves and loads a steered model: a Hugging Face folder of the model, with two more files for its steering."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax import settings
from hsd_jax.config import ChainLength
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.small_lm import drafting_model
from hsd_jax.drafters.steered.config import Layer, SteeredConfig
from hsd_jax.drafters.steered.steering import STEERING, init_steering
from hsd_jax.host.files import read_object, write_json
from hsd_jax.models.checkpoint import Checkpoint
from hsd_jax.models.convert import shapes_of
from hsd_jax.models.placement import HERE, Placement
from hsd_jax.models.tensor_files import load_tree, open_all, store_tree
from hsd_jax.settings import Count
from hsd_jax.types import Weights

STEERING_CONFIG, STEERING_FILE = "steering_config.json", "steering.safetensors"


@settings.dataclass
class SteeringFields:
    """The content of STEERING_CONFIG: the fields of a `SteeredConfig` that are not the model's."""

    target_hidden_size: Count
    steering_layers: tuple[Layer, ...]
    num_steps: ChainLength
    target_hash: str


def save_steering(folder: str | Path, config: SteeredConfig, weights: Weights) -> None:
    """Writes the two files into the folder of the model, which `convert.save_target` writes."""
    folder, dtype = Path(folder), np.dtype(np.float32)
    store_tree(folder / STEERING_FILE, weights, shapes_of(init_steering, config), dtype, lambda path: path)
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(SteeringFields)}
    write_json(folder / STEERING_CONFIG, own)


def read_stored(folder: Path) -> SteeringFields | None:
    """The steering configuration in a folder; None if the model there is not steered."""
    if not any((folder / name).is_file() for name in (STEERING_CONFIG, STEERING_FILE)):
        return None
    return settings.read(SteeringFields, read_object(folder / STEERING_CONFIG), str(folder / STEERING_CONFIG))


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
    return config, {**weights, STEERING: read_steering(checkpoint.path, config, dtype, placement)}


def read_steering(folder: Path, config: SteeredConfig, dtype: Any = "float32", placement: Placement = HERE) -> Weights:
    """Reads the weights that `save_steering` wrote."""
    shapes, file = shapes_of(init_steering, config), folder / STEERING_FILE
    stored = {tensor.name: tensor for tensor in open_all([file])}
    names, dtype = {name: name for name in shapes}, np.dtype(dtype)
    return load_tree(stored, names, shapes, dtype, file, STEERING_CONFIG, (), placement)
