"""Prompt lookup: drafts by copying the tokens that followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from hsd_jax.drafters.lookup.config import LookupConfig
from hsd_jax.drafters.lookup.draft import lookup_drafter
from hsd_jax.drafters.method import DraftingMethod, Planning

LOOKUP = DraftingMethod(LookupConfig, lookup_drafter, Planning(has_score=False), parse=LookupConfig.parse)
