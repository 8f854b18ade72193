"""The configuration of prompt lookup."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field

from hsd_jax import validation


@validation.dataclass
class LookupConfig:
    """Prompt lookup: finds the longest n-gram at the end of the context that occurred before, and drafts what followed.

    Args:
      max_ngram: the longest n-gram, in tokens. Longer repetitions count as this long.
      min_ngram: the shortest n-gram. If the last `min_ngram` tokens did not occur before, nothing is drafted.
    """

    MAX_NGRAM: ClassVar[int] = 16

    max_ngram: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 3
    min_ngram: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 1

    kind: ClassVar[str] = "lookup"

    def __post_init__(self):
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"LookupConfig.min_ngram={self.min_ngram}: allowed are 1 to max_ngram={self.max_ngram}")

    @classmethod
    def parse(cls, text: str) -> LookupConfig | None:
        """The configuration that "lookup", "lookup:4" (up to 4) or "lookup:2-4" means; None for any other text."""
        found = re.fullmatch(r"lookup(?::(?:(\d+)-)?(\d+))?", text)
        if found is None:
            return None
        least, most = found.groups()
        return cls(*(int(n) for n in (most, least) if n is not None))
