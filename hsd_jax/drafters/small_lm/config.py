"""The configuration of a small language model that drafts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hsd_jax import settings
from hsd_jax.config import ModelConfig


@settings.dataclass
class SmallLMConfig(ModelConfig):
    """An independent language model in the role of a drafter."""

    kind: ClassVar[str] = "small_lm"
    feature_layers: ClassVar[tuple[int, ...]] = ()
    """It reads no layer of the target."""

    fingerprint: str = dataclasses.field(default="", repr=False, compare=False)
    """Fingerprint of the weights in its files, with which drafters that were trained for it are checked. Empty if it
    was not computed."""
