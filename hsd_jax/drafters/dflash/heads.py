"""The heads of DSpark: token information from the previous token, and how likely a draft is accepted.

The Markov head adds W2 . f(W1[previous token], state) to the logits of a state (arXiv:2607.05147). Its weights
have the names of `hidden/weights.py`, and `reader` for the kinds that also read the state.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.drafters.dflash.weights import GATED, RNN, TOKEN, VANILLA, DFlashConfig
from hsd_jax.kernels.ops import matmul, take_rows
from hsd_jax.models.cache import take_nodes
from hsd_jax.types import DraftTree, Inject, Weights


class Above(NamedTuple):
    """What a Markov head hands from the nodes of a level to their children."""

    depth: Int[Array, "B w"]
    memory: Float[Array, "B w r"] | None
    """Of an RNN head."""


def injector(weights: Weights, config: DFlashConfig, slots: Float[Array, "B slots H"] | None) -> Inject | None:
    """The Markov head as `Inject`. None without such a head.

    `slots` are the normed states of all slots. A VANILLA head does not read them. Their products are computed once for
    all nodes of a level.
    """
    if config.rank == 0:
        return None
    own = weights["injector"]
    row_of = lambda tokens: take_rows(own["previous"], tokens)  # noqa: E731
    if config.markov_head == VANILLA:
        return lambda tokens, above: (matmul(row_of(tokens), own["bias"]), None)
    assert slots is not None, "a head that reads states has them"
    width, kernel = config.hidden_size, own["reader"]["kernel"]
    from_states, from_rows = kernel[:, :width], kernel[:, width:]
    if config.markov_head == RNN:  # its file has memory, row, state in this order
        from_rows, from_states = kernel[:, :-width], kernel[:, -width:]
    of_slots = matmul(slots, from_states) + own["reader"]["bias"].astype(jnp.float32)

    def step(slot: Int[Array, "B w"], row: Array, memory: Array | None) -> tuple[Array, Array | None]:
        """What W2 multiplies, and the memory after it."""
        of_state = take_nodes(of_slots, slot, axis=1)
        if config.markov_head == GATED:
            return jax.nn.sigmoid(of_state + matmul(row, from_rows)) * row, None
        memory = jnp.zeros_like(row) if memory is None else memory
        read = of_state + matmul(jnp.concatenate([memory, row], -1), from_rows)
        gate, candidate, out = jnp.split(read, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return jnp.tanh(out), gate * memory + (1 - gate) * jnp.tanh(candidate)

    def inject(tokens: Int[Array, "B w"], above: Above | None) -> tuple[Array, Above]:
        row = row_of(tokens)
        if above is None:
            above = Above(jnp.zeros_like(tokens), None)
            if config.markov_head == RNN and config.first_slot == 1:  # it also reads the slot of the anchor
                above = above._replace(memory=step(above.depth, row, None)[1])
        added, memory = step(above.depth + config.first_slot, row, above.memory)
        return matmul(added, own["bias"]), Above(above.depth + 1, memory)

    return inject


def confidence(
    weights: Weights, config: DFlashConfig, slots: Float[Array, "B slots H"], tree: DraftTree
) -> Float[Array, "B N"]:
    """The logit of the predicted acceptance of a draft after each node. That of a node without children has no meaning.

    It was trained to predict 1 minus the total variation distance of the two distributions.
    """
    head, width = weights["confidence"], config.hidden_size
    found = take_nodes(matmul(slots, head["kernel"][:, :width]), tree.depth + config.first_slot, axis=1)
    if config.confidence == TOKEN:
        found = found + matmul(take_rows(weights["injector"]["previous"], tree.tokens), head["kernel"][:, width:])
    return (found + head["bias"].astype(jnp.float32))[..., 0]


def with_confidence(tree: DraftTree, accepted: Float[Array, "B N"], max_depth: int) -> DraftTree:
    """The tree with a score by the confidence head. `accepted` are the logits of `confidence`.

    The likeliest child of a node is accepted with the predicted probability c. The other children share 1 - c in the
    ratio of the drafter's probabilities, of which the tree's own score tells. A tree without a score keeps none.
    """
    if tree.score is None:
        return tree
    parent = jnp.maximum(tree.parents, 0)
    is_child = tree.valid & (tree.depth > 0)
    at_parent = lambda x: jnp.take_along_axis(x, parent, 1)  # noqa: E731
    own = jnp.where(is_child, tree.score - at_parent(tree.score), -jnp.inf)
    are_siblings = (parent[:, :, None] == parent[:, None, :]) & is_child[:, None, :]
    best = jnp.max(jnp.where(are_siblings, own[:, None, :], -jnp.inf), -1)
    rest = jnp.log1p(-jnp.exp(jnp.fmin(best, -1e-6)))
    logit = at_parent(accepted)
    step = jnp.where(own >= best, jax.nn.log_sigmoid(logit), jax.nn.log_sigmoid(-logit) + jnp.fmin(own - rest, 0.0))
    step = jnp.where(is_child, jnp.fmin(step, 0.0), 0.0)  # a NaN, or a score above the parent's, separates a node
    score = step
    for _ in range(max_depth - 1):
        score = jnp.where(is_child, step + at_parent(score), 0.0)
    return dataclasses.replace(tree, score=jnp.where(tree.valid, score, -jnp.inf))
