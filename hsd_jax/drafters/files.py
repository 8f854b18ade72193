"""Stores trained drafters in folders; reads drafters and scorers. Every file is checked against its configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from hsd_jax import validation
from hsd_jax.config import DrafterConfig
from hsd_jax.drafters import small_lm
from hsd_jax.drafters.hidden.weights import HiddenConfig
from hsd_jax.drafters.method import DraftedFor
from hsd_jax.drafters.published import is_published
from hsd_jax.drafters.rescored.ngram import NGRAM, read_ngram
from hsd_jax.drafters.steered import STEERING
from hsd_jax.drafters.table import DRAFTING_METHODS, init_drafter
from hsd_jax.host.files import read_object
from hsd_jax.models.checkpoint import Source, find
from hsd_jax.models.draft_vocab import checked_ids, restrict
from hsd_jax.models.placement import HERE, Placement
from hsd_jax.models.tensor_files import config_file, is_stored, read, store, weights_file
from hsd_jax.types import Weights
from hsd_jax.validation import OneOf

DRAFTER = "drafter"
"""The name of the files of a drafter (`tensor_files.store`)."""
_DRAFT_TO_TARGET = "draft_to_target"
ZERO_GRAM = "0-gram"
"""The name of the scorer that adds nothing: the trees have the likeliest paths of the heads alone."""


def save_drafter(folder: str | Path, config: DrafterConfig, weights: Weights, dtype: Any = "float32") -> None:
    """Writes both files. The rows of the target's head that a reduced draft vocabulary needs are left out."""
    if config.reduced_vocab_size is not None:
        weights = {name: part for name, part in weights.items() if name != "head"}
    values = {"kind": config.kind, **dataclasses.asdict(config)}
    store(folder, DRAFTER, values, weights, _stored, config, dtype)


def read_drafter_config(folder: str | Path) -> DrafterConfig:
    """The configuration that `save_drafter` wrote; raises as `read_drafter`."""
    path = config_file(folder, DRAFTER)
    if not path.exists() and is_published(Path(folder)):
        raise ValueError(f"{folder}: a drafter that others trained, which only load() and hsd compile take")
    values = read_object(path)
    kind = values.pop("kind", None)
    trained = {name: method.config for name, method in DRAFTING_METHODS.items() if method.training is not None}
    validation.take(Annotated[str, OneOf(tuple(trained))], kind, f"{path}: kind")
    return validation.read(trained[kind], values, str(path))


def read_drafter(
    folder: str | Path,
    dtype: Any = "float32",
    placement: Placement = HERE,
    target: DraftedFor | None = None,
    strict: bool = True,
) -> tuple[DrafterConfig, Weights]:
    """Reads what `save_drafter` wrote. With a reduced draft vocabulary `draft_vocab.attach` adds rows of the head.

    Args:
      target: the model for which it drafts; `check_drafter` checks it before weights are read. The drafter gets its
        size of the vocabulary: that of a small model that itself drafts may differ from that of the files. Tokens
        beyond it are left out. None: nothing is checked, and the size is that of the drafter's file.
      strict: as in `check_drafter`.
    """
    config = held = read_drafter_config(folder)
    hot = config.reduced_vocab_size
    if target is not None:
        check_drafter(config, target, strict)
        size = target.config.vocab_size
        held = dataclasses.replace(config, vocab_size=size, reduced_vocab_size=hot and min(hot, size))
    weights = read(folder, DRAFTER, _stored, config, dtype, placement, held)
    if hot is not None:
        where = f"{weights_file(folder, DRAFTER)}: tensor {_DRAFT_TO_TARGET!r}"
        ids = checked_ids(weights[_DRAFT_TO_TARGET], config.vocab_size, where)
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


def _stored(key: jax.Array, config: DrafterConfig) -> Weights:
    """What is in a drafter's file: the learned weights, and the `draft_to_target` ids if there are any."""
    weights, hot = init_drafter(key, config), config.reduced_vocab_size
    return weights if hot is None else {**weights, _DRAFT_TO_TARGET: jnp.zeros(hot, jnp.int32)}


def read_scorer(
    scorer: Source, target: DraftedFor, dtype: Any = "float32", placement: Placement = HERE
) -> tuple[Any, Weights]:
    """The configuration and the weights of a scorer, named as in `pair.rescore`."""
    if scorer == ZERO_GRAM:
        return None, {}
    checkpoint = find(scorer)
    folder = checkpoint.path
    if is_stored(folder, NGRAM):
        config, weights = read_ngram(folder, placement)
        vocabulary = target.vocabulary_hash or config.vocabulary
        if (config.vocab_size, config.vocabulary) != (target.config.vocab_size, vocabulary):
            raise ValueError(
                f"{folder}: n-grams of the vocabulary {config.vocabulary[:12]} ({config.vocab_size:,} tokens), but this"
                f" target has {vocabulary[:12]} ({target.config.vocab_size:,} tokens)"
            )
        return config, weights
    if is_stored(folder, DRAFTER):
        config, weights = read_drafter(folder, dtype, placement, target)
        if not isinstance(config, HiddenConfig) or config.rank == 0:
            raise ValueError(f"{folder}: this drafter has no token information, so it cannot score")
        return config, {name: weights[name] for name in ("injector", "draft_to_target") if name in weights}
    if is_stored(folder, STEERING):
        raise ValueError(f"{folder}: a small model that is steered by its target cannot score")
    return small_lm.load(checkpoint, target, dtype, placement)
