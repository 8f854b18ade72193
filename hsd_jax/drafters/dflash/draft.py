"""The DFlash and DSpark drafters: one pass over a block, one product with the head, and a tree along paths.

No state reads a drafted token, so trees grow as in `hidden/`, and spare states are reused as there. But the states read
the anchor. A spare state has read the anchor of an earlier round, and the committed tokens after that neither as tokens
nor as context. It still predicts its absolute position, as it did in its own round at its depth. So every form of reuse
is as sound as in `hidden/`. The forms are refused for Markov heads that read states, since only logits are kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from hsd_jax.config import NO_REUSE, NO_REUSE_FORM, REUSES, ModelConfig, ReuseConfig, TreeConfig, weights_of_layer
from hsd_jax.drafters.dflash.block import INPUTS, NONE, VANILLA, DFlashConfig, run_slots
from hsd_jax.drafters.dflash.files import PUBLISHED
from hsd_jax.drafters.dflash.heads import confidence, injector, with_confidence
from hsd_jax.drafters.hidden.reuse import logits_of_round, reusing_drafter
from hsd_jax.drafters.method import DraftingMethod, planning_of_trained
from hsd_jax.drafters.trunk_state import TrunkState
from hsd_jax.infer.tree import grow_tree, token_free
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.trunk import base_logits, normed_states
from hsd_jax.types import Drafter, DrawScheme, RoundInputs


def dflash_drafter(
    target_config: ModelConfig,
    config: DFlashConfig,
    tree: TreeConfig,
    cache_dtype: Any,
    scheme: DrawScheme,
    reuse: ReuseConfig = NO_REUSE,
) -> Drafter:
    """The `Drafter`. With reuse the confidence head is not used, because spare states are only logits."""
    reuses = reuse.form != NO_REUSE_FORM
    if reuses and config.rank and config.markov_head != VANILLA:
        raise ValueError(
            f"reuse={str(reuse)!r}: a {config.markov_head} Markov head reads states and spare ones are only logits,"
            f" allowed is {NO_REUSE}"
        )

    def draft(models, state: TrunkState, inputs: RoundInputs):
        weights, slots, num_levels = models["drafter"], None, None
        if reuses:
            of_round = models, target_config, config, tree, reuse, state, inputs.live, INPUTS
            logits, num_levels, state = logits_of_round(*of_round)
        else:
            logits, slots, state = logits_and_slots(models, target_config, config, tree, state)
        with jax.named_scope("tree"):
            expand = token_free(logits, injector(weights, config, slots), weights.get("draft_to_target"))
            drafted, _ = grow_tree(expand, None, inputs, tree, scheme, num_levels)
            if slots is not None and config.confidence != NONE:
                drafted = with_confidence(drafted, confidence(weights, config, slots, drafted), tree.depth)
        return drafted, state

    return reusing_drafter(target_config, config, tree, draft, cache_dtype, scheme, reuse, INPUTS)


def logits_and_slots(
    models, target_config: ModelConfig, config: DFlashConfig, tree: TreeConfig, state: TrunkState
) -> tuple[Float[Array, "B D C"], Float[Array, "B slots H"], TrunkState]:
    """The base logits for a tree, the normed states of all slots, and the state with the pending features committed."""
    with jax.named_scope("trunk"):
        slots, kv = run_slots(models, config, state)
        cache = cache_lib.commit(state.cache, kv, None, state.num_pending, after=slots[:, -1])
    with jax.named_scope("head"):
        states = slots[:, config.first_slot :][:, : tree.depth]
        logits = base_logits(models["drafter"], config, models["target"], target_config, states)
    return logits, normed_states(models["drafter"], config, slots), dataclasses.replace(state, cache=cache)


def lattice(target_config: ModelConfig, config: DFlashConfig, tree: TreeConfig, models, state: TrunkState):
    """As `DraftingMethod.lattice`: the base logits, and the Markov head if there is one."""
    logits, slots, state = logits_and_slots(models, target_config, config, tree, state)
    return logits, injector(models["drafter"], config, slots), state


LEVEL_OPERATIONS = 12
"""Small operations of each level of a chain, as for `hidden/`, whose levels do the same."""


def drafting_seconds(model: Any, config: DFlashConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of a pass over the block, of a product of the used states with the head, and of the Markov head."""
    width, small = config.hidden_size, model.rates.operation_seconds
    fused = len(config.feature_layers) * width**2
    states = float(model.product(config.num_layers * weights_of_layer(config), rows * config.block_size))
    states += float(model.product(fused, rows * tree.depth)) + model.layers(config)
    logits = float(model.product(config.draft_vocab_size * width, rows * tree.depth))
    bias = float(model.product(config.rank * config.draft_vocab_size, rows * tree.most_expanded))
    level = LEVEL_OPERATIONS * small * (model.rates.wide_levels if tree.width > 1 else 1.0)
    return states + logits + tree.depth * (bias + level)


DFLASH = DraftingMethod(
    DFlashConfig,
    dflash_drafter,
    planning_of_trained(drafting_seconds),
    reuses=REUSES,
    published=PUBLISHED,
    lattice=lattice,
)
