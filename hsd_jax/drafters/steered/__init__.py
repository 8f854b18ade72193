"""SD²: a small language model that drafts, steered by the verifier's states (arXiv:2511.09844)."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import TreeConfig
from hsd_jax.drafters import small_lm
from hsd_jax.drafters.method import Method, Planning
from hsd_jax.drafters.steered.config import SteeredConfig
from hsd_jax.drafters.steered.draft import steered_drafter
from hsd_jax.drafters.steered.files import load_steered


def drafting_seconds(costs: Any, config: SteeredConfig, batch: int, tree: TreeConfig) -> float:
    """As the small model, and once a round what steers it."""
    width = config.target_hidden_size
    numbers = width * (config.num_layers * config.intermediate_size + len(config.steering_layers) * width)
    once = float(costs.product(numbers, batch))
    return once + small_lm.drafting_seconds(costs, config, batch, tree)


STEERED = Method(
    SteeredConfig,
    steered_drafter,
    Planning(
        drafting_seconds,
        lambda config: TreeConfig.chain(min(small_lm.DEFAULT_CHAIN.depth, config.num_steps)),
        lambda config: min(small_lm.SMALL_LM.planning.max_depth(config), config.num_steps),
        ends_early=True,
    ),
    load=load_steered,
)
