"""Rescored drafts: the lattice of token-free states, and a transition scorer (arXiv:2404.09221)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters import small_lm
from hsd_jax.drafters.based import on_base
from hsd_jax.drafters.method import DraftingMethod
from hsd_jax.drafters.rescored.config import RescoredConfig
from hsd_jax.drafters.rescored.draft import rescored_drafter
from hsd_jax.drafters.small_lm.config import SmallLMConfig


def scoring_seconds(costs: Any, config: RescoredConfig, batch: int, tree: TreeConfig) -> float:
    """Of a small language model what it takes to draft such a tree, of others a few small operations a level."""
    if isinstance(config.scorer, SmallLMConfig):
        return small_lm.drafting_seconds(costs, config.scorer, batch, tree)
    return 40 * tree.depth * costs.rates.operation_seconds


def rescored(methods: Mapping[str, DraftingMethod]) -> DraftingMethod:
    """The row of the table, in terms of the rows of the drafters that make the states."""
    return on_base(methods, RescoredConfig, rescored_drafter, scoring_seconds)
