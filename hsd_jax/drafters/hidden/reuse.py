"""Spare states: trunk states for positions beyond the tokens that a round committed, and how later rounds use them.

A trunk state reads no drafted token. So the states after a rejected draft stay valid: they still predict the same
absolute positions (Lyanna, arXiv:2602.21224; methods.md 1.5 step 6). Only their base logits are kept, because a tree
needs nothing else of a state. This module uses neither trunks nor targets.

Forms (`config.REUSES`), with K states per trunk run:
    none   the trunk runs in every round, and spare states are dropped
    sum    the base logits are added to the spare base logits of the same position
    skip   a row with enough spare states drafts only from these; the trunk runs if some row has too few
    ahead  the tree grows from the states of the last round, while the trunk runs for the next round
"""

from __future__ import annotations

import typing

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hsd_jax.config import AHEAD, NO_REUSE_FORM, SKIP, SUM, DrafterConfig, ReuseConfig, TreeConfig
from hsd_jax.models.cache import take_nodes


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class Spares:
    """Base logits of the states of one trunk run that are ahead of each row's root.

    `logits[:, j - 1]` predict the token j positions after the root, for j up to `num`. Later entries are meaningless. A
    row that has committed c tokens since its trunk ran has `num` = K - c.
    """

    logits: Float[Array, "B K C"]
    num: Int[Array, "B"]


def fresh_spares(logits: Float[Array, "B K C"]) -> Spares:
    """All states of a trunk run, before the round commits a token."""
    return Spares(logits, jnp.full(logits.shape[:1], logits.shape[1], jnp.int32))


def after_commit(spares: Spares, num_committed: Int[Array, "B"]) -> Spares:
    """The spare states after the root moves on by `num_committed` = m + 1 tokens.

    The new depth j is the old depth m + 1 + j. With K = 5 and m = 1 the states 1 2 3 4 5 become 3 4 5 - -. A finished
    row, which commits no token, keeps its states.
    """
    num_states = spares.logits.shape[1]
    old_index = num_committed[:, None] + jnp.arange(num_states)
    moved = take_nodes(spares.logits, old_index, axis=1)
    return Spares(moved, jnp.maximum(spares.num - num_committed, 0))


def add(fresh: Float[Array, "B D C"], spares: Spares) -> Float[Array, "B D C"]:
    """Form SUM: the sum of two logits, a product of experts. It is over-confident (methods.md, A7)."""
    added = fresh + spares.logits
    has_spare = (jnp.arange(fresh.shape[1]) < spares.num[:, None])[:, :, None]
    return jnp.where(has_spare, added, fresh)


def enough_spares(reuse: ReuseConfig, depth: int, num_steps: int) -> int:
    """The number of spare states with which a row needs no trunk run, under SKIP."""
    return reuse.min_spares or min(depth, num_steps - 1)


def check_reuse(reuse: ReuseConfig, config: DrafterConfig, tree: TreeConfig) -> None:
    """Checks that a form of reuse does not draft from untrained states, and that it has spare states to reuse."""
    trained, depth, form = config.num_steps, tree.depth, reuse.form
    if form == AHEAD and reuse.num_states(depth, trained) > trained:
        allowed = f"depth 1 to {(trained - 1) // 2}" if trained >= 3 else "none"
        raise ValueError(
            f"reuse={form!r} with TreeConfig.depth={depth} and {trained} trained steps: allowed: {allowed}"
        )
    if form == SKIP and not 1 <= enough_spares(reuse, depth, trained) < trained:
        allowed = f"{SKIP}:1 to {SKIP}:{trained - 1}" if trained > 1 else NO_REUSE_FORM
        raise ValueError(f"reuse={str(reuse)!r} with {trained} trained steps: allowed: {allowed}")
    if form == SUM and depth < 2:
        raise ValueError(f"reuse={form!r} with TreeConfig.depth={depth}: allowed are depths of 2 and more")
