"""The configuration of a stack: a middle model, and a drafter of any kind that drafts for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from hsd_jax import validation
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.types import Weights
from hsd_jax.validation import Count


@validation.dataclass
class StackConfig:
    """A small language model that drafts for the target, and a drafter that drafts for this model.

    Args:
      middle: the small language model.
      inner: the configuration of any drafter for the middle model. It may be another stack.
      length: tokens that the inner drafter drafts in a round (T of the level below in methods.md 4.3).
    """

    kind: ClassVar[str] = "stack"

    middle: SmallLMConfig
    inner: Any
    length: Count = 4

    def __post_init__(self):
        own = getattr(self.inner, "vocab_size", self.middle.vocab_size)
        if own != self.middle.vocab_size:
            raise ValueError(f"StackConfig.inner has vocab_size={own}, the middle model {self.middle.vocab_size}")

    @property
    def vocab_size(self) -> int:
        return self.middle.vocab_size


def at_bottom(config: Any, weights: Weights, change: Callable[..., tuple[Any, Weights]]) -> tuple[Any, Weights]:
    """Applies `change(config, weights)` to the drafter at the bottom of a stack, or to a drafter that is no stack."""
    if not isinstance(config, StackConfig):
        return change(config, weights)
    inner, own = at_bottom(config.inner, weights["inner"], change)
    return dataclasses.replace(config, inner=inner), {**weights, "inner": own}
