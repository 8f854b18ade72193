"""PEARL: a small model that drafts while its last drafts are verified (arXiv:2408.11850)."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters import small_lm
from hsd_jax.drafters.method import DraftingMethod, Planning
from hsd_jax.drafters.pearl.config import PearlConfig
from hsd_jax.drafters.pearl.draft import pearl_drafter
from hsd_jax.drafters.pearl.overlap import Overlapped


def drafting_seconds(model: Any, config: PearlConfig, rows: int, tree: TreeConfig) -> float:
    """The same as for the small model alone, because nothing overlaps on one device."""
    return small_lm.drafting_seconds(model, config.base, rows, tree)


PEARL = DraftingMethod(
    PearlConfig,
    pearl_drafter,
    Planning(
        drafting_seconds, lambda config: TreeConfig.chain(config.gamma), lambda config: config.gamma, has_score=False
    ),
    overlapped=Overlapped,
)
