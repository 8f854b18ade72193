"""Labels from the drafter's own text (DistillSpec): it samples chains, and the target reads all of them in one pass.

If states read no drafted token, they are unrolled as usual, and only the previous tokens and the target's distributions
change. Medusa heads and drafters of rank 0 do not read a previous token either, so for them only the target's
distributions change (methods.md 7.4). EAGLE's states are unrolled again, each after a draw from the state before. Each
draw adds a node to a pass of the target.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.config import ModelConfig
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.draft_vocab import to_tokens
from hsd_jax.models.target import forward, sequence_layout
from hsd_jax.types import Inject, Weights


def sample_chains(
    key: jax.Array,
    base: Float[Array, "B A K C"],
    root: Int[Array, "B A"],
    inject: Inject | None,
    draft_to_target: Int[Array, "C"] | None = None,
) -> Int[Array, "B A D"]:
    """Draws d_1 .. d_D after each root, D = K - 1, at temperature 1 from base logits plus token information, if any.

    The token of depth K is not drawn, because no later depth could depend on it. Consumes the key.
    """
    chain, previous, above = [], root, None
    for depth in range(base.shape[2] - 1):
        logits = base[:, :, depth]
        if inject is not None:
            added, above = inject(previous, above)
            logits += added
        previous = draw(jax.random.fold_in(key, depth), logits, draft_to_target)
        chain.append(previous)
    return jnp.stack(chain, 2)


def draw(
    key: jax.Array, logits: Float[Array, "... C"], draft_to_target: Int[Array, "C"] | None = None
) -> Int[Array, "..."]:
    """Draws tokens at temperature 1. No gradient reaches the logits. Consumes the key."""
    drawn = jax.random.categorical(key, lax.stop_gradient(logits))
    return to_tokens(draft_to_target, drawn).astype(jnp.int32)


def read_chains(
    weights: Weights,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    anchors: Int[Array, "B A"],
    chains: Int[Array, "B A D"],
    starts: Int[Array, "B T"] | None = None,
) -> Float[Array, "B A D H"]:
    """The target's final states after every drafted token, from one pass over the row and all chains.

    Tokens of the row see the past of their document. The k-th token of the chain of anchor a is k positions after the
    root a + 1. It sees what the root sees, the root, and its own chain up to itself.
    """
    (batch, length), (num, depth) = tokens.shape, chains.shape[1:]
    nodes = num * depth
    row_positions, sees = sequence_layout(batch, length, starts)
    positions = take_nodes(row_positions, anchors + 1, axis=1)[:, :, None] + 1 + jnp.arange(depth)
    before = jnp.repeat(take_nodes(sees, anchors + 1, axis=1), depth, axis=1)
    own = np.kron(np.eye(num, dtype=bool), np.tril(np.ones((depth, depth), bool)))
    of_rows = jnp.concatenate([sees, jnp.zeros((batch, length, nodes), bool)], -1)
    of_nodes = jnp.concatenate([before, jnp.broadcast_to(own, (batch, nodes, nodes))], -1)
    output = forward(
        weights,
        config,
        jnp.concatenate([tokens, chains.reshape(batch, nodes)], 1),
        jnp.concatenate([row_positions, positions.reshape(batch, nodes)], 1),
        jnp.concatenate([of_rows, of_nodes], 1),
    )
    return output.hidden[:, length:].reshape(batch, num, depth, -1)  # XLA drops the logits
