"""Copying: the last n tokens once more. No weights; good for loops alone."""

from __future__ import annotations

import typing
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.copy.config import CopyConfig
from hsd_jax.types import (
    DRAWN_SCHEMES,
    NO_PARENT,
    Drafter,
    DraftTree,
    DrawScheme,
    ModelOutput,
    RoundInputs,
    Verdict,
)


@typing.no_type_check  # tree.map puts shapes and shardings where the arrays stand
@flax.struct.dataclass
class CopyState:
    """The last n committed tokens of each row, the root the last of them."""

    last: Int[Array, "B n"]


def copy_drafter(
    target_config: ModelConfig,
    config: CopyConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
) -> Drafter:
    """A `Drafter` of chains.

    Raises:
      ValueError: if the tree is no chain, or is to be drawn: copied tokens follow no distribution.
    """
    if tree.width != 1 or scheme in DRAWN_SCHEMES:
        raise ValueError(f"copy drafts chains (width=1, here {tree.width}) and draws nothing (draw={scheme.value!r})")
    place = jnp.arange(config.length)

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        first = length[:, None] - config.length
        return CopyState(jnp.take_along_axis(tokens, jnp.maximum(first + place, 0), 1))

    def read(models, state: CopyState, *rest):
        return state

    def draft(models, state: CopyState, inputs: RoundInputs):
        copied = state.last[:, jnp.arange(tree.depth) % config.length]
        line = jnp.broadcast_to(jnp.arange(tree.nodes, dtype=jnp.int32), (len(inputs.root), tree.nodes))
        return DraftTree(
            tokens=jnp.concatenate([inputs.root[:, None], copied], 1).astype(jnp.int32),
            parents=jnp.where(line == 0, NO_PARENT, line - 1),
            depth=line,
            valid=jnp.ones(line.shape, bool),
            scheme=DrawScheme.ARBITRARY,
        ), state

    def commit(models, state: CopyState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        text = jnp.concatenate([state.last, verdict.emitted], 1)
        return CopyState(jnp.take_along_axis(text, num_committed[:, None] + place, 1))

    def resize(state: CopyState, capacity: int):
        return state

    return Drafter(init, read, draft, commit, resize, DrawScheme.ARBITRARY, tree.nodes, tree.depth, follow=commit)
