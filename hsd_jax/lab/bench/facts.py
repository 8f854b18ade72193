"""Facts for records and for `hsd info`: of this machine, and of the model or drafter in a folder."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from pathlib import Path
from typing import Any

import jax

from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters import steered
from hsd_jax.drafters.published import is_published, open_published
from hsd_jax.drafters.steered import STEERING, init_steering
from hsd_jax.kernels import native
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import GENERATION, Checkpoint, Source, find
from hsd_jax.models.tensor_files import MODEL, is_stored, read
from hsd_jax.pair import check_drafts, describe_arithmetic
from hsd_jax.planning.device import cpu_model, num_cores


def hardware() -> dict[str, Any]:
    """The processor, devices, load and versions of this machine."""
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "backend": jax.default_backend(),
        "native_kernel": native.available(),
        "load_average": os.getloadavg()[0],
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def model_record(weights) -> dict[str, int]:
    """The size of a model's weights in memory."""
    leaves = jax.tree.leaves(weights)
    return {"parameters": sum(x.size for x in leaves), "bytes": sum(x.nbytes for x in leaves)}


def facts_of(source: Source) -> dict[str, Any]:
    """The facts of a model or a drafter, given in any form that `models/checkpoint.py` takes.

    All weights are read and checked, except those of a drafter that others trained, for which a target is needed.
    """
    checkpoint = find(source, check=check_drafts)
    folder = checkpoint.path
    if folder.is_dir() and is_published(folder):
        return _published(folder)
    if is_stored(folder, drafter_files.DRAFTER):
        return _drafter(folder)
    if (stored := steered.read_stored(folder)) is not None:
        config = steered.SteeredConfig(**vars(checkpoint.config), **vars(stored))
        size = _parameters(read(checkpoint.path, STEERING, init_steering, config))
        own = {"kind": "steered drafter", "parameters of the steering": size}
        return _target(checkpoint) | dataclasses.asdict(stored) | own
    if folder.is_file() or is_stored(folder, MODEL):
        return _target(checkpoint)
    raise FileNotFoundError(f"{folder}: neither config.json (a target) nor drafter_config.json (a drafter)")


def _parameters(weights) -> str:
    return f"{model_record(weights)['parameters']:,}"


def _target(checkpoint: Checkpoint) -> dict[str, Any]:
    dtype, weights, words = checkpoint.dtype, checkpoint.weights(), checkpoint.tokenizer
    return {
        "kind": "target",
        "dtype": dtype,
        "computed in": describe_arithmetic(dtype),
        "with int8": describe_arithmetic("int8"),
        **dataclasses.asdict(checkpoint.config),
        "parameters": _parameters(weights),
        "eos": ", ".join(map(str, checkpoint.eos)) or "none",
        "tokenizer": "none: token ids only" if words is None else "yes",
        "chat template": "yes" if words is not None and words.has_chat_template else "none",
        "sampling defaults": _sampling_defaults(checkpoint),
        "hash": convert.weights_hash(weights),
    }


def _sampling_defaults(checkpoint: Checkpoint) -> str:
    found = ", ".join(f"{name} {value}" for name, value in checkpoint.sampling_defaults)
    return f"{found} (of {GENERATION}; see --defaults)" if found else "none"


def _published(folder: Path) -> dict[str, Any]:
    """What the files say. The configuration stands below, with the names that it has there."""
    found = open_published(folder, None)
    floats = [tensor for tensor in found.tensors.values() if tensor.dtype in tensor.readable]
    layers = "not said"
    if found.feature_layers is not None:
        doubt = "" if found.is_documented else "; or each of them plus 1, which the files leave open"
        layers = f"{list(found.feature_layers)}{doubt}"
    said = {**found.switches, **found.layers}
    verifier: Any = found.switches
    for key in ("speculators_config", "verifier", "name_or_path"):
        verifier = verifier.get(key) if isinstance(verifier, dict) else None
    return {
        "kind": f"{found.kind} drafter that others trained",
        "layout": found.format,
        "drafts for": verifier or "not said",
        "feature layers": layers,
        "draft vocabulary": found.reduced_vocab_size or "all tokens",
        "stored in": ", ".join(sorted({tensor.dtype for tensor in floats})),
        "parameters": f"{sum(math.prod(tensor.shape) for tensor in floats):,}",
        **{key: said[key] for key in sorted(said) if isinstance(said[key], str | int | float)},
    }


def _drafter(folder: Path) -> dict[str, Any]:
    config, weights = drafter_files.read_drafter(folder)
    return dataclasses.asdict(config) | {
        "kind": f"{config.kind} drafter",
        "vocabulary_hash": config.vocabulary_hash or "not said",
        "parameters": _parameters(weights),
    }
