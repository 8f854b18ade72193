"""Medusa: K heads that predict K positions independently of each other (arXiv:2401.10774, arXiv:1811.03115)."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.medusa.draft import lattice, medusa_drafter
from hsd_jax.drafters.medusa.weights import MedusaConfig, init_weights, unroll
from hsd_jax.drafters.method import DraftingMethod, Training, planning_of_trained


def drafting_seconds(model: Any, config: MedusaConfig, rows: int, tree: TreeConfig) -> float:
    """One product for all heads, and one with the LM head."""
    heads = model.product(tree.depth * config.hidden_size**2, rows)
    logits = model.product(config.draft_vocab_size * config.hidden_size, rows * tree.depth)
    return float(heads + logits) + 20 * model.rates.operation_seconds


MEDUSA = DraftingMethod(
    MedusaConfig,
    medusa_drafter,
    planning_of_trained(drafting_seconds, has_score=False),
    Training(init_weights, unroll),
    lattice=lattice,
)
