"""Rescored drafts: a lattice of token-free states and a transition scorer (arXiv:2404.09221)."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters import small_lm
from hsd_jax.drafters.method import DraftingMethod, planning_on_base
from hsd_jax.drafters.rescored.draft import RescoredConfig, rescored_drafter
from hsd_jax.drafters.small_lm import SmallLMConfig


def scoring_seconds(model: Any, config: RescoredConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of scoring: for a small language model those of drafting such a tree, else a few operations per level."""
    if isinstance(config.scorer, SmallLMConfig):
        return small_lm.drafting_seconds(model, config.scorer, rows, tree)
    return 40 * tree.depth * model.rates.operation_seconds


RESCORED = DraftingMethod(RescoredConfig, rescored_drafter, planning_on_base(scoring_seconds))
