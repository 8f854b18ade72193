"""What is static of a drafter whose trees a second model has a say in, and of the n-gram models that may be that."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from hsd_jax import settings
from hsd_jax.config import DrafterConfig
from hsd_jax.drafters.based import Based
from hsd_jax.settings import Count

ZERO_GRAM = "0-gram"
"""The name of the scorer that says nothing: trees of the likeliest paths by the heads alone."""
ARCS = 16
"""Tokens of each state that may be drafted (Kim et al., arXiv:2404.09221: top-16 lattices)."""


ALPHA = 0.5
"""What log p of a scorer is multiplied by where nobody says."""


@settings.dataclass
class NgramConfig:
    """The sizes of an n-gram model, and the tokenizer it was counted with; `ngram.py` has the numbers."""

    kind: ClassVar[str] = "ngram"

    order: Annotated[int, Field(ge=2, le=8)]
    vocab_size: Count
    num_nodes: Count
    """n-grams of all orders, those of one token included."""
    most_children: Count
    """Different tokens after one context, at most."""
    vocabulary: str
    """`tokenizer.hash_of` the vocabulary."""


@settings.dataclass
class RescoredConfig(Based):
    """A drafter with token-free states, and what scores the transitions between their tokens."""

    kind: ClassVar[str] = "rescored"

    base: DrafterConfig
    scorer: Any = None
    """An `NgramConfig`, a `HiddenConfig` (its token information), a `SmallLMConfig`, or None: ZERO_GRAM."""
    arcs: Count = ARCS
    """Tokens that may follow a node: the likeliest of its state."""

    @staticmethod
    def base_of(config: Any) -> Any:
        """The drafter that makes the states: of one whose trees are rescored the base, of any other itself."""
        return config.base if isinstance(config, RescoredConfig) else config

    @property
    def draft_vocab_size(self) -> int:
        """No node has more children than arcs."""
        return min(self.arcs, self.base.draft_vocab_size)
