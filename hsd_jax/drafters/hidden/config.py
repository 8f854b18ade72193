"""What is static of a hidden-state drafter."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from hsd_jax.config import RECURRENT, TRUNKS, TrunkConfig
from hsd_jax.settings import OneOf, Whole

PREVIOUS, PATH = INJECTIONS = ("previous", "path")
"""What token information knows: the token before, or all drafted tokens up to it (`weights.py`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenConfig(TrunkConfig):
    """A trunk that never reads a drafted token, and token information added to its logits."""

    kind: ClassVar[str] = "hidden"

    trunk: Annotated[str, OneOf(TRUNKS)] = RECURRENT
    rank: Whole = 128
    injection: Annotated[str, OneOf(INJECTIONS)] = PREVIOUS
    gated: bool = False
    """Whether what token information adds depends on the state of the slot (`weights.py`)."""
    shortlist: Whole = 0
    """Tokens of a slot, the likeliest by its base logits, that token information adds to; 0: all."""
    committed_embeddings: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.gated and not self.rank:
            raise ValueError("HiddenConfig.gated=True with rank=0: without token information there is nothing to gate")
        if self.shortlist and not self.rank:
            raise ValueError(f"HiddenConfig.shortlist={self.shortlist} with rank=0: there is no token information")
