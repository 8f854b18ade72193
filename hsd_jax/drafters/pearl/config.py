"""The configuration of a small model that drafts while its last drafts are verified."""

from __future__ import annotations

from typing import ClassVar

from hsd_jax import settings
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.settings import Count


@settings.dataclass
class PearlConfig:
    """A small language model, and the number of tokens that it drafts in a round, `gamma`."""

    kind: ClassVar[str] = "pearl"

    base: SmallLMConfig
    gamma: Count = 4

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size
