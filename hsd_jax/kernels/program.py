"""The mesh of the program that is being traced: operations over what it splits, or on each device alone, ask for it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("hsd_mesh", default=None)


@contextlib.contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """What is traced inside runs on this mesh, with axes among "data" and "model"; None: on one device."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def mesh() -> Mesh | None:
    """The mesh of what is traced here and now."""
    return _mesh.get()


def shards(axis: str, size: int) -> int:
    """Devices that share an axis of this size: those of the mesh's `axis` if they divide it, else 1."""
    here = _mesh.get()
    num = 1 if here is None or axis not in here.axis_names else here.shape[axis]
    return num if size % num == 0 else 1


def placed(x: Array, *axes: str | None) -> Array:
    """`x` split over these axes of the mesh, where they divide it; whole on each device along the others."""
    here = _mesh.get()
    if here is None:
        return x
    spec = (
        axis if axis is not None and shards(axis, size) > 1 else None for axis, size in zip(axes, x.shape, strict=True)
    )
    return jax.lax.with_sharding_constraint(x, NamedSharding(here, PartitionSpec(*spec)))
