"""A stack of drafters: hierarchical speculative decoding (Globerson et al., arXiv:2510.19705)."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.method import DraftingMethod, Planning, method_of
from hsd_jax.drafters.stack.config import StackConfig
from hsd_jax.drafters.stack.draft import stack_drafter

ENOUGH = 4
"""The default of the least number of the middle model's tokens that the target verifies in a round."""
TOKENS_A_ROUND = 2.0
"""The number of tokens that a round of the middle model is assumed to add."""


def drafting_seconds(model: Any, config: StackConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of the middle model's rounds: each has a pass and the inner drafter's drafting."""
    middle, chain = config.middle, TreeConfig.chain(min(config.length, max(tree.depth - 1, 1)))
    one = model.drafter_pass(middle, rows * chain.nodes)
    one += method_of(config.inner).planning.drafting_seconds(model, config.inner, rows, chain)
    return max(tree.depth - chain.depth, 1) / TOKENS_A_ROUND * one


STACK = DraftingMethod(
    StackConfig,
    stack_drafter,
    Planning(
        drafting_seconds,
        lambda config: TreeConfig.chain(config.length + ENOUGH),
        lambda config: config.length + 2 * ENOUGH,
    ),
)
