"""The configuration of a trained drafter and prompt lookup that draft together, and the names of such pairs."""

from __future__ import annotations

from operator import attrgetter
from typing import ClassVar

from hsd_jax import validation
from hsd_jax.config import DrafterConfig
from hsd_jax.drafters.lookup.config import LookupConfig
from hsd_jax.drafters.method import Based

LONGEST = 8
"""The longest repetition in tokens. Longer ones count as this long."""


@validation.dataclass
class BothConfig(Based):
    """A drafter that is trained on its target's features, with prompt lookup in addition, which has no weights."""

    kind: ClassVar[str] = "both"

    base: DrafterConfig
    lookup: LookupConfig = LookupConfig(LONGEST)

    @staticmethod
    def split(name: str) -> tuple[str, LookupConfig] | None:
        """The base's name and the lookup in "NAME+lookup" or "NAME+lookup:2-4"; None for any other text.

        Without numbers the n-grams have up to LONGEST tokens, because the acceptance probability of a copied token
        depends on the length of its repetition.
        """
        base, plus, rest = name.rpartition("+")
        lookup = LookupConfig.parse(rest) if plus and base else None
        lookup = LookupConfig(LONGEST) if lookup is not None and rest == "lookup" else lookup
        return None if lookup is None else (base, lookup)

    num_heads = property(attrgetter("base.num_heads"))  # an AttributeError, as of the base, if that has no trunk
    num_kv_heads = property(attrgetter("base.num_kv_heads"))
