"""A drafter that stands on another, its `base`, and answers as the base where plans and trees ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hsd_jax.config import DrafterConfig, TreeConfig
from hsd_jax.drafters.method import DraftingMethod, Planning
from hsd_jax.types import Drafter


class Based:
    """What is asked of the configuration of any drafter that is trained, from the base."""

    base: DrafterConfig

    @property
    def num_steps(self) -> int:
        return self.base.num_steps

    @property
    def draft_vocab_size(self) -> int:
        """What the base may draft; lookup copies any token."""
        return self.base.draft_vocab_size

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def profile(self) -> tuple[float, ...]:
        """That of the base alone: what stands on it is taken to do no harm."""
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
    """The row of a drafter on a base, in terms of the row of that one.

    Args:
      make: as `DraftingMethod.make`, but for the row of the base, which comes first.
      more_seconds: what drafting takes beside the base, as `Planning.drafting_seconds`.
    """

    def of(config: Any) -> Planning:
        return methods[config.base.kind].planning

    def made(target_config: Any, config: Any, *args: Any, **options: Any) -> Drafter:
        return make(methods[config.base.kind], target_config, config, *args, **options)

    def drafting_seconds(costs: Any, config: Any, batch: int, tree: TreeConfig) -> float:
        own = of(config).drafting_seconds(costs, config.base, batch, tree)
        return own + more_seconds(costs, config, batch, tree)

    planning = Planning(
        drafting_seconds,
        lambda config: of(config).default_tree(config.base),
        lambda config: of(config).max_depth(config.base),
        grows_wide=True,
    )
    return DraftingMethod(config_type, made, planning)
