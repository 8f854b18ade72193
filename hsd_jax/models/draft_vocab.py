"""The reduced draft vocabulary: the tokens a drafter may draft, and the way between them and the columns of its logits.

Only the last product of the drafter is restricted, to C hot tokens out of V: its rows of the target's LM head and
`injector/bias`. Previous tokens, features and trees stay those of the whole vocabulary. A cold token is never drafted;
where the target says one, the draft is rejected and the round emits it all the same, so no text changes.
Which tokens are hot is chosen in `train/frequent_tokens.py`.
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

TokensOfColumns = Int[Array, "C"] | Int[Array, "B w C"] | None
"""The token of each column: of all nodes, of each node (`types.Candidates`), or None where columns are tokens."""


def to_tokens(draft_to_target: TokensOfColumns, columns: Int[Array, "..."]) -> Int[Array, "..."]:
    """The token of each column; without a reduced draft vocabulary columns are tokens.

    Args:
      columns: [B, w, k] where each node has tokens of its own.
    """
    if draft_to_target is None:
        return columns
    if draft_to_target.ndim == 1:
        return draft_to_target[columns]
    return jnp.take_along_axis(draft_to_target, columns, -1)


def draft_columns(draft_to_target: TokensOfColumns, values: Float[Array, "... V"]) -> Float[Array, "... C"]:
    """Of values over the whole vocabulary those of the hot tokens; all without a reduced draft vocabulary.

    Args:
      values: [B, w, V], or [B, 1, V] for all nodes, where each has tokens of its own.
    """
    if draft_to_target is None:
        return values
    if draft_to_target.ndim == 1:
        return values[..., draft_to_target]
    return jnp.take_along_axis(values, draft_to_target, -1)


def to_columns(
    draft_to_target: Int[Array, "C"] | None, tokens: Int[Array, "..."]
) -> tuple[Int[Array, "..."], Bool[Array, "..."]]:
    """The column of each token, and whether it has one: the column of a cold token is some other's."""
    if draft_to_target is None:
        return tokens, jnp.ones(tokens.shape, bool)
    columns = jnp.minimum(jnp.searchsorted(draft_to_target, tokens), draft_to_target.shape[0] - 1).astype(jnp.int32)
    return columns, draft_to_target[columns] == tokens


def to_vocabulary(
    draft_to_target: TokensOfColumns, logits: Float[Array, "... C"], vocab_size: int
) -> Float[Array, "... V"]:
    """Logits over the whole vocabulary, -inf for cold tokens; as they are without a reduced draft vocabulary."""
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
    """The drafter's weights with `draft_to_target` and, as `head` [C, H], the target's LM-head rows of these
    tokens.

    A copy, made once when the models are loaded: gathering the rows in every round would cost what it saves. Without a
    reduced draft vocabulary the weights themselves.
    """
    if draft_to_target is None:
        return weights
    return {
        **weights,
        "draft_to_target": draft_to_target,
        "head": head_rows(target_weights, target_config)[draft_to_target],
    }


def take_columns(weights: Weights, columns: Int[Array, "S"]) -> Weights:
    """The weights with some columns only of what is learned for each column."""
    if "injector" not in weights:
        return weights
    return {**weights, "injector": {**weights["injector"], "bias": weights["injector"]["bias"][columns]}}


def checked_ids(
    draft_to_target: Sequence[int] | np.ndarray | Array, vocab_size: int, where: str = "draft_to_target"
) -> np.ndarray:
    """The ids as int32 [C].

    Raises:
      ValueError: with `where` in the message, if they are not integers of the vocabulary in ascending order.
    """
    ids = np.asarray(draft_to_target)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{where} has shape {list(ids.shape)} and dtype {ids.dtype}: expected a row of token ids")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"{where} holds token {wrong}: allowed are 0 to {vocab_size - 1}")
    falls = np.flatnonzero(np.diff(ids) <= 0)
    if falls.size:
        one, other = ids[falls[0]], ids[falls[0] + 1]
        raise ValueError(f"{where} holds {other} after {one}: expected ascending ids, each once")
    return ids.astype(np.int32)


def restrict(
    config: DrafterConfig, weights: Weights, draft_to_target: Sequence[int] | np.ndarray | Array
) -> tuple[DrafterConfig, Weights]:
    """A trained drafter cut down to a reduced draft vocabulary, as it would be stored: without rows of the head
    (`attach`).

    Its distribution is the old one renormalised over the hot tokens; nothing is trained again.

    Raises:
      ValueError: for ids that `checked_ids` refuses, or a token that is cold already.
    """
    ids = checked_ids(draft_to_target, config.vocab_size)
    old_ids = weights.get("draft_to_target")
    columns, is_hot = to_columns(old_ids, jnp.asarray(ids))
    if not bool(is_hot.all()):
        cold = ids[~np.asarray(is_hot)][0]
        raise ValueError(
            f"draft_to_target holds token {cold}, which is none of the drafter's {config.reduced_vocab_size} hot tokens"
        )
    kept = take_columns({name: part for name, part in weights.items() if name != "head"}, columns)
    return dataclasses.replace(config, reduced_vocab_size=len(ids)), {**kept, "draft_to_target": jnp.asarray(ids)}
