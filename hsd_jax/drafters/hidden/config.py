"""The configuration of a hidden-state drafter."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from hsd_jax import validation
from hsd_jax.config import RECURRENT, TRUNKS, TrunkConfig
from hsd_jax.validation import OneOf, Whole

PREVIOUS, PATH = INJECTIONS = ("previous", "path")
"""What token information reads: the previous token, or all drafted tokens up to it (`weights.py`)."""


@validation.dataclass
class HiddenConfig(TrunkConfig):
    """A trunk that never reads a drafted token, and token information that is added to its logits."""

    kind: ClassVar[str] = "hidden"

    _: dataclasses.KW_ONLY
    trunk: Annotated[str, OneOf(TRUNKS)] = RECURRENT
    rank: Whole = 128
    injection: Annotated[str, OneOf(INJECTIONS)] = PREVIOUS
    committed_embeddings: bool = True
