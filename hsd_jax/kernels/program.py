"""The mesh of the program that is being traced: operations over what it splits, or on each device alone, ask for it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("hsd_mesh", default=None)


@contextlib.contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """What is traced inside runs on this mesh, with axes among those of `sharding.TRAINING_AXES`; None: on one device.

    Rows that training splits over "fsdp" are whole where `on_each_device` runs.
    """
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def mesh() -> Mesh | None:
    """The mesh of what is traced here and now."""
    return _mesh.get()


def is_training() -> bool:
    """Whether this is a mesh for training, whose axis "fsdp" splits rows, and weights along other axes too."""
    here = _mesh.get()
    return here is not None and "fsdp" in here.axis_names


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


def on_each_device(function: Callable, ins: list[tuple], outs: Any, batch: int, groups: int) -> Callable:
    """`function` on each device's part. Axes are "data" for rows and "model" for key/value heads, where they divide."""
    here = _mesh.get()
    if here is None:
        return function
    shared = {"data": shards("data", batch) > 1, "model": shards("model", groups) > 1}

    def spec(axes: tuple) -> PartitionSpec:
        return PartitionSpec(*(axis if shared.get(axis) else None for axis in axes))

    def is_axes(x: Any) -> bool:
        return type(x) is tuple and all(type(axis) is not tuple for axis in x)

    in_specs, out_specs = (jax.tree.map(spec, tree, is_leaf=is_axes) for tree in (tuple(ins), outs))
    return jax.shard_map(function, mesh=here, in_specs=in_specs, out_specs=out_specs, check_vma=False)
