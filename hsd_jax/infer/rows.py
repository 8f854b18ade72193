"""A row of a state: copied into a slot, cleared, placed on a mesh. The one place that says how; no part is left out.

Every array has rows as its first axis, and what has slots besides may have fewer of them in the row that comes in: what
lies behind its length is never read. Cleared is what holds nothing: a row that has failed may hold NaN in its caches,
and no mask of attention hides these from a plain product. Read first: `axes.py`.
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
    """`into` with its row `slot` replaced by the `row` of `source`, a tree of the same arrays with rows of its own."""

    def one(axes: Axes, old: Array, new: Array) -> Array:
        new = lax.dynamic_slice_in_dim(new, row, 1, 0)
        return lax.dynamic_update_slice(old, new, (slot, *[jnp.zeros_like(slot)] * (old.ndim - 1)))

    return placed(map_named(one, into, source))


def zeroed(tree: Any, slot: Int[Array, ""]) -> Any:
    """`tree` with zeros in its row `slot`; keys stay."""

    def one(axes: Axes, x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return lax.dynamic_update_slice_in_dim(x, jnp.zeros_like(x, shape=(1, *x.shape[1:])), slot, 0)

    return placed(map_named(one, tree))


def cleared(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """The state with nothing in its row `slot`, which is done."""
    empty = zeroed(state, slot)
    return dataclasses.replace(empty, length=empty.length.at[slot].set(1), done=empty.done.at[slot].set(True))


def placed(rows: Any) -> Any:
    """Rows where the mesh of the program that is traced wants them: what comes in need not say so."""
    mesh = program.mesh()
    if mesh is None:
        return rows
    return lax.with_sharding_constraint(rows, row_shardings(mesh, rows, len(jax.tree.leaves(rows)[0])))
