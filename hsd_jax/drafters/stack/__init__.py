"""A stack of drafters: hierarchical speculative decoding (Globerson et al., arXiv:2510.19705)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.method import DraftingMethod, Planning
from hsd_jax.drafters.stack.config import StackConfig
from hsd_jax.drafters.stack.draft import stack_drafter

ENOUGH = 4
"""Tokens of the middle model that go up at least, where nobody says."""
TOKENS_A_ROUND = 2.0
"""That a round of the middle model is taken to add."""


def stack(methods: Mapping[str, DraftingMethod]) -> DraftingMethod:
    """The row of the table, in terms of the rows of the drafters at the bottom."""

    def of(config: StackConfig) -> DraftingMethod:
        return methods[config.inner.kind]

    def make(target_config: Any, config: StackConfig, *args: Any, **options: Any) -> Any:
        return stack_drafter(of(config), target_config, config, *args, **options)

    def drafting_seconds(costs: Any, config: StackConfig, batch: int, tree: TreeConfig) -> float:
        """Rounds of the middle model, each with a pass and what the inner drafter takes."""
        middle, chain = config.middle, TreeConfig.chain(min(config.length, max(tree.depth - 1, 1)))
        one = costs.drafter_pass(middle, batch * chain.nodes)
        one += of(config).planning.drafting_seconds(costs, config.inner, batch, chain)
        return max(tree.depth - chain.depth, 1) / TOKENS_A_ROUND * one

    planning = Planning(
        drafting_seconds,
        lambda config: TreeConfig.chain(config.length + ENOUGH),
        lambda config: config.length + 2 * ENOUGH,
    )
    return DraftingMethod(StackConfig, make, planning)
