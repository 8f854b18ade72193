"""What is in a checkpoint or drafter folder. All weights are read and checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hsd_jax.bench.quality import model_record
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.steered import files as steered_files
from hsd_jax.models import convert
from hsd_jax.params import describe_arithmetic
from hsd_jax.tokenizer import Tokenizer


def facts_of(folder: Path) -> dict[str, Any]:
    """The facts of one folder by name.

    Raises:
      FileNotFoundError, ValueError: naming what is missing or wrong.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if (folder / drafter_files.DRAFTER_CONFIG).is_file():
        return _drafter(folder)
    if (stored := steered_files.read_stored(folder)) is not None:
        return _steered(folder, stored)
    if (folder / "config.json").is_file():
        return _target(folder)
    raise FileNotFoundError(f"{folder}: neither config.json (a target) nor {drafter_files.DRAFTER_CONFIG} (a drafter)")


def _target(folder: Path) -> dict[str, Any]:
    config = convert.read_config(folder)
    dtype = convert.weights_dtype(folder)
    weights = convert.read_weights(folder, config, dtype)
    tokenizer = Tokenizer.find(folder)
    return {
        "kind": "target",
        "dtype": dtype,
        "computed in": describe_arithmetic(dtype),
        "with int8": describe_arithmetic("int8"),
        **dataclasses.asdict(config),
        "parameters": f"{model_record(weights)['parameters']:,}",
        "eos": ", ".join(map(str, convert.read_eos(folder))) or "none",
        "tokenizer": "none: token ids only" if tokenizer is None else "yes",
        "hash": convert.weights_hash(weights),
    }


def _steered(folder: Path, stored: steered_files.Stored) -> dict[str, Any]:
    """A language model and what steers it."""
    config = steered_files.SteeredConfig(**vars(convert.read_config(folder)), **vars(stored))
    weights = steered_files.read_steering(folder, config)
    return (
        _target(folder)
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
        "parameters": f"{model_record(weights)['parameters']:,}",
    }
