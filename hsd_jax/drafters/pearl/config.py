"""The configuration of a small model that drafts while its last drafts are verified."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hsd_jax import validation
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.validation import Count


@validation.dataclass
class PearlConfig:
    """A small language model, and the number of tokens that it drafts in a round, `gamma`."""

    kind: ClassVar[str] = "pearl"

    base: SmallLMConfig
    gamma: Count = 4
    ratio: float | None = dataclasses.field(default=None, repr=False, compare=False)
    """Passes of this model in the time of a pass of the target, from which gamma was chosen. None: gamma was given."""

    @property
    def choice(self) -> str | None:
        """A sentence that says how gamma was chosen; None if it was given."""
        if self.ratio is None:
            return None
        return (
            f"PEARL with gamma {self.gamma}: a pass of the target takes as long as {self.ratio:.2f} passes of the small"
            " model"
        )

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size
