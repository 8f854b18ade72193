"""Spare states: the index map, how old and new logits meet, when the trunk runs, and what is refused.

That no form changes a text stands in `test_exact.py`, that caches stay right where rounds run no trunk in
`test_hidden.py`. Losslessness hides a wrong index map, so here states are compared with the oracle's.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import reuse as oracle
from oracles import tree as tree_oracle
from support import calls, setups, toy

import hsd_jax
from hsd_jax.config import SKIP, ReuseConfig, TreeConfig
from hsd_jax.drafters.hidden import reuse as reuse_lib
from hsd_jax.drafters.hidden.reuse import Spares, fresh_logits
from hsd_jax.infer.round import root_of

NUM_STATES, COLUMNS = 5, 3


def numbered(num_rows: int, num_states: int = NUM_STATES, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (num_rows, num_states, COLUMNS)).astype(np.float32)


def find_wrong_spare(advance) -> str | None:
    """Where the states kept for the positions ahead are not the oracle's, or None; a row for every number committed.

    `advance` runs twice, since a row may live on spares for several rounds.
    """
    steps = [(m, n) for m in range(NUM_STATES + 2) for n in range(NUM_STATES + 2)]
    old = numbered(len(steps))
    spares = reuse_lib.fresh_spares(jnp.asarray(old))
    for column in range(2):
        spares = advance(spares, jnp.asarray([step[column] for step in steps], jnp.int32))
    spares = jax.tree.map(np.asarray, spares)
    for row, step in enumerate(steps):
        wanted = [old[row, k - 1] for k in oracle.spare_depths(NUM_STATES, sum(step))]
        if int(spares.num[row]) != len(wanted):
            return f"{step} committed: {spares.num[row]} spares, not {len(wanted)}"
        for j, logits in enumerate(wanted):
            if not np.array_equal(spares.logits[row, j], logits):
                return f"{step} committed: wrong state at depth {j + 1}"
    return None


def test_the_index_map_is_that_of_the_oracle():
    """New depth j reads old depth k = m + 1 + j, for every m, in rows that differ."""
    assert oracle.spare_depths(5, 1) == [2, 3, 4, 5] and oracle.spare_depths(5, 4) == [5]  # the table of methods.md 1.5
    assert oracle.spare_depths(5, 5) == oracle.spare_depths(5, 6) == []
    assert find_wrong_spare(reuse_lib.after_commit) is None


def test_the_oracle_finds_a_shifted_index():
    """No text would change: only this comparison sees it."""

    def shifted(spares, num_committed):
        moved, kept = (reuse_lib.after_commit(spares, num_committed + by) for by in (1, 0))
        return Spares(moved.logits, kept.num)

    assert "wrong state" in find_wrong_spare(shifted)


def test_added_logits_are_those_of_the_oracle():
    """SUM, at every number of committed tokens."""
    committed = np.arange(NUM_STATES + 2, dtype=np.int32)
    old, fresh = numbered(len(committed)), numbered(len(committed), seed=1)
    spares = reuse_lib.after_commit(reuse_lib.fresh_spares(jnp.asarray(old)), jnp.asarray(committed))
    added = np.asarray(reuse_lib.add(jnp.asarray(fresh), spares))
    for row, count in enumerate(committed[1:], start=1):  # a round commits at least one token
        wanted = oracle.add(fresh[row], old[row], int(count))
        np.testing.assert_allclose(added[row], wanted, rtol=1e-5, atol=1e-6)


# --- trees ------------------------------------------------------------------------------------------------------------

TREE = TreeConfig(nodes=9, depth=4, width=2)
VOCAB = 7


@jax.jit
def beam(base, table, root, num_levels):
    return toy.grow_beam(base, lambda tokens: table[tokens], root, TREE, None, num_levels)


def test_beams_of_fewer_levels_are_the_oracles():
    """Rows of 0 to 4 levels at once."""
    rng = np.random.default_rng(0)
    num_levels = np.arange(5, dtype=np.int32)
    base = rng.normal(0, 2, (5, TREE.depth, VOCAB)).astype(np.float32)
    table, root = rng.normal(0, 2, (VOCAB, VOCAB)).astype(np.float32), rng.integers(0, VOCAB, 5).astype(np.int32)
    tree = jax.tree.map(np.asarray, beam(base, table, root, num_levels))
    for row, levels in enumerate(num_levels):
        wanted = tree_oracle.grow_beam(
            base[row], lambda token: table[token], int(root[row]), TREE.nodes, int(levels), TREE.width
        )
        valid = tree.valid[row]
        assert tuple(x[row][valid].tolist() for x in (tree.tokens, tree.parents, tree.depth)) == wanted
        assert (tree.parents[row] < np.arange(TREE.nodes)).all()  # of padding, too
        assert not valid[valid.sum() :].any()


# --- rounds -----------------------------------------------------------------------------------------------------------


@functools.cache
def own_logits(proposer: str):
    """`logits(drafter_state)`: those of a trunk run from this state, of as many states as the drafter keeps."""
    setup = setups.setup("llama", proposer)

    @setup.decoder.compile
    def logits(state):
        num_states = state.spares.logits.shape[1]
        return fresh_logits(setup.models, setup.config, setup.drafter_config, num_states, state)[0]

    return lambda drafter_state: np.asarray(logits(drafter_state))


@pytest.mark.parametrize("proposer", ["ahead", "hot_sum", "block_skip"])
def test_spares_are_the_states_of_earlier_trunk_runs(proposer):
    """In the compiled loop, rows that differ: each spare is what a trunk run forecast for the same position."""
    setup, call = setups.setup("llama", proposer), calls.mixed_call()
    state = call.start(setup.decoder, setup.models)
    forecasts: list[dict[int, np.ndarray]] = [{} for _ in call.prompts]  # of each row, by absolute position
    seen = 0
    for _ in range(6):
        before = jax.tree.map(lambda x: jnp.array(x, copy=True), state.drafter)
        root = np.asarray(state.length) - 1
        needs = np.asarray(before.spares.num) < 1  # of SKIP; the other forms run the trunk for every row
        logits = own_logits(proposer)(before)
        state = call.resume(setup.decoder, setup.models, state, 1)
        spares = jax.tree.map(np.asarray, state.drafter.spares)
        for row in np.flatnonzero(~np.asarray(state.done)):
            if needs[row] or setups.REUSE[proposer].form != SKIP:
                forecasts[row] = {int(root[row]) + 1 + k: x for k, x in enumerate(logits[row])}
            new_root, num = int(state.length[row]) - 1, int(spares.num[row])
            wanted = [new_root + j for j in range(1, 99) if new_root + j in forecasts[row]]
            assert num == len(wanted)
            for j, position in enumerate(wanted):
                np.testing.assert_allclose(spares.logits[row, j], forecasts[row][position], rtol=1e-3, atol=1e-3)
                seen += 1
    assert seen > 10


def test_ahead_drafts_from_what_was_known_a_round_before():
    """The tree does not read the features of this round's trunk run; the first tree has fresh states."""
    setup, call = setups.setup("llama", "ahead"), calls.mixed_call()
    state = call.start(setup.decoder, setup.models)
    first = state.drafter.spares
    np.testing.assert_allclose(first.logits, own_logits("ahead")(state.drafter), rtol=1e-4, atol=1e-4)
    assert first.num.tolist() == [2 * setup.drafter.max_depth + 1] * call.batch
    state = call.resume(setup.decoder, setup.models, state, 2)
    inputs = toy.round_inputs(*root_of(state), state.keys, call.arrays()[-1])

    @setup.decoder.compile
    def draft(drafter_state):
        return setup.drafter.draft(setup.models, drafter_state, inputs)

    tree, after = draft(state.drafter)
    other = state.drafter.replace(pending=state.drafter.pending + 1.0)
    same_tree, other_after = draft(other)
    jax.tree.map(np.testing.assert_array_equal, same_tree, tree)
    moved = (np.asarray(after.spares.logits) != np.asarray(other_after.spares.logits)).any((1, 2))
    assert moved[np.asarray(state.drafter.num_pending) > 0].all()
    older = first.replace(logits=state.drafter.spares.logits[::-1])
    assert (np.asarray(draft(state.drafter.replace(spares=older))[0].tokens) != np.asarray(tree.tokens)).any()
    assert int(tree.depth.max()) == setup.drafter.max_depth and bool(tree.valid.all())


