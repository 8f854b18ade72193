"""The parts of drafting as separate functions, so that each can be timed. A round runs the same trunk, head and `grow`
(`schedule.py`, `draft.py`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from jaxtyping import Array, Float, Int

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.hidden.config import HiddenConfig
from hsd_jax.drafters.hidden.schedule import trunk_states
from hsd_jax.drafters.hidden.weights import inject
from hsd_jax.drafters.trunk_state import TrunkState
from hsd_jax.infer.tree import Grower
from hsd_jax.models.trunk import base_logits
from hsd_jax.types import DraftTree, DrawScheme, RoundInputs, Weights


def grow(
    grower: Grower,
    weights: Weights,
    config: HiddenConfig,
    logits: Float[Array, "B D C"],
    inputs: RoundInputs,
    num_levels: Int[Array, "B"] | None = None,
) -> DraftTree:
    """The tree that grows from base logits and the drafter's token information. `num_levels` is that of `Grower`."""
    added_by = functools.partial(inject, weights, config)
    return grower.grow_token_free(logits, added_by, inputs, weights.get("draft_to_target"), num_levels)


def parts(
    target_config: ModelConfig, config: HiddenConfig, tree: TreeConfig, scheme: DrawScheme
) -> tuple[Callable, ...]:
    """The three parts of drafting, as functions.

    The length of the trunk's cache does not change, so that every run does the same work.

    Returns:
      `trunk(models, state) -> (states, state)`, `head(models, states) -> logits` and
      `tree(models, logits, inputs) -> tree`.
    """

    grower = Grower(tree, scheme, config.vocab_size)

    def trunk(models, state: TrunkState, num_states: int = tree.depth):
        states, cache = trunk_states(models, target_config, config, num_states, state)
        cache = dataclasses.replace(cache, length=state.cache.length)
        return states, dataclasses.replace(state, cache=cache)

    def head(models, states):
        return base_logits(models["drafter"], config, models["target"], target_config, states)

    def tree_of(models, logits, inputs: RoundInputs) -> DraftTree:
        return grow(grower, models["drafter"], config, logits, inputs)

    return trunk, head, tree_of
