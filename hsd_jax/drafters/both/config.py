"""What is static of a trained drafter and prompt lookup that draft together, and the names of such pairs."""

from __future__ import annotations

from typing import ClassVar

from hsd_jax import settings
from hsd_jax.config import DrafterConfig
from hsd_jax.drafters.based import Based
from hsd_jax.drafters.lookup.config import LookupConfig

LONGEST = 8
"""Tokens of a repetition from which on all count as equally long."""


@settings.dataclass
class BothConfig(Based):
    """A drafter that is trained on its target's features, and prompt lookup beside it.

    The weights are the base's own.
    """

    kind: ClassVar[str] = "both"

    base: DrafterConfig
    lookup: LookupConfig = LookupConfig(LONGEST)

    @staticmethod
    def split(name: str) -> tuple[str, LookupConfig] | None:
        """The base's name and the lookup that "NAME+lookup" or "NAME+lookup:2-4" stand for; None for any other text.

        Without numbers n-grams have up to LONGEST tokens: how likely a copy is to be right depends on their length.

        Raises:
          ValueError: for numbers that are not allowed.
        """
        base, plus, rest = name.rpartition("+")
        lookup = LookupConfig.parse(rest) if plus and base else None
        lookup = LookupConfig(LONGEST) if lookup is not None and rest == "lookup" else lookup
        return None if lookup is None else (base, lookup)

    @property
    def num_heads(self) -> int:
        """Of the base's trunk; without one an AttributeError, as of the base."""
        return self.base.num_heads  # type: ignore[attr-defined]

    @property
    def num_kv_heads(self) -> int:
        return self.base.num_kv_heads  # type: ignore[attr-defined]
