"""EAGLE: a recurrent drafter that reads the drafted tokens (arXiv:2401.15077, arXiv:2406.16858)."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import TreeConfig, weights_of_trunk
from hsd_jax.drafters.eagle.draft import EagleConfig, eagle_drafter, init_weights
from hsd_jax.drafters.method import DraftingMethod, Training, planning_of_trained
from hsd_jax.models.unroll import unroll


def drafting_seconds(model: Any, config: EagleConfig, rows: int, tree: TreeConfig) -> float:
    """A trunk pass and a product with the head for every level."""
    positions = rows * tree.most_expanded
    trunk, head = weights_of_trunk(config), config.draft_vocab_size * config.hidden_size
    level = model.product(trunk, positions) + model.product(head, positions)
    return tree.depth * (float(level) + model.layers(config) + 10 * model.rates.operation_seconds)


EAGLE = DraftingMethod(
    EagleConfig, eagle_drafter, planning_of_trained(drafting_seconds), Training(init_weights, unroll)
)
