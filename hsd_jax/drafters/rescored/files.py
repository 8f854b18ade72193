"""Loads a transition scorer. The files in its folder decide its kind."""

from __future__ import annotations

from typing import Any

from hsd_jax.drafters import small_lm
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.files import DRAFTER, read_drafter
from hsd_jax.drafters.hidden.config import HiddenConfig
from hsd_jax.drafters.rescored.config import ZERO_GRAM
from hsd_jax.drafters.rescored.ngram import NGRAM, read_ngram
from hsd_jax.drafters.steered.steering import STEERING
from hsd_jax.models.checkpoint import Source, find
from hsd_jax.models.placement import HERE, Placement
from hsd_jax.models.tensor_files import is_stored
from hsd_jax.types import Weights


def read_scorer(
    scorer: Source, target: DraftedFor, dtype: Any = "float32", placement: Placement = HERE
) -> tuple[Any, Weights]:
    """The configuration and the weights of a scorer, named as in `params.rescore`."""
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
