"""Copying: repeats the last n tokens."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.copy.config import CopyConfig
from hsd_jax.drafters.copy.draft import copy_drafter
from hsd_jax.drafters.method import Method


def drafting_seconds(costs: Any, config: CopyConfig, batch: int, tree: TreeConfig) -> float:
    """A gather."""
    return 5 * costs.rates.operation_seconds


COPY = Method(
    CopyConfig,
    copy_drafter,
    lambda config: TreeConfig(8, 7, 1),
    lambda config: 15,
    drafting_seconds,
    grows_wide=False,
    has_score=False,
    parse=CopyConfig.parse,
)
