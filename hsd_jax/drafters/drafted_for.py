"""The model that a drafter is loaded for, and what becomes of a drafter that was trained for other weights."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from hsd_jax.config import ModelConfig
from hsd_jax.tokenizer import Tokenizer


class DraftedFor(NamedTuple):
    """A model that a drafter is loaded for."""

    config: ModelConfig
    hash: str
    """Of the weights in its files, whatever they were quantized to."""
    tokenizer: Tokenizer | None

    @property
    def vocabulary_hash(self) -> str:
        """Of its tokenizer; empty without one."""
        return "" if self.tokenizer is None else self.tokenizer.vocabulary_hash

    def check_weights(self, trained_for: str, target_hash: str, vocabulary_hash: str, strict: bool) -> None:
        """Looks twice at a drafter of the right sizes that was trained for other weights: a fine-tune, or before one.

        It is taken with a warning: no text depends on what a drafter guesses, only the speed does.

        Args:
          trained_for: says of what the drafter was trained for, for messages.
          target_hash: of the target that it was trained for; empty if it does not say, and then nothing is checked.
          vocabulary_hash: of that target's tokenizer; empty if it does not say.
          strict: whether it is refused in any case.
        Raises:
          ValueError: naming both targets, if `strict`, or if the vocabularies differ.
        """
        if target_hash in ("", self.hash):
            return
        other = f"{trained_for}; this target is {self.hash[:12]}, same sizes but other weights"
        own = self.vocabulary_hash
        if vocabulary_hash and own and vocabulary_hash != own:
            other += f", and another vocabulary ({vocabulary_hash[:12]} there, {own[:12]} here)"
        elif not strict:
            unknown = "the drafter's file does not say" if own else "the target has no tokenizer to tell"
            doubt = "" if vocabulary_hash and own else f" Whether the vocabularies agree, {unknown}."
            warnings.warn(
                f"{other}. It drafts all the same: no text depends on that, but the further the two are apart the less"
                f" it guesses right.{doubt} strict=True refuses it.",
                stacklevel=2,
            )
            return
        raise ValueError(f"{other}. Take its own drafter or train one")
