"""Describes the contents of a checkpoint or a drafter's folder. All weights are read and checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.steered import files as steered_files
from hsd_jax.drafters.steered.steering import STEERING, init_steering
from hsd_jax.lab.bench.machine import model_record
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import Checkpoint, Source, find
from hsd_jax.models.tensor_files import MODEL, is_stored, read
from hsd_jax.params import describe_arithmetic


def facts_of(source: Source) -> dict[str, Any]:
    """The facts of a model or a drafter, given in any form that `models/checkpoint.py` takes."""
    checkpoint = find(source)
    folder = checkpoint.path
    if is_stored(folder, drafter_files.DRAFTER):
        return _drafter(folder)
    if (stored := steered_files.read_stored(folder)) is not None:
        return _steered(checkpoint, stored)
    if folder.is_file() or is_stored(folder, MODEL):
        return _target(checkpoint)
    raise FileNotFoundError(f"{folder}: neither config.json (a target) nor drafter_config.json (a drafter)")


def _target(checkpoint: Checkpoint) -> dict[str, Any]:
    config, dtype, weights = checkpoint.config, checkpoint.dtype, checkpoint.weights()
    words = checkpoint.tokenizer
    return {
        "kind": "target",
        "dtype": dtype,
        "computed in": describe_arithmetic(dtype),
        "with int8": describe_arithmetic("int8"),
        **dataclasses.asdict(config),
        "parameters": f"{model_record(weights)['parameters']:,}",
        "eos": ", ".join(map(str, checkpoint.eos)) or "none",
        "tokenizer": "none: token ids only" if words is None else "yes",
        "chat template": "yes" if words is not None and words.has_chat_template else "none",
        "hash": convert.weights_hash(weights),
    }


def _steered(checkpoint: Checkpoint, stored: steered_files.SteeringFields) -> dict[str, Any]:
    """The facts of a language model and its steering."""
    config = steered_files.SteeredConfig(**vars(checkpoint.config), **vars(stored))
    weights = read(checkpoint.path, STEERING, init_steering, config)
    return (
        _target(checkpoint)
        | dataclasses.asdict(stored)
        | {
            "kind": "steered drafter",
            "parameters of the steering": f"{model_record(weights)['parameters']:,}",
        }
    )


def _drafter(folder: Path) -> dict[str, Any]:
    config, weights = drafter_files.read_drafter(folder)
    return dataclasses.asdict(config) | {
        "kind": f"{config.kind} drafter",
        "vocabulary_hash": config.vocabulary_hash or "not said",
        "parameters": f"{model_record(weights)['parameters']:,}",
    }
