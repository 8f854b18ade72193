"""Hidden-state drafting: K states that read no drafted token, and token information after the LM head (Lyanna,
arXiv:2602.21224).
"""

from __future__ import annotations

from typing import Any

from hsd_jax.config import RECURRENT, REUSES, TreeConfig, weights_of_trunk
from hsd_jax.drafters.hidden.draft import hidden_drafter, lattice, parts
from hsd_jax.drafters.hidden.weights import HiddenConfig, begin_from, init_weights, inject, read_paths, token_bias
from hsd_jax.drafters.method import DraftingMethod, TokenInformation, Training, planning_of_trained
from hsd_jax.models.unroll import unroll

ROWS_PER_STATE = 0.9
"""Rows that the pass of a parallel trunk computes, per state. This number and the next two were set by hand. Only for a
GPU were they compared with a measurement (`tests/planning/test_rates.py`)."""
PARALLEL_OPERATIONS = 30
"""Small operations that a parallel trunk adds to its pass."""
LEVEL_OPERATIONS = 12
"""Small operations of each level of a chain."""


def drafting_seconds(model: Any, config: HiddenConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of the trunk, of one product of all states with the head, and of token information level by level."""
    small = model.rates.operation_seconds
    per_pass = model.layers(config)
    if config.trunk == RECURRENT:
        states = tree.depth * (float(model.product(weights_of_trunk(config), rows)) + per_pass)
    else:
        positions = ROWS_PER_STATE * rows * tree.depth
        states = float(model.product(weights_of_trunk(config), positions)) + per_pass + PARALLEL_OPERATIONS * small
    logits = float(model.product(config.draft_vocab_size * config.hidden_size, rows * tree.depth))
    bias = model.product(config.rank * config.draft_vocab_size, rows * tree.most_expanded)
    level = LEVEL_OPERATIONS * small * (model.rates.wide_levels if tree.width > 1 else 1.0)
    return states + logits + tree.depth * float(bias + level)


HIDDEN = DraftingMethod(
    HiddenConfig,
    hidden_drafter,
    planning_of_trained(drafting_seconds),
    Training(init_weights, unroll),
    parts=parts,
    token_information=TokenInformation(inject, read_paths, token_bias, begin_from),
    reuses=REUSES,
    lattice=lattice,
)
