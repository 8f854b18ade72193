"""The parts of drafting apart, for profiles: the functions that `draft.py` runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.hidden.config import HiddenConfig
from hsd_jax.drafters.hidden.schedule import HiddenState, trunk_states
from hsd_jax.drafters.hidden.weights import inject
from hsd_jax.infer.tree import grow_tree
from hsd_jax.models.trunk import base_logits
from hsd_jax.types import DrawLaw


def stages(target_config: ModelConfig, config: HiddenConfig, tree: TreeConfig, law: DrawLaw) -> tuple[Callable, ...]:
    """`trunk(models, state) -> (states, state)`, `head(models, states) -> logits` and `grow(models, logits, *round)`.

    The trunk's cache keeps its length, so that every run does the same work.
    """

    def trunk(models, state: HiddenState, num_states: int = tree.depth):
        states, cache = trunk_states(models, target_config, config, num_states, state)
        cache = dataclasses.replace(cache, length=state.cache.length)
        return states, dataclasses.replace(state, cache=cache)

    def head(models, states):
        return base_logits(models["drafter"], config, models["target"], target_config, states)

    def grow(models, logits, root, root_position, keys, sampling, noise) -> Any:
        bias = functools.partial(inject, models["drafter"], config)
        rest = keys, root_position, sampling, models["drafter"].get("hot_ids"), config.vocab_size
        return grow_tree(logits, bias, root, tree, law, *rest, noise=noise)

    return trunk, head, grow
