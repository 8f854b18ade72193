"""Shared parts of drafters that extend another drafter, their `base`.

Plans and default trees are those of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hsd_jax.config import DrafterConfig, TreeConfig
from hsd_jax.drafters.method import DraftingMethod, Planning
from hsd_jax.types import Drafter


class Based:
    """Properties that the configuration of every trained drafter has, taken from the base."""

    base: DrafterConfig

    @property
    def num_steps(self) -> int:
        return self.base.num_steps

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that the base may draft. Lookup may copy any token."""
        return self.base.draft_vocab_size

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def profile(self) -> tuple[float, ...]:
        """The profile of the base alone. We assume that the extension does not lower it."""
        return self.base.profile

    @property
    def sampled_profile(self) -> tuple[float, ...]:
        return self.base.sampled_profile


def on_base(
    methods: Mapping[str, DraftingMethod],
    config_type: type,
    make: Callable[..., Drafter],
    more_seconds: Callable[..., float],
) -> DraftingMethod:
    """The `DraftingMethod` of a drafter with a base, built from that of the base.

    Args:
      methods: the table of methods by kind, with those of all bases.
      make: as `DraftingMethod.make`, with the method of the base as an additional first argument.
      more_seconds: seconds of drafting in addition to the base, as `Planning.drafting_seconds`.
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
