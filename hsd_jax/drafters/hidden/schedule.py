"""The trunk's part in a round: what a row carries from round to round, its runs, and what a tree grows from.

The trunk reads the target's features and its own states only, so what it forecast stays true when drafts are rejected.
Under each form of reuse (`reuse.py`) `make_schedule` says when it runs and what becomes of the states of earlier
rounds. Read next: `draft.py`, which grows trees from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import AHEAD, NONE, SKIP, SUM, UNFUSED, ModelConfig, ReuseConfig, TreeConfig, TrunkConfig
from hsd_jax.drafters.hidden import reuse as reuse_lib
from hsd_jax.drafters.hidden.reuse import Spares
from hsd_jax.drafters.reading import joined
from hsd_jax.drafters.trunk_state import TrunkState
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.trunk import STATES, base_logits, embed_committed
from hsd_jax.types import KVCache, NewKV


class Forecast(NamedTuple):
    """What the tree of a round grows from."""

    logits: Float[Array, "B D C"]
    num: Int[Array, "B"] | None = None
    """Levels of each row that have logits; None: all."""


def run_trunk(
    models, target_config: ModelConfig, config: TrunkConfig, num_states: int, state: TrunkState
) -> tuple[Float[Array, "B K H"], NewKV]:
    """K = `num_states` token-free states, and keys and values of the pending features."""
    embeddings = embed_committed(models["target"], target_config, config, state.next_tokens)
    read = STATES[config.trunk]
    return read(models["drafter"], config, state.pending, embeddings, state.num_pending, num_states, state.cache)


def trunk_states(
    models, target_config: ModelConfig, config: TrunkConfig, num_states: int, state: TrunkState
) -> tuple[Float[Array, "B K H"], KVCache]:
    """K = `num_states` token-free states, and the trunk's cache with the pending features committed."""
    states, kv = run_trunk(models, target_config, config, num_states, state)
    return states, cache_lib.commit(state.cache, kv, None, state.num_pending, after=states[:, -1])


def aged(
    models, target_config: ModelConfig, config: TrunkConfig, num_states: int, state: TrunkState
) -> Callable[[Array], TrunkState]:
    """`state_at(age)`: the state of every row with the spares that a trunk run `age` rows earlier would have left.

    Args:
      state: of roots that follow one another in a text, a row each.
    """
    states, _ = run_trunk(models, target_config, config, num_states, state)
    logits = base_logits(models["drafter"], config, models["target"], target_config, states)
    rows = jnp.arange(logits.shape[0])

    def state_at(age: Array) -> TrunkState:
        made = reuse_lib.fresh_spares(logits[jnp.maximum(rows - age, 0)])
        return dataclasses.replace(state, spares=reuse_lib.advance(made, jnp.broadcast_to(age, rows.shape)))

    return state_at


def spares_of(state: TrunkState) -> Spares:
    """The spare states of a state that was made with reuse."""
    assert state.spares is not None, "the state was made without reuse"
    return state.spares


def append_pending(
    state: TrunkState, features: Float[Array, "B M2 H"], tokens: Int[Array, "B M2"], num_new: Int[Array, "B"]
) -> TrunkState:
    """The state with `num_new` features and the tokens after them, after those of each row that still wait.

    The caller guarantees room for them; what does not count is cut off.
    """
    num, num_slots = state.num_pending, state.pending.shape[1]
    return dataclasses.replace(
        state,
        pending=joined(state.pending, num, features, num_slots),
        next_tokens=joined(state.next_tokens, num, tokens, num_slots),
        num_pending=num + num_new,
    )


def make_schedule(
    target_config: ModelConfig, config: TrunkConfig, tree: TreeConfig, reuse: ReuseConfig, num_states: int
) -> Callable[..., tuple[Forecast, TrunkState]]:
    """`levels_of_round(models, state, live=None) -> (levels, state)`: what a round drafts from, and when the trunk runs
    for it; `live` as `RoundInputs.live`."""

    def read_pending(models, state: TrunkState) -> tuple[Float[Array, "B K C"], TrunkState]:
        """Base logits of a trunk run for every row, and the state with the pending features committed."""
        with jax.named_scope("trunk"):
            states, cache = trunk_states(models, target_config, config, num_states, state)
        with jax.named_scope("head"):
            logits = base_logits(models["drafter"], config, models["target"], target_config, states)
        return logits, dataclasses.replace(state, cache=cache)

    def drop(models, state: TrunkState, live: Bool[Array, "B"] | None = None):
        logits, state = read_pending(models, state)
        return Forecast(logits), state

    def fuse(models, state: TrunkState, live: Bool[Array, "B"] | None = None):
        """SUM: old and new states take part in one tree, so one target pass judges both."""
        fresh, after = read_pending(models, state)
        with jax.named_scope("reuse"):
            levels = Forecast(reuse_lib.add(fresh, spares_of(state)))
        # Only what a trunk says itself is kept, so no state counts in more than two rounds (methods.md, A8).
        return levels, dataclasses.replace(after, spares=reuse_lib.fresh_spares(fresh))

    def run_ahead(models, state: TrunkState, live: Bool[Array, "B"] | None = None):
        """AHEAD: the tree grows from states of the round before, while the trunk runs for the next one.

        The tree needs nothing of this trunk run, nor the run anything of this round's target pass: they may go side by
        side.
        """
        fresh, after = read_pending(models, state)
        levels = Forecast(spares_of(state).logits[:, : tree.depth])
        return levels, dataclasses.replace(after, spares=reuse_lib.fresh_spares(fresh))

    def run_if_needed(models, state: TrunkState, live: Bool[Array, "B"] | None = None):
        """SKIP and UNFUSED: rows with spares enough draft from these; the trunk runs if any other row is left.

        Which states a row drafts from does not depend on the other rows: one with spares enough uses them even where
        the trunk runs for another. A row that is done asks for no run, which the others would wait for.
        """
        old = spares_of(state)
        needs = reuse_lib.needs_run(reuse, old, tree.depth, config.num_steps)
        needs = needs if live is None else needs & live

        def run():
            states, kv = run_trunk(models, target_config, config, num_states, state)
            return base_logits(models["drafter"], config, models["target"], target_config, states), kv

        def keep():
            return old.logits, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run)[1])

        with jax.named_scope("trunk"):
            logits, kv = lax.cond(jnp.any(needs), run, keep)
            # Written in every round, counted for rows that ran; the next write covers the rest.
            cache = cache_lib.commit(state.cache, kv, None, jnp.where(needs, state.num_pending, 0), after=logits)
        logits = jnp.where(needs[:, None, None], logits, old.logits)
        num = jnp.where(needs, num_states, old.num)
        kept = jnp.where(needs, num, 0) if reuse.form == UNFUSED else num  # spares are resampled from once
        state = dataclasses.replace(
            state, cache=cache, num_pending=jnp.where(needs, 0, state.num_pending), spares=Spares(logits, kept)
        )
        return Forecast(logits[:, : tree.depth], num=jnp.minimum(num, tree.depth)), state

    schedules = {NONE: drop, SUM: fuse, SKIP: run_if_needed, AHEAD: run_ahead, UNFUSED: run_if_needed}
    return schedules[reuse.form]
