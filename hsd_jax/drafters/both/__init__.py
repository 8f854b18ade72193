"""A trained drafter and prompt lookup in one tree. Recent acceptance decides how they share its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.based import on_base
from hsd_jax.drafters.both.config import BothConfig
from hsd_jax.drafters.both.draft import both_drafter
from hsd_jax.drafters.lookup import LOOKUP
from hsd_jax.drafters.method import DraftingMethod


def copying_seconds(model: Any, config: BothConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of lookup, and as much again to merge the two drafts and to update their record."""
    return 2 * LOOKUP.planning.drafting_seconds(model, config.lookup, rows, tree)


def both(methods: Mapping[str, DraftingMethod]) -> DraftingMethod:
    """The entry of the table, built from the entries of the trained drafters."""
    row = on_base(methods, BothConfig, both_drafter, copying_seconds)
    planning = row.planning._replace(chains_nest=False)  # its length decides which drafter makes a chain
    return row._replace(planning=planning, has_weights_of_base=True)
