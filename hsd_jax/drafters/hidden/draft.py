"""The hidden-state drafter: K token-free trunk states, one product with the LM head, and a tree with token information.

The trunk reads only the target's features and its own states. Drafted tokens first appear in `grow_tree` (Lyanna,
arXiv:2602.21224; methods.md 1.5). `reuse.py` decides when the trunk runs and how unused states are reused. The trunk
is in `models/trunk.py`, and token information in `weights.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from hsd_jax.config import NO_REUSE, RECURRENT, REUSES, ModelConfig, ReuseConfig, TreeConfig, weights_of_trunk
from hsd_jax.drafters.hidden.reuse import fresh_logits, logits_of_round, reusing_drafter
from hsd_jax.drafters.hidden.weights import HiddenConfig, begin_from, init_weights, inject, read_paths, token_bias
from hsd_jax.drafters.method import DraftingMethod, TokenInformation, Training, planning_of_trained
from hsd_jax.drafters.trunk_state import TrunkState, trunk_states
from hsd_jax.infer.tree import grow_tree, token_free
from hsd_jax.models.trunk import base_logits
from hsd_jax.models.unroll import unroll
from hsd_jax.types import Drafter, DraftTree, DrawScheme, RoundInputs, Weights


def hidden_drafter(
    target_config: ModelConfig,
    config: HiddenConfig,
    tree: TreeConfig,
    cache_dtype: Any,
    scheme: DrawScheme,
    reuse: ReuseConfig = NO_REUSE,
) -> Drafter:
    """The `Drafter`. All functions except `draft` are those of `reusing_drafter`."""

    def draft(models, state: TrunkState, inputs: RoundInputs):
        logits, num_levels, state = logits_of_round(models, target_config, config, tree, reuse, state, inputs.live)
        with jax.named_scope("tree"):
            return grow(models["drafter"], config, logits, inputs, tree, scheme, num_levels), state

    return reusing_drafter(target_config, config, tree, draft, cache_dtype, scheme, reuse)


def grow(weights: Weights, config: HiddenConfig, logits: Float[Array, "B D C"], *rest: Any) -> DraftTree:
    """The tree that grows from base logits and token information. `rest` is that of `grow_tree`."""
    expand = token_free(logits, functools.partial(inject, weights, config), weights.get("draft_to_target"))
    return grow_tree(expand, None, *rest)[0]


def parts(
    target_config: ModelConfig, config: HiddenConfig, tree: TreeConfig, scheme: DrawScheme
) -> tuple[Callable, ...]:
    """As `DraftingMethod.parts`. The length of the trunk's cache does not change, so every run does the same work.

    Returns:
      `trunk(models, state) -> (states, state)`, `head(models, states) -> logits` and
      `tree(models, logits, inputs) -> tree`.
    """

    def trunk(models, state: TrunkState):
        states, cache = trunk_states(models, target_config, config, tree.depth, state)
        return states, dataclasses.replace(state, cache=dataclasses.replace(cache, length=state.cache.length))

    def head(models, states):
        return base_logits(models["drafter"], config, models["target"], target_config, states)

    def tree_of(models, logits, inputs: RoundInputs) -> DraftTree:
        return grow(models["drafter"], config, logits, inputs, tree, scheme)

    return trunk, head, tree_of


def lattice(target_config: ModelConfig, config: HiddenConfig, tree: TreeConfig, models, state: TrunkState):
    """As `DraftingMethod.lattice`: the base logits of fresh states, and the injector if there is one."""
    logits, state = fresh_logits(models, target_config, config, tree.depth, state)
    return logits, functools.partial(inject, models["drafter"], config) if config.rank else None, state


ROWS_PER_STATE = 0.9
"""Rows that the pass of a parallel trunk computes, per state. This number and the next one were set by hand. Only for a
GPU were they compared with a measurement (`tests/planning/test_rates.py`)."""
PARALLEL_OPERATIONS = 30
"""Small operations that a parallel trunk adds to its pass."""


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
    return states + logits + levels_seconds(model, config, rows, tree)


def levels_seconds(model: Any, config: Any, rows: int, tree: TreeConfig) -> float:
    """Seconds of the levels of a tree that grows from the logits of token-free states."""
    numbers, at_once = config.rank * config.draft_vocab_size, rows * tree.most_expanded
    bias = model.product(numbers, at_once)  # the later levels find the weights in the processor's cache
    later = model.product(numbers, at_once, cached_bytes=numbers * model.drafter_itemsize)
    operations = model.rates.level_operations * (model.rates.wide_levels if tree.width > 1 else 1.0)
    return float(bias + (tree.depth - 1) * later) + tree.depth * operations * model.rates.operation_seconds


HIDDEN = DraftingMethod(
    HiddenConfig,
    hidden_drafter,
    planning_of_trained(drafting_seconds),
    Training(init_weights, unroll),
    parts=parts,
    token_information=TokenInformation(inject, read_paths, token_bias, begin_from),
    reuses=REUSES,
    lattice=lattice,
    products=("kernel", "head", "bias"),
)
