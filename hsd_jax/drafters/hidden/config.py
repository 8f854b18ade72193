"""What is static of a hidden-state drafter."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

from hsd_jax.config import LAST, PARALLEL, RECURRENT, SLOTS, TRUNKS, TrunkConfig
from hsd_jax.settings import OneOf, Whole

PREVIOUS, PATH = INJECTIONS = ("previous", "path")
"""What token information knows: the token before, or all drafted tokens up to it (`weights.py`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenConfig(TrunkConfig):
    """A trunk that never reads a drafted token, and token information added to its logits."""

    kind: ClassVar[str] = "hidden"

    trunk: Annotated[str, OneOf(TRUNKS)] = RECURRENT
    slots: Annotated[str, OneOf(SLOTS)] = LAST
    slot_mixing: bool = False
    feature_keys: bool = False
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
        check_slots(self, "DrafterConfig")


OF_SLOTS = {"slots": LAST, "slot_mixing": False, "feature_keys": False}
"""Settings that are about the slots of a parallel trunk, and what they are without one."""


def check_slots(config: Any, where: str) -> None:
    """Raises a ValueError for a setting of slots where the trunk has none, or which changes nothing."""
    for name, plain in OF_SLOTS.items():
        value = getattr(config, name)
        if value != plain and config.trunk != PARALLEL:
            raise ValueError(f"{where}.{name}={value!r}: is about slots, so {where}.trunk must be {PARALLEL!r}")
    if config.feature_keys and config.num_layers == 1:
        raise ValueError(
            f"{where}.feature_keys=True: in a trunk of one layer features give nothing but keys and values anyway; drop"
            f" it, or set {where}.num_layers to 2 or more"
        )
