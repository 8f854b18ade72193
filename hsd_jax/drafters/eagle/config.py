"""The configuration of an EAGLE drafter."""

from __future__ import annotations

from typing import ClassVar

from hsd_jax import settings
from hsd_jax.config import TrunkConfig


@settings.dataclass
class EagleConfig(TrunkConfig):
    """A recurrent trunk that reads the embeddings of drafted tokens."""

    kind: ClassVar[str] = "eagle"
    reads_drafts: ClassVar[bool] = True
