"""Medusa: K heads that each predict one position ahead from the same feature, and a static tree.

The heads do not read each other's tokens, nor the root (Medusa, arXiv:2401.10774; blockwise parallel decoding,
arXiv:1811.03115). The shape of the tree, and the rank of each node among the tokens of its head, are fixed before
drafting. Typical acceptance, Medusa's rule above temperature 0, is lossy and not implemented.
"""

from __future__ import annotations

import heapq
import typing
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hsd_jax import validation
from hsd_jax.config import DrafterConfig, ModelConfig, TreeConfig
from hsd_jax.drafters.method import DraftingMethod, Training, check_tree, planning_of_trained
from hsd_jax.drafters.reading import newest_feature
from hsd_jax.infer import levels
from hsd_jax.infer.tree import coupled, grow_tree, token_free
from hsd_jax.kernels import ops
from hsd_jax.kernels.ops import matmul
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.draft_vocab import to_tokens
from hsd_jax.models.trunk import base_logits, init_fusion, trunk_features
from hsd_jax.types import (
    DRAWN_SCHEMES,
    NO_PARENT,
    Drafter,
    DraftTree,
    DrawScheme,
    ModelOutput,
    RoundInputs,
    Verdict,
    Weights,
)


@validation.dataclass
class MedusaConfig(DrafterConfig):
    """`num_steps` heads over one feature."""

    kind: ClassVar[str] = "medusa"


def init_weights(key: jax.Array, config: MedusaConfig) -> Weights:
    """Heads that add nothing yet, so the first logits are those of the feature."""
    rows = config.num_steps * config.hidden_size
    heads = {"kernel": jnp.zeros((rows, config.hidden_size)), "bias": jnp.zeros(rows)}
    return init_fusion(key, config) | {"heads": heads}


def head_states(
    weights: Weights, config: MedusaConfig, features: Float[Array, "... H"], num_states: int
) -> Float[Array, "... K H"]:
    """The states of the first K heads, f + SiLU(W_k f + b_k), for each feature f.

    References:
      Medusa (arXiv:2401.10774, section 2.1.1). As in blockwise parallel decoding (Stern et al., arXiv:1811.03115), all
      heads share the target's own LM head.
    """
    width = num_states * config.hidden_size
    added = matmul(features, weights["heads"]["kernel"][:width]) + weights["heads"]["bias"][:width].astype(jnp.float32)
    added = jax.nn.silu(added).reshape(*features.shape[:-1], num_states, config.hidden_size)
    return features[..., None, :] + added


def unroll(
    weights: Weights,
    config: MedusaConfig,
    features: Float[Array, "B T H"],
    embeddings: Float[Array, "B T H"] | None,
    anchors: Int[Array, "B A"],
    starts: Int[Array, "B T"] | None = None,
) -> Float[Array, "B A K H"]:
    """As `models.unroll.unroll`: the heads read the anchors' features and nothing else."""
    return head_states(weights, config, jax.vmap(lambda f, a: f[a])(features, anchors), config.num_steps)


FIRST_RANK, NEXT_RANK = 0.6, 0.3
"""A prior that only decides the shape of the tree: the probability that a head's likeliest token is right, and the
ratio of the probability of each further token to that of the one before."""


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class MedusaState:
    """The feature of the last position that the target has read: the second-to-last committed token."""

    feature: Float[Array, "B H"]


class StaticTree(typing.NamedTuple):
    """The nodes of a tree, the root first. A rank is that of the node's token in its head; the root's is 0."""

    parents: np.ndarray
    depths: np.ndarray
    ranks: np.ndarray


def static_tree(tree: TreeConfig) -> StaticTree:
    """The `tree.nodes` likeliest nodes under the prior, with ranks below `tree.width`, the likeliest first.

    The likelihood of a node is the product over its path. On a tie the shallower node comes first, then the node with
    the better first rank. With `tree.branching` the prior is not used: the children of every node are the best ranks.
    """
    if tree.branching is not None:
        return branching_tree(tree)
    parents, depths, ranks = [NO_PARENT], [0], [0]

    def offer(parent: int, score: float, path: tuple[int, ...]) -> None:
        for rank in range(tree.width):
            own = score * FIRST_RANK * NEXT_RANK**rank
            heapq.heappush(queue, (-own, len(path) + 1, (*path, rank), parent))

    queue: list = []
    offer(0, 1.0, ())
    while len(parents) < tree.nodes:
        score, depth, path, parent = heapq.heappop(queue)
        parents.append(parent)
        depths.append(depth)
        ranks.append(path[-1])
        if depth < tree.depth:
            offer(len(parents) - 1, -score, path)
    return StaticTree(*(np.array(x, np.int32) for x in (parents, depths, ranks)))


