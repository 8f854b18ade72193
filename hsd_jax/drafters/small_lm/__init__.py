"""An independent small language model (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318)."""

from __future__ import annotations

from typing import Any

from hsd_jax.config import TreeConfig, layer_numbers
from hsd_jax.drafters.method import Method
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.small_lm.draft import small_lm_drafter

DEFAULT_CHAIN = TreeConfig(nodes=5, depth=4, width=1)
"""A small model pays for each token of its chain."""


def drafting_seconds(costs: Any, config: SmallLMConfig, batch: int, tree: TreeConfig) -> float:
    """A pass of the model for every token of the chain."""
    numbers = config.num_layers * layer_numbers(config) + config.vocab_size * config.hidden_size
    one = float(costs.product(numbers, batch, costs.drafter_itemsize)) + costs.layer_seconds(config.num_layers)
    return tree.depth * one


SMALL_LM = Method(
    SmallLMConfig, small_lm_drafter, lambda config: DEFAULT_CHAIN, lambda config: 7, drafting_seconds, grows_wide=False
)
