"""A small language model that drafts, steered by the verifier's states (SD², Berdoz et al., arXiv:2511.09844).

Every token that it reads is read with the newest states of the target from before that token: of a committed token
those of the token before it, of a draft those of the token before the round's root, since the root itself the target
reads no earlier than the drafts. So one g steers all drafts of a round, and it changes at `commit` alone. A cached
draft that is accepted stays as it was read. The first token of a text, which nothing is before, is steered by zeros.

Drafting is that of the small model (`drafters/small_lm`), handed the bias. Read first: `models/steering.py`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.shared import check_depth
from hsd_jax.drafters.small_lm.draft import small_lm_drafter
from hsd_jax.drafters.small_lm.tree import Steered
from hsd_jax.drafters.steered.config import SteeredConfig
from hsd_jax.drafters.steered.steering import joined_features, steer
from hsd_jax.types import Drafter, DrawScheme


def steered_drafter(
    target_config: ModelConfig,
    config: SteeredConfig,
    tree: TreeConfig,
    cache_dtype: Any = jnp.float32,
    scheme: DrawScheme = DrawScheme.ARBITRARY,
) -> Drafter:
    """A `Drafter` as that of the small model, with the bias of the round in its MLPs.

    Raises:
      ValueError: as `small_lm_drafter`, for a tree deeper than was trained, or a target without these layers.
    """
    config.check_target(target_config)
    check_depth(tree, config.num_steps)
    width = len(config.steering_layers) * config.target_hidden_size
    steered = Steered(
        config.aux_layers, width, joined_features, lambda weights, features: steer(weights, config, features)
    )
    return small_lm_drafter(target_config, config, tree, cache_dtype, scheme, steered)
