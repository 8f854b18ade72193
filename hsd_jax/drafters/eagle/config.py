"""What is static of an EAGLE drafter."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hsd_jax.config import TrunkConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(TrunkConfig):
    """A recurrent trunk that reads the embeddings of drafted tokens."""

    kind: ClassVar[str] = "eagle"
    reads_drafts: ClassVar[bool] = True
