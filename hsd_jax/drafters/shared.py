"""Checks that several drafters share."""

from __future__ import annotations

from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.types import DRAWN_SCHEMES, DrawScheme


def check_tree(target_config: ModelConfig, config: DrafterConfig, tree: TreeConfig, scheme: DrawScheme) -> None:
    """Raises a ValueError if a trained drafter cannot draft such trees, or cannot draft for this target."""
    config.check_feature_layers(target_config.num_layers)
    check_depth(tree, config.num_steps)
    whole = "vocabulary" if config.reduced_vocab_size is None else "reduced draft vocabulary"
    check_shape(tree, scheme, config.draft_vocab_size, whole)


def check_depth(tree: TreeConfig, num_steps: int) -> None:
    """Raises a ValueError for a tree that is deeper than the drafter was trained for."""
    if tree.depth > num_steps:
        raise ValueError(f"TreeConfig.depth={tree.depth}: this drafter was trained for 1 to {num_steps} steps")


def check_shape(tree: TreeConfig, scheme: DrawScheme, draft_vocab_size: int, whole: str = "vocabulary") -> None:
    """Raises a ValueError for a tree without a layout, or with more children of a node than tokens to draft."""
    if scheme in DRAWN_SCHEMES:
        tree.level_widths()  # raises here, before anything compiles
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
