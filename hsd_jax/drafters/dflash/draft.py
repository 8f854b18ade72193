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
import jax.numpy as jnp
from jaxtyping import Array, Float

from hsd_jax.config import NO_REUSE, NO_REUSE_FORM, REUSES, ModelConfig, ReuseConfig, TreeConfig, weights_of_layer
from hsd_jax.drafters.dflash.heads import confidence, injector, with_confidence
from hsd_jax.drafters.dflash.weights import NONE, PUBLISHED, VANILLA, DFlashConfig
from hsd_jax.drafters.hidden.draft import levels_seconds
from hsd_jax.drafters.hidden.reuse import logits_of_round, reusing_drafter
from hsd_jax.drafters.method import DraftingMethod, planning_of_trained
from hsd_jax.drafters.trunk_state import TrunkInputs, TrunkState
from hsd_jax.infer.tree import grow_tree, token_free
from hsd_jax.kernels.ops import embed, matmul
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.mask_block import block_states, context_pass, normed
from hsd_jax.models.trunk import base_logits
from hsd_jax.types import Drafter, DrawScheme, NewKV, RoundInputs


def context_features(
    models, config: DFlashConfig, _, features: tuple[Float[Array, "... H"], ...]
) -> Float[Array, "... H"]:
    """The projection of the target's features from which all layers make keys and values."""
    own = models["drafter"]["context"]
    return normed(own["norm"], config, matmul(jnp.concatenate(features, -1), own["kernel"]))


def run_slots(models, config: DFlashConfig, state: TrunkState) -> tuple[Float[Array, "B slots H"], NewKV]:
    """The states of all slots. All are computed for any tree, because slots see each other.

    Embeddings of the target are not scaled, as in training.
    """
    weights, table = models["drafter"], models["drafter" if config.has_embedding else "target"]["embedding"]
    anchor = cache_lib.take_nodes(state.next_tokens, jnp.maximum(state.num_pending - 1, 0)[:, None], axis=1)
    masks = jnp.full((len(anchor), config.block_size - 1), config.mask_token, anchor.dtype)
    block = embed(table, jnp.concatenate([anchor, masks], 1))
    return block_states(weights, config, state.pending, state.num_pending, block, state.cache)


def run_block(
    models, _, config: DFlashConfig, num_states: int, state: TrunkState
) -> tuple[Float[Array, "B K H"], NewKV]:
    """As `TrunkInputs.states`."""
    slots, kv = run_slots(models, config, state)
    return slots[:, config.first_slot :][:, :num_states], kv


INPUTS = TrunkInputs(lambda *_: None, context_features, context_pass, run_block)
"""The embedding of the anchor is read with the block. No other committed token is."""


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
        why = f"a {config.markov_head} Markov head reads states, and spare ones are only logits"
        raise ValueError(f"reuse={str(reuse)!r}: {why}, allowed is {NO_REUSE}")

    def draft(models, state: TrunkState, inputs: RoundInputs):
        weights, slots, num_levels = models["drafter"], None, None
        if reuses:
            of_round = target_config, config, tree, reuse, state, inputs.live, INPUTS
            logits, num_levels, state = logits_of_round(models, *of_round)
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
    return logits, normed(models["drafter"]["output_norm"], config, slots), dataclasses.replace(state, cache=cache)


def lattice(target_config: ModelConfig, config: DFlashConfig, tree: TreeConfig, models, state: TrunkState):
    """As `DraftingMethod.lattice`: the base logits, and the Markov head if there is one."""
    logits, slots, state = logits_and_slots(models, target_config, config, tree, state)
    return logits, injector(models["drafter"], config, slots), state


def drafting_seconds(model: Any, config: DFlashConfig, rows: int, tree: TreeConfig) -> float:
    """Seconds of a pass over the block, of a product of the used states with the head, and of the Markov head."""
    width = config.hidden_size
    fused = len(config.feature_layers) * width**2
    states = float(model.product(config.num_layers * weights_of_layer(config), rows * config.block_size))
    states += float(model.product(fused, rows * tree.depth)) + model.layers(config)
    logits = float(model.product(config.draft_vocab_size * width, rows * tree.depth))
    return states + logits + levels_seconds(model, config, rows, tree)


DFLASH = DraftingMethod(
    DFlashConfig,
    dflash_drafter,
    planning_of_trained(drafting_seconds),
    reuses=REUSES,
    published=PUBLISHED,
    lattice=lattice,
)
