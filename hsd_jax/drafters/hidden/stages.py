"""The parts of drafting as separate functions, so that each can be timed. `draft.py` runs the same functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.hidden.config import HiddenConfig
from hsd_jax.drafters.hidden.schedule import trunk_states
from hsd_jax.drafters.hidden.weights import inject
from hsd_jax.drafters.trunk_state import TrunkState
from hsd_jax.infer.tree import Grower
from hsd_jax.models.trunk import base_logits
from hsd_jax.types import DraftTree, DrawScheme, RoundInputs


def stages(
    target_config: ModelConfig, config: HiddenConfig, tree: TreeConfig, scheme: DrawScheme
) -> tuple[Callable, ...]:
    """The three parts of drafting, as functions.

    The length of the trunk's cache does not change, so that every run does the same work.

    Returns:
      `trunk(models, state) -> (states, state)`, `head(models, states) -> logits` and
      `grow(models, logits, inputs) -> tree`.
    """

    grower = Grower(tree, scheme, config.vocab_size)

    def trunk(models, state: TrunkState, num_states: int = tree.depth):
        states, cache = trunk_states(models, target_config, config, num_states, state)
        cache = dataclasses.replace(cache, length=state.cache.length)
        return states, dataclasses.replace(state, cache=cache)

    def head(models, states):
        return base_logits(models["drafter"], config, models["target"], target_config, states)

    def grow(models, logits, inputs: RoundInputs) -> DraftTree:
        added_by = functools.partial(inject, models["drafter"], config)
        return grower.grow_token_free(logits, added_by, inputs, models["drafter"].get("draft_to_target"))

    return trunk, head, grow
