"""Checks and functions that several drafters share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.infer.rules.accept import verdict_of
from hsd_jax.models.cache import take_nodes
from hsd_jax.types import DRAWN_SCHEMES, Drafter, DrawScheme, ModelOutput


def check_tree(target_config: ModelConfig, config: DrafterConfig, tree: TreeConfig, scheme: DrawScheme) -> None:
    """Raises a ValueError if a trained drafter cannot draft such trees, or cannot draft for this target."""
    config.check_feature_layers(target_config.num_layers)
    check_depth(tree, config.num_steps)
    whole = "vocabulary" if config.reduced_vocab_size is None else "reduced draft vocabulary"
    check_children(tree, config.draft_vocab_size, whole)
    if scheme in DRAWN_SCHEMES:
        tree.level_widths()  # raises here, before anything compiles


def check_depth(tree: TreeConfig, num_steps: int) -> None:
    """Raises a ValueError for a tree that is deeper than the drafter was trained for."""
    if tree.depth > num_steps:
        raise ValueError(f"TreeConfig.depth={tree.depth}: this drafter was trained for 1 to {num_steps} steps")


def check_children(tree: TreeConfig, draft_vocab_size: int, whole: str = "vocabulary") -> None:
    """Raises a ValueError if a node would have more children than there are tokens to draft."""
    if tree.width > draft_vocab_size:
        asked = f"width={tree.width}" if tree.branching is None else f"branching={tree.branching}"
        raise ValueError(f"TreeConfig.{asked}: allowed are 1 to {draft_vocab_size}, the size of the {whole}")


def check_chain(tree: TreeConfig, who: str) -> None:
    """Raises a ValueError for a tree that is no chain."""
    if tree.width != 1:
        raise ValueError(f"TreeConfig.width={tree.width}: {who} chains, allowed is 1")


def check_vocabulary(config: ModelConfig, target_config: ModelConfig, what: str) -> None:
    """Raises a ValueError if a model that drafts has another vocabulary size than the target."""
    if config.vocab_size != target_config.vocab_size:
        raise ValueError(f"{what} has vocab_size={config.vocab_size}, the target {target_config.vocab_size}")


def follow_path(
    drafter: Drafter,
    models: Any,
    state: Any,
    emitted: Int[Array, "B M"],
    hidden: Float[Array, "B M2 H"],
    features: tuple[Float[Array, "B M2 H"], ...],
    num_committed: Int[Array, "B"],
) -> Any:
    """The drafter's state after `num_committed` tokens that it did not draft, the first ones of `emitted`.

    `hidden` and `features` are the target's output at the token before each of them.
    """
    num = drafter.max_depth + 1
    path = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), (emitted.shape[0], num))

    def follow_on(index: Array, state: Any) -> Any:
        first = index * num
        here = jnp.clip(num_committed - first, 0, num)
        text, hidden_here, *features_here = (take_nodes(x, first + path, axis=1) for x in (emitted, hidden, *features))
        verdict = verdict_of(text, here)
        output = ModelOutput(None, hidden_here, tuple(features_here), None)  # type: ignore[arg-type]  # both are unused
        assert drafter.follow is not None, "drafters without it were refused"
        return drafter.follow(models, state, verdict, output, here)

    return lax.fori_loop(0, -(-jnp.max(num_committed) // num), follow_on, state)
