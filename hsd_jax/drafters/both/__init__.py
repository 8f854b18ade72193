"""A trained drafter and prompt lookup in one tree, which share its nodes by what was accepted lately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters import lookup
from hsd_jax.drafters.both.config import BothConfig
from hsd_jax.drafters.both.draft import both_drafter
from hsd_jax.drafters.method import Method


def both(methods: Mapping[str, Method]) -> Method:
    """The row of the table, in terms of the rows of the drafters that are trained."""

    def of(config: BothConfig) -> Method:
        return methods[config.base.kind]

    def make(target_config: Any, config: BothConfig, *args: Any, **options: Any) -> Any:
        return both_drafter(of(config), target_config, config, *args, **options)

    def drafting_seconds(costs: Any, config: BothConfig, batch: int, tree: TreeConfig) -> float:
        """Of both, and as much again as copying takes for the tree that they share and what is learned of it."""
        copying = lookup.drafting_seconds(costs, config.lookup, batch, tree)
        return of(config).drafting_seconds(costs, config.base, batch, tree) + 2 * copying

    return Method(
        BothConfig,
        make,
        lambda config: of(config).default_tree(config.base),
        lambda config: of(config).max_depth(config.base),
        drafting_seconds,
        chains_nest=False,  # which of the two drafts a chain depends on its length
    )