@functools.cache
def skipping(proposer: str = "block_skip"):
    """A state of four rounds, and the jitted draft from any spares: (setup, state, draft(spares) -> tree, state)."""
    setup, call = setups.setup("llama", proposer), calls.mixed_call()
    state = setup.after(4)
    inputs = toy.round_inputs(*root_of(state), state.keys, call.arrays()[-1])

    @setup.decoder.compile
    def draft(weights, spares):
        models = setup.models | {"drafter": setup.models["drafter"] | weights}
        return setup.drafter.draft(models, state.drafter.replace(spares=spares), inputs)

    return setup, state, draft


def test_rows_with_spares_run_no_trunk():
    """All rows have spares: weights of NaN go unread, and the pending features wait."""
    setup, state, draft = skipping()
    trunk = setup.models["drafter"]["trunk"]
    spares = state.drafter.spares.replace(num=jnp.array([1, 2, 3, 1, 5, 2], jnp.int32))
    tree, after = draft({"trunk": jax.tree.map(lambda x: x * jnp.nan, trunk)}, spares)
    np.testing.assert_array_equal(after.spares.logits, spares.logits)
    np.testing.assert_array_equal(after.num_pending, state.drafter.num_pending)
    np.testing.assert_array_equal(after.cache.length, state.drafter.cache.length)
    assert not any(np.isnan(x).any() for x in (*after.cache.keys, *after.cache.values))
    deepest = np.where(tree.valid, tree.depth, 0).max(1)
    assert deepest.tolist() == [1, 2, 2, 1, 2, 2]  # as deep as there are spares, and as the tree


