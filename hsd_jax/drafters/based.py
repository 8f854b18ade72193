"""A drafter's configuration that stands on another's, its `base`, and answers as the base where plans and trees ask."""

from __future__ import annotations

from hsd_jax.config import DrafterConfig


class Based:
    """What is asked of the configuration of any drafter that is trained, from the base."""

    base: DrafterConfig

    @property
    def num_steps(self) -> int:
        return self.base.num_steps

    @property
    def draft_vocab_size(self) -> int:
        """What the base may draft; lookup copies any token."""
        return self.base.draft_vocab_size

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def profile(self) -> tuple[float, ...]:
        """That of the base alone: what stands on it is taken to do no harm."""
        return self.base.profile

    @property
    def sampled_profile(self) -> tuple[float, ...]:
        return self.base.sampled_profile
