"""A trained drafter and prompt lookup in one tree, which share its nodes by what was accepted lately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.based import on_base
from hsd_jax.drafters.both.config import BothConfig
from hsd_jax.drafters.both.draft import both_drafter
from hsd_jax.drafters.lookup import LOOKUP
from hsd_jax.drafters.method import DraftingMethod


def copying_seconds(costs: Any, config: BothConfig, batch: int, tree: TreeConfig) -> float:
    """Of lookup, and as much again for the tree that the two share and what is learned of it."""
    return 2 * LOOKUP.planning.drafting_seconds(costs, config.lookup, batch, tree)


def both(methods: Mapping[str, DraftingMethod]) -> DraftingMethod:
    """The row of the table, in terms of the rows of the drafters that are trained."""
    row = on_base(methods, BothConfig, both_drafter, copying_seconds)
    planning = row.planning._replace(chains_nest=False)  # which of the two drafts a chain depends on its length
    return row._replace(planning=planning, has_weights_of_base=True)
