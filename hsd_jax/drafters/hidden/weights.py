"""Token information: what drafted tokens add to the logits of token-free states, and the weights of the whole drafter.

The injector adds a low-rank bias after the LM head, from the previous token or from the path up to it. The trunk is
`models/trunk.py`. Read next: `draft.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hsd_jax.drafters.hidden.config import PATH, HiddenConfig
from hsd_jax.kernels.ops import matmul, rms_norm, rows_of, top_k
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.trunk import init_fusion, init_trunk, normed_states
from hsd_jax.types import NO_PARENT, Weights


class Slots(NamedTuple):
    """What token information asks of the slots that it corrects."""

    gate: Float[Array, "... r"] | None = None
    """1 + H h of their normed states: what is read of tokens is multiplied by it. None: it is not gated."""
    columns: Int[Array, "... S"] | None = None
    """The likeliest by their base logits: the others keep these. None: all are corrected."""


NO_SLOTS = Slots()
"""It asks nothing."""


def slots_of(
    weights: Weights, config: HiddenConfig, states: Float[Array, "... H"] | None, logits: Float[Array, "... C"]
) -> Slots:
    """What it asks of slots whose base logits these are.

    Args:
      states: before the output norm.
    """
    gate, columns = None, None
    if config.gated:
        assert states is not None, "others were refused"
        gate = 1.0 + matmul(normed_states(weights, config, states), weights["injector"]["gate"])
    if config.shortlist:
        found = top_k(lax.stop_gradient(logits), min(config.shortlist, logits.shape[-1]))
        # XLA on CPU would move the slice of a level before the search, and then sort: 2.4 ms in place of 0.04.
        _, columns, _ = lax.optimization_barrier(found)
    return Slots(gate, columns)


def level_slots(
    weights: Weights, config: HiddenConfig, states: Float[Array, "B K H"] | None, logits: Float[Array, "B K C"]
) -> Slots:
    """The same with an axis of one for the nodes of a level, for trees."""
    return slots_of(weights, config, None if states is None else states[:, None], logits[:, None])


def init_weights(key: jax.Array, config: HiddenConfig) -> Weights:
    """Random float32 weights; the injector adds nothing yet, so the first logits are those of the trunk.

    These are the weights that are learned; with a reduced draft vocabulary `draft_vocab.attach` adds the rest.
    """
    weights = init_fusion(key, config)
    trunk_key, table_key = jax.random.split(key)
    weights["trunk"] = init_trunk(trunk_key, config)
    if config.rank > 0:
        weights["injector"] = {
            "previous": jax.random.normal(table_key, (config.vocab_size, config.rank)),
            "norm": jnp.ones(config.rank),
            "bias": jnp.zeros((config.draft_vocab_size, config.rank)),
        }
        if config.injection == PATH:
            weights["injector"]["path"] = jnp.zeros((config.rank, config.rank))
        if config.gated:
            weights["injector"]["gate"] = jnp.zeros((config.rank, config.hidden_size))
    return weights


def read_token(
    weights: Weights, config: HiddenConfig, token: Int[Array, "..."], above: Float[Array, "... r"] | None = None
) -> Float[Array, "... r"]:
    """What the injector has read at a token: RMSNorm(W1[token] + R . above) of the token's `rank`.

    Args:
      token: any token, cold ones too (methods.md, A10).
      above: what it had read on the token's parent; None at a root. Without a path, R is zero.
    """
    if config.rank == 0:
        return jnp.zeros((*token.shape, 0))
    row = rows_of(weights["injector"]["previous"], token)
    if above is not None and config.injection == PATH:
        row = row + matmul(above, weights["injector"]["path"])
    return rms_norm(row, weights["injector"]["norm"], config.norm_eps)


def token_bias(
    weights: Weights, config: HiddenConfig, read: Float[Array, "... r"], slots: Slots = NO_SLOTS
) -> Float[Array, "... C"]:
    """The bias after a token: what is read, gated by the slot, . W2; C are the tokens that may be drafted.

    The gate multiplies what W2 reads, not what is handed on along the path: that is the same whatever the states.
    A drafter of rank 0 was trained without token information.
    """
    if config.rank == 0:
        return jnp.zeros((*read.shape[:-1], config.draft_vocab_size))
    if slots.gate is not None:
        read = read * slots.gate
    if slots.columns is None:
        return matmul(read, weights["injector"]["bias"])
    # Not by W2 whole: width x S x r a level in place of width x C x r.
    added = jnp.einsum("...sr,...r->...s", rows_of(weights["injector"]["bias"], slots.columns), read)
    nothing, columns = (
        jnp.zeros((*read.shape[:-1], config.draft_vocab_size)),
        jnp.broadcast_to(slots.columns, added.shape),
    )
    return jnp.put_along_axis(nothing, columns, added, axis=-1, inplace=False)


def inject(
    weights: Weights,
    config: HiddenConfig,
    slots: Slots,
    level: Int[Array, ""] | int,
    tokens: Int[Array, "..."],
    above: Float[Array, "... r"] | None,
) -> tuple[Float[Array, "... C"], Float[Array, "... r"] | None]:
    """The bias after each token, and what its children need of it: `above` of their own call, None without a path.

    The bias is zero at initialisation (methods.md 1.5, 3).
    """
    read = read_token(weights, config, tokens, above)
    own = jax.tree.map(lambda x: x[..., level, :], slots)
    return token_bias(weights, config, read, own), read if config.injection == PATH else None


def read_paths(weights: Weights, config: HiddenConfig, paths: Int[Array, "... K"]) -> Float[Array, "... K r"]:
    """What the injector has read on each token of paths that start at their roots."""
    if config.injection != PATH:
        return read_token(weights, config, paths.reshape(-1)).reshape(*paths.shape, -1)
    read = [read_token(weights, config, paths[..., 0])]
    for k in range(1, paths.shape[-1]):
        read.append(read_token(weights, config, paths[..., k], read[-1]))
    return jnp.stack(read, -2)


def read_tree(
    weights: Weights, config: HiddenConfig, tokens: Int[Array, "B N"], parents: Int[Array, "B N"], num_levels: int
) -> Float[Array, "B N r"]:
    """What the injector has read on each node of trees with this many levels below their roots, all nodes at once."""
    read = read_token(weights, config, tokens)
    if config.injection == PATH:
        for _ in range(num_levels):
            above = jnp.where((parents != NO_PARENT)[..., None], take_nodes(read, jnp.maximum(parents, 0), axis=1), 0.0)
            read = read_token(weights, config, tokens, above)
    return read
