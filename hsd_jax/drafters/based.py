"""Shared parts of drafters that extend another drafter, their `base`, whose plans and default trees they have."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.method import Planning, method_of


class Based:
    """Properties that the configuration of every trained drafter has, taken from the base."""

    num_steps = property(attrgetter("base.num_steps"))
    draft_vocab_size = property(attrgetter("base.draft_vocab_size"))
    vocab_size = property(attrgetter("base.vocab_size"))
    profile = property(attrgetter("base.profile"))  # we assume that the extension does not lower it
    sampled_profile = property(attrgetter("base.sampled_profile"))


def planning_on_base(more_seconds: Callable[..., float], chains_nest: bool = True) -> Planning:
    """The planning of a drafter with a base. `more_seconds` are seconds of drafting in addition to the base."""

    def of(config: Any) -> Planning:
        return method_of(config.base).planning

    def drafting_seconds(model: Any, config: Any, rows: int, tree: TreeConfig) -> float:
        own = of(config).drafting_seconds(model, config.base, rows, tree)
        return own + more_seconds(model, config, rows, tree)

    return Planning(
        drafting_seconds,
        lambda config: of(config).default_tree(config.base),
        lambda config: of(config).max_depth(config.base),
        grows_wide=True,
        chains_nest=chains_nest,
    )
