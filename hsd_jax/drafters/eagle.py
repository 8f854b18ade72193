"""The EAGLE drafter: a recurrent drafter that reads the drafted tokens, with one trunk pass and one head per level.

The trunk computes the state after a node from the state of its parent and the embedding of its own token. So the states
of siblings differ, and a tree grows level by level (EAGLE, arXiv:2401.15077). The drafter's confidence decides its
shape, and the best nodes of all levels are verified (EAGLE-2, arXiv:2406.16858, section 4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jaxtyping import Array

from hsd_jax import validation
from hsd_jax.config import ModelConfig, TreeConfig, TrunkConfig, weights_of_trunk
from hsd_jax.drafters.method import DraftingMethod, Training, planning_of_trained
from hsd_jax.drafters.reading import Ancestry, at_root
from hsd_jax.drafters.trunk_state import FROM_TARGET, TrunkInputs, TrunkState, trunk_drafter, trunk_states
from hsd_jax.infer.tree import grow_tree
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.trunk import base_logits, init_fusion, init_trunk, trunk_pass
from hsd_jax.models.unroll import unroll
from hsd_jax.types import Candidates, Drafter, DrawScheme, NewKV, RoundInputs, Weights


@validation.dataclass
class EagleConfig(TrunkConfig):
    """A recurrent trunk that reads the embeddings of drafted tokens."""

    kind: ClassVar[str] = "eagle"
    reads_drafts: ClassVar[bool] = True


def init_weights(key: jax.Array, config: EagleConfig) -> Weights:
    """Random float32 weights. The trunk equals that of a hidden-state drafter with the same key."""
    return init_fusion(key, config) | {"trunk": init_trunk(jax.random.split(key)[0], config)}


def eagle_drafter(
    target_config: ModelConfig, config: EagleConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Drafter:
    """The `Drafter`."""

    def say(models, states: Array) -> tuple[Array, Array]:
        return base_logits(models["drafter"], config, models["target"], target_config, states), states

    return drafter_of_levels(target_config, config, tree, cache_dtype, scheme, say)


def drafter_of_levels(
    target_config: ModelConfig,
    config: TrunkConfig,
    tree: TreeConfig,
    cache_dtype: Any,
    scheme: DrawScheme,
    say: Callable[..., tuple[Array, Array]],
    trunk_inputs: TrunkInputs = FROM_TARGET,
) -> Drafter:
    """The `Drafter` of a trunk that reads drafted tokens.

    A round costs `tree.depth` trunk passes and as many products with the head. The first pass reads the pending
    features, and each other pass reads up to `width` nodes.

    Args:
      say: `say(models, states) -> (logits, states)`: what the trunk's states say, and the states that the next level
        reads.
    """

    def draft(models, state: TrunkState, inputs: RoundInputs):
        with jax.named_scope("trunk"):
            first, cache = trunk_states(models, target_config, config, 1, state, trunk_inputs)

        def expand(level: int, tokens: Array, parents: Array, above: tuple[Array, Ancestry]):
            """Computes the state after a node from its token and its parent's state. The root's state is `first`."""
            states, ancestry = above
            if level > 0:
                embeddings = trunk_inputs.embed(models, target_config, config, tokens)
                before = cache_lib.take_nodes(states, parents, axis=1)

                def read(positions: Array, sees: Array, earlier: NewKV | None):
                    return trunk_pass(models["drafter"], config, before, embeddings, positions, sees, cache, earlier)

                states, ancestry = ancestry.next_level(cache, level, parents, read)
            logits, states = say(models, states)
            return Candidates(logits, models["drafter"].get("draft_to_target")), (states, ancestry)

        with jax.named_scope("tree"):
            drafted, _ = grow_tree(expand, (first, at_root(len(first))), inputs, tree, scheme)
        return drafted, dataclasses.replace(state, cache=cache)

    return trunk_drafter(target_config, config, tree, draft, cache_dtype, scheme, inputs=trunk_inputs)


def drafting_seconds(model: Any, config: EagleConfig, rows: int, tree: TreeConfig) -> float:
    """A trunk pass and a product with the head for every level."""
    positions = rows * tree.most_expanded
    trunk, head = weights_of_trunk(config), config.draft_vocab_size * config.hidden_size
    level = model.product(trunk, positions) + model.product(head, positions)
    return tree.depth * (float(level) + model.layers(config) + 10 * model.rates.operation_seconds)


EAGLE = DraftingMethod(
    EagleConfig, eagle_drafter, planning_of_trained(drafting_seconds), Training(init_weights, unroll)
)
