"""The model for which a drafter is loaded, and the check that the drafter was trained for it."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from hsd_jax.config import ModelConfig
from hsd_jax.tokenizer import Tokenizer


class DraftedFor(NamedTuple):
    """A model for which a drafter is loaded."""

    config: ModelConfig
    hash: str
    """The fingerprint of the weights in its files, before any quantization."""
    tokenizer: Tokenizer | None

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary in its files, for which drafters are trained."""
        return self.config.stored_vocab_size or self.config.vocab_size

    @property
    def vocabulary_hash(self) -> str:
        """The hash of its tokenizer's vocabulary; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.vocabulary_hash

    def check_weights(self, trained_for: str, target_hash: str, vocabulary_hash: str, strict: bool) -> None:
        """Warns of a drafter that was trained for other weights of the right sizes, as those of a fine-tune.

        Its guesses change only the speed. A drafter for another vocabulary is refused. `strict` refuses any other
        weights. `trained_for` is text for messages. Nothing is checked if `target_hash` is empty.
        """
        if target_hash in ("", self.hash):
            return
        other = f"{trained_for}; this target is {self.hash[:12]}, same sizes but other weights"
        own = self.vocabulary_hash
        if vocabulary_hash and own and vocabulary_hash != own:
            other += f", and another vocabulary ({vocabulary_hash[:12]} there, {own[:12]} here)"
        elif not strict:
            doubt = "" if vocabulary_hash and own else ", and the vocabularies could not be compared"
            warnings.warn(f"{other}{doubt}: fewer drafts may be accepted; strict=True refuses it", stacklevel=2)
            return
        raise ValueError(other)