def branching_tree(tree: TreeConfig) -> StaticTree:
    """The layout of `levels.tree_of_levels`: level by level, the children of a node together, the likeliest first."""
    parents, depths, ranks, first = [NO_PARENT], [0], [0], 0
    for depth, count in enumerate(tree.branching or ()):
        above = first + levels.parents_of_level(tree, depth)
        first = len(parents)
        parents += above.tolist()
        depths += [depth + 1] * len(above)
        ranks += list(range(count)) * (len(above) // count)
    return StaticTree(*(np.array(x, np.int32) for x in (parents, depths, ranks)))


def lattice(target_config: ModelConfig, config: MedusaConfig, tree: TreeConfig, models, state: MedusaState):
    """As `DraftingMethod.lattice`: the logits of the heads. Drafted tokens add nothing to them."""
    with jax.named_scope("head"):
        states = head_states(models["drafter"], config, state.feature, tree.depth)
        return base_logits(models["drafter"], config, models["target"], target_config, states), None, state


def medusa_drafter(
    target_config: ModelConfig, config: MedusaConfig, tree: TreeConfig, cache_dtype: Any, scheme: DrawScheme
) -> Drafter:
    """A `Drafter` with a static tree of this size, or, if `scheme` draws, with trees drawn from the heads."""
    check_tree(target_config, config, tree, scheme)
    shape = static_tree(tree)

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        return MedusaState(jnp.zeros((len(length), target_config.hidden_size)))

    def read(models, state: MedusaState, output: ModelOutput, tokens, following, start, length: Int[Array, "B"]):
        """Keeps the prompt's last feature. A prompt of a single token has none."""
        features = trunk_features(models["drafter"], config, output.hidden, output.features)
        return MedusaState(newest_feature(features, start, length, state.feature))

    def draft(models, state: MedusaState, inputs: RoundInputs):
        logits, _, _ = lattice(target_config, config, tree, models, state)
        draft_to_target = models["drafter"].get("draft_to_target")
        if scheme in DRAWN_SCHEMES:
            return grow_tree(token_free(logits, None, draft_to_target), None, inputs, tree, scheme)[0], state
        if scheme is DrawScheme.COUPLED:
            logits = coupled(logits, draft_to_target, inputs, slice(tree.depth))
        guesses = to_tokens(draft_to_target, ops.top_k(logits, tree.width)[1])
        drafted = guesses[:, shape.depths[1:] - 1, shape.ranks[1:]]
        nodes = (len(inputs.root), tree.nodes)
        parents, depths = (jnp.broadcast_to(x, nodes) for x in (shape.parents, shape.depths))
        tokens = jnp.concatenate([inputs.root[:, None], drafted], 1).astype(jnp.int32)
        return DraftTree(tokens, parents, depths, jnp.ones(nodes, bool), scheme=scheme), state

    def commit(models, state: MedusaState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        features = trunk_features(models["drafter"], config, output.hidden, output.features)
        last = jnp.take_along_axis(verdict.path, jnp.maximum(num_committed - 1, 0)[:, None], 1)
        return MedusaState(cache_lib.take_nodes(features, last, axis=1)[:, 0])

    return Drafter(init, read, draft, commit, scheme, tree.depth, config.feature_layers, follow=commit)


def drafting_seconds(model: Any, config: MedusaConfig, rows: int, tree: TreeConfig) -> float:
    """One product for all heads, and one with the LM head."""
    heads = model.product(tree.depth * config.hidden_size**2, rows)
    logits = model.product(config.draft_vocab_size * config.hidden_size, rows * tree.depth)
    return float(heads + logits) + 20 * model.rates.operation_seconds


MEDUSA = DraftingMethod(
    MedusaConfig,
    medusa_drafter,
    planning_of_trained(drafting_seconds, has_score=False),
    Training(init_weights, unroll),
    lattice=lattice,
)
