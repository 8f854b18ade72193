"""The configuration of a drafter whose drafts a scorer rescores, and of n-gram models, which may be the scorer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from hsd_jax import validation
from hsd_jax.config import DrafterConfig
from hsd_jax.drafters.method import Based
from hsd_jax.validation import Count

ZERO_GRAM = "0-gram"
"""The name of the scorer that adds nothing: the trees have the likeliest paths of the heads alone."""
ARCS = 16
"""The number of tokens of each state that may be drafted (Kim et al., arXiv:2404.09221: top-16 lattices)."""


ALPHA = 0.5
"""The default factor of a scorer's log p."""


@validation.dataclass
class NgramConfig:
    """The sizes of an n-gram model, and the tokenizer with which it was counted. `ngram.py` has its weights."""

    kind: ClassVar[str] = "ngram"

    order: Annotated[int, Field(ge=2, le=8)]
    vocab_size: Count
    num_nodes: Count
    """The number of n-grams of all orders, including those of one token."""
    most_children: Count
    """The largest number of different tokens after one context."""
    vocabulary: str
    """`tokenizer.hash_of` the tokenizer's vocabulary."""


@validation.dataclass
class RescoredConfig(Based):
    """A drafter with token-free states, and a scorer of the transitions between their tokens."""

    kind: ClassVar[str] = "rescored"

    base: DrafterConfig
    scorer: Any = None
    """An `NgramConfig`, a `HiddenConfig` (its token information), a `SmallLMConfig`, or None: ZERO_GRAM."""
    arcs: Count = ARCS
    """The number of tokens that may follow a node: the likeliest ones of its state."""

    @property
    def draft_vocab_size(self) -> int:
        """The largest number of children of a node, which are its arcs."""
        return min(self.arcs, self.base.draft_vocab_size)
