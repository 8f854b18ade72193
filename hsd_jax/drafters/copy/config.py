"""What is static of a copying drafter."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, ClassVar

from hsd_jax import settings
from hsd_jax.settings import Within


@dataclasses.dataclass(frozen=True)
class CopyConfig:
    """Drafts the last `length` tokens over and over.

    Raises:
      ValueError: naming the wrong value and the allowed ones.
    """

    kind: ClassVar[str] = "copy"

    length: Annotated[int, Within(1, 64)] = 1

    def __post_init__(self):
        settings.check(self, "CopyConfig")

    @classmethod
    def parse(cls, text: str) -> CopyConfig | None:
        """The configuration that "copy" or "copy:4" names; None for any other text."""
        found = re.fullmatch(r"copy(?::(\d+))?", text)
        return None if found is None else cls(int(found[1] or 1))
