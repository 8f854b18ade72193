"""Spare states: what a trunk run has forecast beyond the tokens a round committed, and how later rounds use it.

A trunk state reads no drafted token, so a rejected draft does not spoil the states after it: they still forecast the
same absolute positions (Lyanna, arXiv:2602.21224; methods.md 1.5, 6). Kept are their base logits, since a state serves
the tree through nothing else. Knows neither trunks nor targets. Read next: `schedule.py`, where the forms differ
in when the trunk runs.

Forms (`config.REUSES`), root n, tree depth D, K states of a trunk run:
    none     the trunk runs in every round, spares are dropped
    sum      base logits of depth j plus those that the round before made for the same position
    skip     a row with enough spares drafts from these alone; the trunk runs only if some row has too few
    ahead    the tree grows from the last round's states, while the trunk runs for the next one
    unfused  fresh drafts and what is resampled from their spares have a target pass each, in turns
"""

from __future__ import annotations

import typing
from typing import NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import AHEAD, NONE, SKIP, SUM, UNFUSED, DrafterConfig, ReuseConfig, TreeConfig
from hsd_jax.models.cache import take_nodes
from hsd_jax.types import DraftTree

FRESH, KEPT, MIXED = range(3)
"""What a drafted node grew from: a state of this round's trunk run, a spare of an earlier one, or logits of both."""


@typing.no_type_check  # tree.map puts shapes and shardings in place of arrays
@flax.struct.dataclass
class Spares:
    """Base logits of the states of one trunk run that are ahead of each row's root.

    `logits[:, j - 1]` forecast the token j places after the root, for j up to `num`; what follows is
    meaningless. A row that has committed c tokens since its trunk ran has `num` = K - c.
    """

    logits: Float[Array, "B K C"]
    num: Int[Array, "B"]


def fresh_spares(logits: Float[Array, "B K C"]) -> Spares:
    """All states of a trunk run, before a token of the round is committed."""
    return Spares(logits, jnp.full(logits.shape[:1], logits.shape[1], jnp.int32))


def no_spares(batch: int, num_states: int, num_columns: int) -> Spares:
    """Before the first trunk run of a decode."""
    return Spares(jnp.zeros((batch, num_states, num_columns)), jnp.zeros(batch, jnp.int32))


def advance(spares: Spares, num_committed: Int[Array, "B"]) -> Spares:
    """What is left when the root moves `num_committed` = m + 1 tokens on: new depth j reads old depth k = m + 1 + j.

    With K = 5 and m = 1 the states 1 2 3 4 5 become 3 4 5 - -. A finished row (0 committed) keeps its own.
    """
    num_states = spares.logits.shape[1]
    old_index = num_committed[:, None] + jnp.arange(num_states)
    moved = take_nodes(spares.logits, old_index, axis=1)
    return Spares(moved, jnp.maximum(spares.num - num_committed, 0))


def add(fresh: Float[Array, "B D C"], spares: Spares) -> Float[Array, "B D C"]:
    """Form SUM: a product of two experts, which is likely to be over-confident (methods.md, A7)."""
    added = fresh + spares.logits
    has_spare = (jnp.arange(fresh.shape[1]) < spares.num[:, None])[:, :, None]
    return jnp.where(has_spare, added, fresh)


def enough_spares(reuse: ReuseConfig, depth: int, num_steps: int) -> int:
    """How many spare states save a row its trunk run: forms SKIP and UNFUSED."""
    if reuse.form == UNFUSED:
        return 1
    return reuse.min_spares or min(depth, num_steps - 1)


def needs_run(reuse: ReuseConfig, spares: Spares, depth: int, num_steps: int) -> Bool[Array, "B"]:
    """Which rows have too few spares to draft from these alone: forms SKIP and UNFUSED."""
    return spares.num < enough_spares(reuse, depth, num_steps)


class Origins(NamedTuple):
    """What the nodes of each row's tree grew from: for pictures, no decode computes it."""

    nodes: Int[Array, "B N"]
    """FRESH, KEPT or MIXED; FRESH where there is no draft: for the root and for nodes that are not valid."""
    age: Int[Array, "B"]
    """Tokens committed since the trunk run of the spares; means nothing where every node is FRESH."""
    has_own_run: Bool[Array, "B"]
    """Whether the tree grew from a trunk run of its own round; the first tree of AHEAD, from the run after prefill."""


def origins(reuse: ReuseConfig, spares: Spares, drafted: DraftTree, num_steps: int, max_depth: int) -> Origins:
    """Where a tree comes from that was grown while a row had these spares.

    Args:
      num_steps, max_depth: of the drafter and of its trees.
    """
    age = spares.logits.shape[1] - spares.num
    if reuse.form == SUM:
        has_own_run = jnp.ones(age.shape, bool)
        nodes = jnp.where(drafted.depth <= spares.num[:, None], MIXED, FRESH)
    else:
        has_own_run = age == 0 if reuse.form == AHEAD else needs_run(reuse, spares, max_depth, num_steps)
        nodes = jnp.broadcast_to(jnp.where(has_own_run, FRESH, KEPT)[:, None], drafted.depth.shape)
    return Origins(jnp.where(drafted.valid & (drafted.depth > 0), nodes, FRESH), age, has_own_run)


def check_reuse(reuse: ReuseConfig, config: DrafterConfig, tree: TreeConfig) -> None:
    """Refuses forms that would draft from untrained states, or reuse nothing.

    Raises:
      ValueError: naming the wrong value and the allowed ones, before anything compiles.
    """
    trained, depth, form = config.num_steps, tree.depth, reuse.form
    if form == AHEAD and reuse.num_states(depth, trained) > trained:
        allowed = f"depth 1 to {(trained - 1) // 2}" if trained >= 3 else "none"
        raise ValueError(
            f"reuse={form!r} with TreeConfig.depth={depth}: drafts from states that are a round old need"
            f" 2 * depth + 1 = {2 * depth + 1} trained steps; this drafter has {trained}, which allows {allowed}"
        )
    if form == SKIP and not 1 <= enough_spares(reuse, depth, trained) < trained:
        allowed = f"{SKIP}:1 to {SKIP}:{trained - 1}" if trained > 1 else NONE
        raise ValueError(f"reuse={str(reuse)!r}: a trunk of {trained} steps leaves fewer spares; allowed: {allowed}")
    if form not in (NONE, SKIP, AHEAD) and depth < 2:
        raise ValueError(
            f"reuse={form!r} with TreeConfig.depth={depth}: one state leaves no spare; allowed are depths of 2 and more"
        )
