"""A row of a state comes and goes: axes are named, a row is copied whole, and no other row changes a bit."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import calls, setups
from support.toy import VOCAB

from hsd_jax.axes import CACHE, ROWS, SLOTS, axes_of
from hsd_jax.infer import adapt, controls, rows
from hsd_jax.types import DecodeState

BATCH, SMALL, LARGE = 6, 32, 64
SLOT, ROW = 4, 1
KINDS = ["plain", *setups.OF_EACH_KIND.values()]
KINDS += ["hot_skip", "path_ahead", "rescored_lm", "rescored_hidden", "stack_stack"]
"""Of every state of a drafter one."""


@functools.cache
def shapes_of(proposer: str, batch: int = BATCH, capacity: int = LARGE) -> DecodeState:
    """A state as decodes begin with it, and what they learn of their drafts and remember of their tokens."""
    call, decoder = calls.mixed_call().rows(list(range(batch))), setups.setup("llama", proposer).decoder

    def begin(*arrays: Any) -> DecodeState:
        begun, known = decoder.begin(*arrays, capacity=capacity), controls.first_controlled(batch, VOCAB, capacity + 1)
        return dataclasses.replace(begun, control=adapt.first_control(batch, True), controlled=known)

    return jax.eval_shape(begin, *call.arrays()[:4])


def filled(shapes: DecodeState, seed: int) -> DecodeState:
    """The shapes with numbers in every place; truth values are those of the seed."""
    rng = np.random.default_rng(seed)

    def one(x: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(seed), x.shape[0])
        if x.dtype == bool:
            return jnp.full(x.shape, bool(seed % 2))
        return jnp.asarray(rng.integers(1, 2**20, x.shape), x.dtype)

    return jax.tree.map(one, shapes)


def bits(tree: Any) -> list[np.ndarray]:
    keys = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key), tree)
    return [
        np.asarray(x)
        for x in jax.tree.leaves(jax.tree.map(lambda x, k: jax.random.key_data(x) if k else x, tree, keys))
    ]


# --- axes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", KINDS)
def test_every_axis_of_a_state_has_its_name(proposer):
    """Rows are the axis that grows with the batch, the first of every array; slots those that grow with the capacity.

    What has both and two axes more is a cache; so nothing else has heads, and no cache lacks them.
    """
    state = shapes_of(proposer)
    others = shapes_of(proposer, BATCH - 1), shapes_of(proposer, BATCH, SMALL)
    leaves = [jax.tree.leaves(one) for one in (state, *others)]
    for axes, leaf, of_fewer_rows, of_fewer_slots in zip(axes_of(state), *leaves, strict=True):
        assert len(axes) == leaf.ndim
        of_rows = [a != b for a, b in zip(leaf.shape, of_fewer_rows.shape, strict=True)]
        of_slots = [a != b for a, b in zip(leaf.shape, of_fewer_slots.shape, strict=True)]
        assert of_rows == [name == ROWS for name in axes] and of_rows[0]
        assert of_slots == [name == SLOTS for name in axes]
        assert (axes == CACHE) == (leaf.ndim == 4 and any(of_slots))


# --- copied -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", KINDS)
def test_a_row_is_copied_into_its_slot_and_the_others_keep_every_bit(proposer):
    """From one of two rows, in smaller caches, into one of six."""
    into, source = filled(shapes_of(proposer), 0), filled(shapes_of(proposer, 2, SMALL), 1)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(into)[0]]
    found = jax.jit(rows.copied)(into, jnp.int32(SLOT), source, ROW)
    assert jax.tree.structure(found) == jax.tree.structure(into)
    for path, after, before, new in zip(paths, bits(found), bits(into), bits(source), strict=True):
        wanted = before.copy()
        wanted[(SLOT, *map(slice, new.shape[1:]))] = new[ROW]
        assert not np.array_equal(wanted[SLOT], before[SLOT]), path
        np.testing.assert_array_equal(after, wanted, err_msg=path)


# --- cleared ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", KINDS)
def test_a_cleared_row_holds_nothing_and_is_done(proposer):
    """Its key may stay; NaN goes, and the other rows keep every bit, theirs included."""
    before = jax.tree.map(
        lambda x: x.at[SLOT - 1 : SLOT + 1].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        filled(shapes_of(proposer), 0),
    )
    after = jax.jit(rows.cleared)(before, jnp.int32(SLOT))
    others = np.arange(BATCH) != SLOT
    jax.tree.map(np.testing.assert_array_equal, *([x[others] for x in bits(state)] for state in (after, before)))
    assert int(after.length[SLOT]) == 1 and bool(after.done[SLOT])
    rest = dataclasses.replace(after, length=None, done=None, keys=None)
    assert not any(x[SLOT].any() for x in bits(rest))
