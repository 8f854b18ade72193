"""PEARL: a small model that drafts while its last drafts are verified (arXiv:2408.11850)."""

from __future__ import annotations

from hsd_jax.config import TreeConfig
from hsd_jax.drafters import small_lm
from hsd_jax.drafters.method import DraftingMethod, Planning
from hsd_jax.drafters.pearl.draft import PearlConfig, pearl_drafter
from hsd_jax.drafters.pearl.overlap import Overlapped

PEARL = DraftingMethod(
    PearlConfig,
    pearl_drafter,
    Planning(
        # As the small model alone, because nothing overlaps on one device.
        lambda model, config, *call: small_lm.drafting_seconds(model, config.base, *call),
        lambda config: TreeConfig.chain(config.gamma),
        lambda config: config.gamma,
        has_score=False,
    ),
    overlapped=Overlapped,
)
