"""What is static of an EAGLE drafter."""

from __future__ import annotations

import dataclasses
import typing
from typing import ClassVar

from hsd_jax.config import TrunkConfig


@typing.no_type_check  # a wrong type gets our own message
@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(TrunkConfig):
    """A recurrent trunk that reads the embeddings of drafted tokens."""

    kind: ClassVar[str] = "eagle"
    reads_drafts: ClassVar[bool] = True
