"""Saves trained drafters to folders and loads them. Every file is checked against its configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from hsd_jax import settings
from hsd_jax.config import DrafterConfig
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.table import DRAFTING_METHODS, init_drafter
from hsd_jax.host import sharding
from hsd_jax.host.files import read_object, write_json
from hsd_jax.models.convert import check_num_layers, shapes_of
from hsd_jax.models.draft_vocab import checked_ids, restrict
from hsd_jax.models.placement import HERE, Placement
from hsd_jax.models.tensor_files import checked_dtype, load_tree, open_all, store_tree
from hsd_jax.settings import OneOf
from hsd_jax.types import Weights

DRAFTER_CONFIG, DRAFTER_FILE = "drafter_config.json", "drafter.safetensors"
_DRAFT_TO_TARGET = "draft_to_target"


def save_drafter(folder: str | Path, config: DrafterConfig, weights: Weights, dtype: Any = "float32") -> None:
    """Writes both files. The rows of the target's head that a reduced draft vocabulary needs are left out."""
    dtype, folder = checked_dtype(dtype), Path(folder)
    if config.reduced_vocab_size is not None:
        weights = {name: part for name, part in weights.items() if name != "head"}
        if _DRAFT_TO_TARGET in weights:
            checked_ids(weights[_DRAFT_TO_TARGET], config.vocab_size, f"weights to save: {_DRAFT_TO_TARGET!r}")
    store_tree(folder / DRAFTER_FILE, weights, _shapes(config), dtype, lambda path: path, ids=(_DRAFT_TO_TARGET,))
    write_json(folder / DRAFTER_CONFIG, {"kind": config.kind, **dataclasses.asdict(config)})


def read_drafter_config(folder: str | Path) -> DrafterConfig:
    """The configuration that `save_drafter` wrote; raises as `read_drafter`."""
    path = Path(folder) / DRAFTER_CONFIG
    values = read_object(path)
    kind = values.pop("kind", None)
    trained = {name: method.config for name, method in DRAFTING_METHODS.items() if method.training is not None}
    settings.take(Annotated[str, OneOf(tuple(trained))], kind, f"{path}: kind")
    return settings.read(trained[kind], values, str(path))


def read_drafter(
    folder: str | Path, dtype: Any = "float32", placement: Placement = HERE, vocab_size: int | None = None
) -> tuple[DrafterConfig, Weights]:
    """Reads what `save_drafter` wrote. With a reduced draft vocabulary `draft_vocab.attach` adds rows of the head.

    Args:
      vocab_size: the size of the vocabulary that the drafter gets. It differs from that of its file for a small model
        that itself drafts for a target of another size. Tokens beyond it are left out. None: that of the file.
    """
    dtype, folder, config = checked_dtype(dtype), Path(folder), read_drafter_config(folder)
    file = folder / DRAFTER_FILE
    stored = {tensor.name: tensor for tensor in open_all([file])}
    check_num_layers(getattr(config, "num_layers", 1), stored, file, DRAFTER_CONFIG)
    shapes = _shapes(config)
    names = {path: path for path in shapes}
    heads = sharding.heads_of(config)
    held, hot = config, config.reduced_vocab_size
    if vocab_size is not None:
        reduced = hot and min(hot, vocab_size)
        held = dataclasses.replace(config, vocab_size=vocab_size, reduced_vocab_size=reduced)
    rest = (_DRAFT_TO_TARGET,), placement, heads, _shapes(held)
    weights = load_tree(stored, names, shapes, dtype, file, DRAFTER_CONFIG, *rest)
    if hot is not None:
        ids = checked_ids(weights[_DRAFT_TO_TARGET], config.vocab_size, f"{file}: tensor {_DRAFT_TO_TARGET!r}")
        if ids[-1] >= held.vocab_size:
            return restrict(held, weights, ids[ids < held.vocab_size])
    return held, weights


def check_drafter(config: DrafterConfig, target: DraftedFor, strict: bool = True) -> None:
    """Checks that a drafter can draft for a target: its sizes, then `DraftedFor.check_weights`."""
    trained_for = (
        f"the drafter was trained for target {config.target_hash[:12] or '(no fingerprint)'} with hidden_size="
        f"{config.hidden_size}, vocab_size={config.vocab_size}"
    )
    for name, found in (("hidden_size", target.config.hidden_size), ("vocab_size", target.vocab_size)):
        if getattr(config, name) != found:
            raise ValueError(f"{trained_for}; this target has {name}={found}")
    target.check_weights(trained_for, config.target_hash, config.vocabulary_hash, strict)


def _shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors in a drafter's file: the learned weights, and the `draft_to_target` ids if there are any."""
    shapes = shapes_of(init_drafter, config)
    return shapes if config.reduced_vocab_size is None else {**shapes, _DRAFT_TO_TARGET: (config.reduced_vocab_size,)}
