"""What is static of a small language model that drafts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hsd_jax import settings
from hsd_jax.config import ModelConfig


@settings.dataclass
class SmallLMConfig(ModelConfig):
    """An independent language model in the role of a drafter."""

    kind: ClassVar[str] = "small_lm"
    aux_layers: ClassVar[tuple[int, ...]] = ()
    """Of the target, whose states it reads: none."""

    fingerprint: str = dataclasses.field(default="", repr=False, compare=False)
    """Of the weights in its files, by which a drafter made for it is known; empty: nobody asked."""
