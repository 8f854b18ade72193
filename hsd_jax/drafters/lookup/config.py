"""What is static of prompt lookup."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field

from hsd_jax import settings


@settings.dataclass
class LookupConfig:
    """Prompt lookup: drafts what followed the longest n-gram of the context that ends it once more.

    Args:
      max_ngram: longest n-gram, in tokens; longer repetitions count as this long.
      min_ngram: shortest n-gram; where the context repeats none of these, nothing is drafted.
    Raises:
      ValueError: naming the wrong value and the allowed ones.
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
        """The configuration that "lookup", "lookup:4" (up to 4) or "lookup:2-4" names; None for any other text.

        Raises:
          ValueError: for numbers that are not allowed.
        """
        found = re.fullmatch(r"lookup(?::(?:(\d+)-)?(\d+))?", text)
        if found is None:
            return None
        least, most = found.groups()
        return cls(*(int(n) for n in (most, least) if n is not None))
