"""Shared parts of drafters that extend another drafter, their `base`, whose plans and default trees they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.method import DraftingMethod, Planning
from hsd_jax.types import Drafter


class Based:
    """Properties that the configuration of every trained drafter has, taken from the base."""

    num_steps = property(attrgetter("base.num_steps"))
    draft_vocab_size = property(attrgetter("base.draft_vocab_size"))
    vocab_size = property(attrgetter("base.vocab_size"))
    profile = property(attrgetter("base.profile"))  # we assume that the extension does not lower it
    sampled_profile = property(attrgetter("base.sampled_profile"))


def on_base(
    methods: Mapping[str, DraftingMethod],
    config_type: type,
    make: Callable[..., Drafter],
    more_seconds: Callable[..., float],
) -> DraftingMethod:
    """The entry of a drafter with a base, from the table with those of all bases.

    `make` takes the method of the base first. `more_seconds` are seconds of drafting in addition to the base.
    """

    def of(config: Any) -> Planning:
        return methods[config.base.kind].planning

    def made(target_config: Any, config: Any, *args: Any, **options: Any) -> Drafter:
        return make(methods[config.base.kind], target_config, config, *args, **options)

    def drafting_seconds(model: Any, config: Any, rows: int, tree: TreeConfig) -> float:
        own = of(config).drafting_seconds(model, config.base, rows, tree)
        return own + more_seconds(model, config, rows, tree)

    planning = Planning(
        drafting_seconds,
        lambda config: of(config).default_tree(config.base),
        lambda config: of(config).max_depth(config.base),
        grows_wide=True,
    )
    return DraftingMethod(config_type, made, planning)
