"""The configuration of a small language model that drafts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hsd_jax import validation
from hsd_jax.config import ModelConfig
from hsd_jax.validation import Count


@validation.dataclass
class DraftingModel(ModelConfig):
    """A language model with the vocabulary size of the model for which it drafts.

    If its files have more rows, the last ones are cut off. If they have fewer, rows of zeros follow, and the model
    neither knows nor drafts these tokens.
    """

    stored_vocab_size: Count | None = dataclasses.field(default=None, repr=False)
    """The number of rows in its files. None: `vocab_size`."""


@validation.dataclass
class SmallLMConfig(DraftingModel):
    """An independent language model in the role of a drafter."""

    kind: ClassVar[str] = "small_lm"
    feature_layers: ClassVar[tuple[int, ...]] = ()
    """It reads no layer of the target."""

    fingerprint: str = dataclasses.field(default="", repr=False, compare=False)
    """Fingerprint of the weights in its files, with which drafters that were trained for it are checked. Empty if it
    was not computed."""
