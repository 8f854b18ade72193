"""Prompt lookup: copies what followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.lookup.config import LookupConfig
from hsd_jax.drafters.lookup.draft import lookup_drafter
from hsd_jax.drafters.method import Method

DEFAULT_CHAIN = TreeConfig(nodes=8, depth=7, width=1)
"""Copying costs nothing but the target's pass over more nodes."""


def drafting_seconds(costs: Any, config: LookupConfig, batch: int, tree: TreeConfig) -> float:
    """A few small operations."""
    return 20 * costs.rates.operation_seconds


LOOKUP = Method(
    LookupConfig,
    lookup_drafter,
    lambda config: DEFAULT_CHAIN,
    lambda config: 15,
    drafting_seconds,
    grows_wide=False,
    has_score=False,
    parse=LookupConfig.parse,
)
