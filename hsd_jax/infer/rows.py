"""Copies a row of a state into a slot, clears it, and places states on a mesh.

The first axis of every array is rows, so no part of a state is left out. Arrays with slots may have fewer slots in the
row that is copied, because entries after its length are never read. A slot is cleared with zeros, because a failed row
may leave NaN in its caches, and a mask of attention does not hide NaN from a plain product.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from hsd_jax.axes import Axes, map_named
from hsd_jax.host.sharding import row_shardings
from hsd_jax.kernels import program
from hsd_jax.types import DecodeState


def copied(into: Any, slot: Int[Array, ""], source: Any, row: Int[Array, ""] | int = 0) -> Any:
    """`into`, with its row `slot` replaced by row `row` of `source`, which has the same arrays with its own rows."""
    # Not signed: else jax compares each index of each array with 0.
    at, of = (jnp.asarray(x).astype(jnp.uint32) for x in (slot, row))

    def one(axes: Axes, old: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(old, lax.dynamic_slice_in_dim(new, of, 1, 0), at, 0)

    return placed(map_named(one, into, source))


def zeroed(tree: Any, slot: Int[Array, ""]) -> Any:
    """`tree` with zeros in its row `slot`. Random keys are kept."""

    def one(axes: Axes, x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return lax.dynamic_update_slice_in_dim(x, jnp.zeros_like(x, shape=(1, *x.shape[1:])), at, 0)

    at = slot.astype(jnp.uint32)
    return placed(map_named(one, tree))


def cleared(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """The state with an empty row `slot`, which is done."""
    empty = zeroed(state, slot)
    return dataclasses.replace(empty, length=empty.length.at[slot].set(1), done=empty.done.at[slot].set(True))


def placed(rows: Any) -> Any:
    """Constrains rows to their sharding on the mesh of the program that is being traced. Inputs may lack it."""
    mesh = program.here().mesh
    if mesh is None:
        return rows
    return lax.with_sharding_constraint(rows, row_shardings(mesh, rows, len(jax.tree.leaves(rows)[0])))
