"""When the trunk runs, and which logits the tree of a round grows from, for each form of reuse (`reuse.py`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hsd_jax.config import AHEAD, NO_REUSE_FORM, SKIP, ModelConfig, ReuseConfig, TreeConfig, TrunkConfig
from hsd_jax.drafters.hidden import reuse as reuse_lib
from hsd_jax.drafters.hidden.reuse import Spares
from hsd_jax.drafters.trunk_state import TrunkState, run_trunk, trunk_states
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.trunk import base_logits


def fresh_logits(
    models, target_config: ModelConfig, config: TrunkConfig, num_states: int, state: TrunkState
) -> tuple[Float[Array, "B K C"], TrunkState]:
    """The base logits of `trunk_states`, and the state with the pending features committed."""
    with jax.named_scope("trunk"):
        states, cache = trunk_states(models, target_config, config, num_states, state)
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
) -> tuple[Float[Array, "B D C"], Int[Array, "B"] | None, TrunkState]:
    """The logits from which the tree grows, the number of levels of each row that have logits (None: all), and the
    state. The trunk runs if the round needs it. `live` is `RoundInputs.live`."""
    if reuse.form == SKIP:
        return _run_if_needed(models, target_config, config, tree, reuse, state, live)
    num_states, spares = reuse.num_states(tree.depth, config.num_steps), state.spares
    fresh, state = fresh_logits(models, target_config, config, num_states, state)
    if reuse.form == NO_REUSE_FORM:
        return fresh, None, state
    # Only the fresh logits are kept, and not the sums, so no state counts in more than two rounds (methods.md, A8).
    state = dataclasses.replace(state, spares=reuse_lib.fresh_spares(fresh))
    if reuse.form == AHEAD:  # the tree grows from states of the last round, so the trunk may run beside the target
        return spares.logits[:, : tree.depth], None, state
    with jax.named_scope("reuse"):  # SUM: old and new states make one tree, so one target pass judges both
        return reuse_lib.add(fresh, spares), None, state


def _run_if_needed(
    models,
    target_config: ModelConfig,
    config: TrunkConfig,
    tree: TreeConfig,
    reuse: ReuseConfig,
    state: TrunkState,
    live: Bool[Array, "B"],
) -> tuple[Float[Array, "B D C"], Int[Array, "B"], TrunkState]:
    """SKIP: rows with enough spare states draft from these. The trunk runs if any other row needs it.

    A row with enough spare states uses them even if the trunk runs for another row. So the states that a row drafts
    from do not depend on the other rows. A finished row needs no run, so that the others do not wait for one.
    """
    old, num_states = state.spares, reuse.num_states(tree.depth, config.num_steps)
    needs = live & (old.num < reuse_lib.enough_spares(reuse, tree.depth, config.num_steps))

    def run():
        states, kv = run_trunk(models, target_config, config, num_states, state)
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
