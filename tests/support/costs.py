"""A model of costs of a pair that is made up, on a processor that is made up."""

from __future__ import annotations

from hsd_jax.planning.costs import CostModel
from hsd_jax.planning.rates import Rates
from support import toy


def cost_model(skips_positions: bool = True, **rates: float) -> CostModel:
    """A target of 15 M weights in bfloat16. Greedy drafts are accepted with probability 0.9, sampled ones with 0.7.

    Args:
      rates: what differs from the processor's rates.
    """
    target = toy.target_config(hidden_size=512, num_layers=6, intermediate_size=1408, vocab_size=4096)
    known = {"profile": (0.9,) * 7, "sampled_profile": (0.7,) * 7, "num_steps": 7, "rank": 128}
    drafter = toy.drafter_config(target, intermediate_size=1024, **known)
    return CostModel(target, drafter, Rates(5e10, 1.6e11, 3e-6, skips_positions=skips_positions, **rates), 2, 2)
