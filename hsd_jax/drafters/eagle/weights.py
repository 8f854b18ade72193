"""The weights of an EAGLE drafter. Its trunk reads drafted tokens, so it needs no token information."""

from __future__ import annotations

import jax

from hsd_jax.drafters.eagle.config import EagleConfig
from hsd_jax.models.trunk import init_fusion, init_trunk
from hsd_jax.types import Weights


def init_weights(key: jax.Array, config: EagleConfig) -> Weights:
    """Random float32 weights. The trunk equals that of a hidden-state drafter with the same key."""
    return init_fusion(key, config) | {"trunk": init_trunk(jax.random.split(key)[0], config)}