def test_which_rows_read_their_features_does_not_depend_on_the_others():
    """One row is out of spares: it alone commits, the others draft as if the trunk had not run."""
    setup, state, draft = skipping()
    enough = state.drafter.spares.replace(num=jnp.full(6, 3, jnp.int32))
    alone, _ = draft({"trunk": setup.models["drafter"]["trunk"]}, enough)
    needy = int(np.flatnonzero(state.drafter.num_pending)[0])
    tree, after = draft({"trunk": setup.models["drafter"]["trunk"]}, enough.replace(num=enough.num.at[needy].set(0)))
    others = np.arange(6) != needy
    for name in ("tokens", "parents", "valid"):
        np.testing.assert_array_equal(np.asarray(getattr(tree, name))[others], np.asarray(getattr(alone, name))[others])
    waiting = np.asarray(state.drafter.num_pending) * others
    np.testing.assert_array_equal(after.num_pending, waiting)
    grown = np.asarray(after.cache.length) - np.asarray(state.drafter.cache.length)
    np.testing.assert_array_equal(grown, np.asarray(state.drafter.num_pending) * ~others)
    assert int(after.spares.num[needy]) == setup.drafter_config.num_steps


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["twice", "skip:0"])
def test_unknown_forms_are_refused(text):
    with pytest.raises(ValueError, match="reuse="):
        ReuseConfig.parse(text)


@pytest.mark.parametrize(
    ("reuse", "tree", "words"),
    [
        ("ahead", TreeConfig(4, 2, 2), "'ahead'.*depth=2.*depth 1 to 1"),
        ("skip:4", TreeConfig(4, 2, 2), "'skip:4'.*skip:1 to skip:3"),
        ("sum", TreeConfig(3, 1, 2), "'sum'.*2 and more"),
    ],
)
def test_forms_that_cannot_work_are_refused_before_anything_compiles(reuse, tree, words):
    with pytest.raises(ValueError, match=words):
        hsd_jax.decode(setups.params_of("beam"), [1, 2], reuse=reuse, tree=tree)
