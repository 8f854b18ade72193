"""A trained drafter and prompt lookup in one tree. Recent acceptance decides how they share its nodes."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.both.config import BothConfig
from hsd_jax.drafters.both.draft import both_drafter
from hsd_jax.drafters.lookup import LOOKUP
from hsd_jax.drafters.method import DraftingMethod, planning_on_base


def copying_seconds(model: Any, config: BothConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of lookup, and as much again to merge the two drafts and to update their record."""
    return 2 * LOOKUP.planning.drafting_seconds(model, config.lookup, rows, tree)


# The length of a chain decides which drafter makes it, so chains do not nest.
BOTH = DraftingMethod(
    BothConfig, both_drafter, planning_on_base(copying_seconds, chains_nest=False), has_weights_of_base=True
)
