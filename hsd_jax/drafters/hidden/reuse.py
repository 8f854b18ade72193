"""Spare states: trunk states for positions beyond the tokens that a round committed, and how later rounds use them.

A trunk state reads no drafted token. So the states after a rejected draft stay valid: they still predict the same
absolute positions (Lyanna, arXiv:2602.21224; methods.md 1.5 step 6). Only their base logits are kept, because a tree
needs nothing else of a state.

Forms (`config.REUSES`), with K states per trunk run:
    none   the trunk runs in every round, and spare states are dropped
    sum    the base logits are added to the spare base logits of the same position
    skip   a row with enough spare states drafts only from these; the trunk runs if some row has too few
    ahead  the tree grows from the states of the last round, while the trunk runs for the next round
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import (
    AHEAD,
    NO_REUSE_FORM,
    SKIP,
    SUM,
    DrafterConfig,
    ModelConfig,
    ReuseConfig,
    TreeConfig,
    TrunkConfig,
)
from hsd_jax.drafters.reading import joined
from hsd_jax.drafters.trunk_state import (
    FROM_TARGET,
    TrunkInputs,
    TrunkState,
    run_trunk,
    trunk_drafter,
    trunk_states,
)
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.cache import take_nodes
from hsd_jax.models.trunk import base_logits
from hsd_jax.types import Drafter, DrawScheme, ModelOutput, Verdict


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


def fresh_logits(
    models,
    target_config: ModelConfig,
    config: TrunkConfig,
    num_states: int,
    state: TrunkState,
    inputs: TrunkInputs = FROM_TARGET,
) -> tuple[Float[Array, "B K C"], TrunkState]:
    """The base logits of `trunk_states`, and the state with the pending features committed."""
    with jax.named_scope("trunk"):
        states, cache = trunk_states(models, target_config, config, num_states, state, inputs)
    with jax.named_scope("head"):
        logits = base_logits(models["drafter"], config, models["target"], target_config, states)
    return logits, dataclasses.replace(state, cache=cache)


def logits_of_round(
    models,
    target_config: ModelConfig,
    config: TrunkConfig,
    tree: TreeConfig,
    reuse: ReuseConfig,
    state: TrunkState,
    live: Bool[Array, "B"],
    inputs: TrunkInputs = FROM_TARGET,
) -> tuple[Float[Array, "B D C"], Int[Array, "B"] | None, TrunkState]:
    """The logits from which the tree grows, the number of levels of each row that have logits (None: all), and the
    state. The trunk runs if the round needs it. `live` is `RoundInputs.live`.

    SKIP: rows with enough spare states draft from these. The trunk runs if any other row needs it. A row with enough
    spare states uses them even if the trunk runs for another row. So the states that a row drafts from do not depend on
    the other rows. A finished row needs no run, so that the others do not wait for one.
    """
    num_states, old = reuse.num_states(tree.depth, config.num_steps), state.spares
    if reuse.form != SKIP:
        fresh, state = fresh_logits(models, target_config, config, num_states, state, inputs)
        if reuse.form == NO_REUSE_FORM:
            return fresh, None, state
        # Only the fresh logits are kept, and not the sums, so no state counts in more than two rounds (methods.md, A8).
        state = dataclasses.replace(state, spares=fresh_spares(fresh))
        if reuse.form == AHEAD:  # the tree grows from states of the last round: the trunk may run beside the target
            return old.logits[:, : tree.depth], None, state
        with jax.named_scope("reuse"):  # SUM: old and new states make one tree, so one target pass judges both
            return add(fresh, old), None, state
    needs = live & (old.num < enough_spares(reuse, tree.depth, config.num_steps))

    def run():
        states, kv = run_trunk(models, target_config, config, num_states, state, inputs)
        return base_logits(models["drafter"], config, models["target"], target_config, states), kv

    def keep():
        return old.logits, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run)[1])

    with jax.named_scope("trunk"):
        logits, kv = lax.cond(jnp.any(needs), run, keep)
        # Written for all rows, but counted only for rows whose trunk ran. The next write overwrites the rest.
        cache = cache_lib.commit(state.cache, kv, None, jnp.where(needs, state.num_pending, 0), after=logits)
    logits = jnp.where(needs[:, None, None], logits, old.logits)
    num = jnp.where(needs, num_states, old.num)
    num_pending, spares = jnp.where(needs, 0, state.num_pending), Spares(logits, num)
    state = dataclasses.replace(state, cache=cache, num_pending=num_pending, spares=spares)
    return logits[:, : tree.depth], jnp.minimum(num, tree.depth), state


def reusing_drafter(
    target_config: ModelConfig,
    config: TrunkConfig,
    tree: TreeConfig,
    draft: Callable[..., Any],
    cache_dtype: Any,
    scheme: DrawScheme,
    reuse: ReuseConfig,
    inputs: TrunkInputs = FROM_TARGET,
) -> Drafter:
    """A `Drafter` with token-free states. Without reuse all functions except `draft` are those of `trunk_drafter`.

    With reuse `init` and `commit` also keep the spare states. Under AHEAD `ready` makes the states of the first tree.
    With reuse `follow` is None, because the drafter must draft in every round.
    """
    check_reuse(reuse, config, tree)
    num_states = reuse.num_states(tree.depth, config.num_steps)
    runs_every_round = reuse.form != SKIP
    # A row without a trunk run keeps its pending features. A tree is no deeper than the number of spares that it grows
    # from, so a row commits at most K + 1 tokens from one trunk run to the next.
    max_pending = None if runs_every_round else num_states + 1
    basis = trunk_drafter(target_config, config, tree, draft, cache_dtype, scheme, max_pending, inputs)
    if reuse.form == NO_REUSE_FORM:
        return basis

    def init(tokens: Int[Array, "B P"], length: Int[Array, "B"], capacity: int):
        logits = jnp.zeros((len(length), num_states, config.draft_vocab_size))
        spares = Spares(logits, jnp.zeros(len(length), jnp.int32))
        return dataclasses.replace(basis.init(tokens, length, capacity), spares=spares)

    def ready(models, state: TrunkState):
        """AHEAD: makes the states of the first tree, because no round before has made any."""
        logits, _ = fresh_logits(models, target_config, config, num_states, state, inputs)
        return dataclasses.replace(state, spares=fresh_spares(logits))

    def commit(models, state: TrunkState, verdict: Verdict, output: ModelOutput, num_committed: Int[Array, "B"]):
        after = basis.commit(models, state, verdict, output, num_committed)
        spares = after_commit(state.spares, num_committed)
        if runs_every_round:
            return dataclasses.replace(after, spares=spares)
        num = state.num_pending
        return dataclasses.replace(
            state,
            pending=joined(state.pending, num, after.pending, max_pending),
            next_tokens=joined(state.next_tokens, num, after.next_tokens, max_pending),
            num_pending=num + num_committed,
            spares=spares,
        )

    return basis._replace(init=init, commit=commit, ready=ready if reuse.form == AHEAD else None, follow=None)
