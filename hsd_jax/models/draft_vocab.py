"""The reduced draft vocabulary: the tokens that may be drafted, and the mapping between them and the columns of logits.

It restricts only the last product of the drafter, to C hot tokens out of V: the rows of the target's LM head and
`injector/bias`. Previous tokens, features and trees use the full vocabulary. A cold token is never drafted. If the
target draws one, the draft is rejected and the round emits the target's token, so the text does not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import DrafterConfig, ModelConfig
from hsd_jax.models.target import head_rows
from hsd_jax.types import Weights
from hsd_jax.validation import shown

TokensOfColumns = Int[Array, "C"] | Int[Array, "B w C"] | None
"""The token of each column: one list for all nodes, or one list per node (`types.Candidates`). None: column c is
token c."""


def to_tokens(draft_to_target: TokensOfColumns, columns: Int[Array, "..."]) -> Int[Array, "..."]:
    """The token of each column. Each node may have its own tokens, for columns [B, w, k]."""
    if draft_to_target is None:
        return columns
    if draft_to_target.ndim == 1:
        return draft_to_target[columns]
    return jnp.take_along_axis(draft_to_target, columns, -1)


def draft_columns(draft_to_target: TokensOfColumns, values: Float[Array, "... V"]) -> Float[Array, "... C"]:
    """The values of the hot tokens. If each node has its own: from [B, w, V], or from [B, 1, V] for all nodes."""
    if draft_to_target is None:
        return values
    if draft_to_target.ndim == 1:
        return values[..., draft_to_target]
    return jnp.take_along_axis(values, draft_to_target, -1)


def to_columns(
    draft_to_target: Int[Array, "C"] | None, tokens: Int[Array, "..."]
) -> tuple[Int[Array, "..."], Bool[Array, "..."]]:
    """The column of each token, and whether the token has one. The column of a cold token belongs to another token."""
    if draft_to_target is None:
        return tokens, jnp.ones(tokens.shape, bool)
    columns = jnp.minimum(jnp.searchsorted(draft_to_target, tokens), draft_to_target.shape[0] - 1).astype(jnp.int32)
    return columns, draft_to_target[columns] == tokens


def to_vocabulary(
    draft_to_target: TokensOfColumns, logits: Float[Array, "... C"], vocab_size: int
) -> Float[Array, "... V"]:
    """Logits over the full vocabulary, with -inf for cold tokens."""
    if draft_to_target is None:
        return logits
    whole = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    if draft_to_target.ndim == 1:
        return whole.at[..., draft_to_target].set(logits)
    row, node = jnp.ogrid[: logits.shape[0], : logits.shape[1]]
    return whole.at[row[..., None], node[..., None], draft_to_target].set(logits, unique_indices=True)


def attach(
    weights: Weights, draft_to_target: Int[Array, "C"] | None, target_weights: Weights, target_config: ModelConfig
) -> Weights:
    """Adds `draft_to_target` and the target's LM-head rows of these tokens, `head` [C, H], to the drafter's weights.

    The rows are copied once, when the models are loaded. To gather them in every round would cost as much time as the
    reduced vocabulary saves. Without a reduced draft vocabulary it returns `weights`.
    """
    if draft_to_target is None:
        return weights
    head = head_rows(target_weights, target_config)[draft_to_target]
    return {**weights, "draft_to_target": draft_to_target, "head": head}


def take_columns(weights: Weights, columns: Int[Array, "S"]) -> Weights:
    """The weights, with only the given columns of the parameters that are learned per column."""
    if "injector" not in weights:
        return weights
    return {**weights, "injector": {**weights["injector"], "bias": weights["injector"]["bias"][columns]}}


def checked_ids(
    draft_to_target: Sequence[int] | np.ndarray | Array, vocab_size: int, where: str = "draft_to_target"
) -> np.ndarray:
    """The ids as int32 [C]."""
    ids = np.asarray(draft_to_target)
    is_list = ids.ndim == 1 and ids.size and np.issubdtype(ids.dtype, np.integer)
    if not is_list or ids.min() < 0 or ids.max() >= vocab_size or not (ids[1:] > ids[:-1]).all():
        raise ValueError(f"{where}={shown(ids.tolist())}: expected ascending token ids, each once, below {vocab_size}")
    return ids.astype(np.int32)


def restrict(
    config: DrafterConfig, weights: Weights, draft_to_target: Sequence[int] | np.ndarray | Array
) -> tuple[DrafterConfig, Weights]:
    """Restricts a trained drafter to a reduced draft vocabulary. The result lacks the rows of the head (`attach`).

    Its distribution is the old one, renormalised over the hot tokens. Nothing is trained again.
    """
    ids = checked_ids(draft_to_target, config.vocab_size)
    old_ids = weights.get("draft_to_target")
    columns, is_hot = to_columns(old_ids, jnp.asarray(ids))
    if not bool(is_hot.all()):
        cold = ids[~np.asarray(is_hot)][0]
        raise ValueError(f"draft_to_target holds token {cold}, which the drafter of {config.kind!r} cannot draft")
    kept = take_columns({name: part for name, part in weights.items() if name != "head"}, columns)
    return dataclasses.replace(config, reduced_vocab_size=len(ids)), {**kept, "draft_to_target": jnp.asarray(ids)}
