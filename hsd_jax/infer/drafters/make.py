"""From a drafter's configuration to its functions: the one place that knows all kinds.

A new kind is a file beside this one, a configuration with its `kind`, and a line here.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hsd_jax.config import (
    FEATURE,
    HEADS,
    HIDDEN,
    NO_REUSE,
    AnyDrafterConfig,
    LookupConfig,
    ModelConfig,
    ReuseConfig,
    SmallLMConfig,
    TreeConfig,
)
from hsd_jax.infer.drafters.block import block_drafter
from hsd_jax.infer.drafters.feature import feature_drafter
from hsd_jax.infer.drafters.hidden import hidden_drafter
from hsd_jax.infer.drafters.lookup import lookup_drafter
from hsd_jax.infer.drafters.small_lm import small_lm_drafter
from hsd_jax.types import Drafter, DrawLaw


def make_drafter(
    target_config: ModelConfig,
    config: AnyDrafterConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    law: DrawLaw = DrawLaw.ARBITRARY,
    reuse: ReuseConfig = NO_REUSE,
) -> Drafter:
    """The drafter that `config` describes, with trees of this shape whose children are chosen as `law` says.

    Args:
      reuse: of spare states, which only the hidden-state drafter has.
    Raises:
      ValueError: if it cannot draft such trees, or not for this target.
    """
    if reuse != NO_REUSE and config.kind != HIDDEN:
        raise ValueError(f"reuse={str(reuse)!r}: a {config.kind} drafter has no spare states, allowed is {NO_REUSE}")
    if isinstance(config, LookupConfig):
        return lookup_drafter(config, tree, law)
    if isinstance(config, SmallLMConfig):
        return small_lm_drafter(target_config, config, tree, cache_dtype, law)
    if config.kind == HEADS:
        return block_drafter(target_config, config, tree, law)
    if config.kind == FEATURE:
        return feature_drafter(target_config, config, tree, cache_dtype, law)
    return hidden_drafter(target_config, config, tree, cache_dtype, law, reuse)
