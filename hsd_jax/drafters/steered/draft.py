"""A small language model that drafts, steered by the target's states (SD², Berdoz et al., arXiv:2511.09844).

Each token is read with the newest states that the target has computed for earlier tokens. For a committed token these
are the states of the token before it. For a draft they are the states of the token before the round's root, because the
target reads the root only together with the drafts. So one vector g steers all drafts of a round, and it changes only
at `commit`. If a cached draft is accepted, its cache entry does not change. The first token of a text has no token
before it and is steered by zeros.

Drafting is that of the small model (`drafters/small_lm`), with this bias.
"""

from __future__ import annotations

from typing import Any

from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.shared import check_depth
from hsd_jax.drafters.small_lm.draft import small_lm_drafter
from hsd_jax.drafters.small_lm.tree import Steered
from hsd_jax.drafters.steered.config import SteeredConfig
from hsd_jax.drafters.steered.steering import steer
from hsd_jax.types import Drafter, DrawScheme


def steered_drafter(
    target_config: ModelConfig, config: SteeredConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Drafter:
    """The `Drafter` of the small model, with the bias of the round in its MLPs."""
    config.check_target(target_config)
    check_depth(tree, config.num_steps)
    width = len(config.steering_layers) * config.target_hidden_size
    steered = Steered(config.feature_layers, width, lambda weights, features: steer(weights, config, features))
    return small_lm_drafter(target_config, config, tree, cache_dtype, scheme, steered)
