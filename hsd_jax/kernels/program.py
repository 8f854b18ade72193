"""Holds the mesh of the program that is being traced, for operations that depend on how arrays are split."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

Value = TypeVar("Value")
_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("hsd_mesh", default=None)


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar[Value], value: Value) -> Iterator[None]:
    """Programs traced inside see this value of a variable."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[None]:
    """Programs traced inside run on this mesh. None: on one device.

    The axes of the mesh are among `sharding.TRAINING_AXES`. Rows that training splits over "fsdp" are not split inside
    `on_each_device`.
    """
    return setting(_mesh, mesh)


def mesh() -> Mesh | None:
    """The mesh of the program that is being traced."""
    return _mesh.get()


def is_training() -> bool:
    """Whether the mesh is one for training. Its axis "fsdp" splits rows, and also weights along further axes."""
    here = _mesh.get()
    return here is not None and "fsdp" in here.axis_names


def shards(axis: str, size: int) -> int:
    """The number of devices along the mesh's `axis` if it divides this size of an array's axis, else 1."""
    here = _mesh.get()
    num = 1 if here is None or axis not in here.axis_names else here.shape[axis]
    return num if size % num == 0 else 1


def placed(x: Array, *axes: str | None) -> Array:
    """`x`, split over the given axes of the mesh where they divide its sizes, and not split elsewhere."""
    here = _mesh.get()
    if here is None:
        return x
    spec = (
        axis if axis is not None and shards(axis, size) > 1 else None for axis, size in zip(axes, x.shape, strict=True)
    )
    return jax.lax.with_sharding_constraint(x, NamedSharding(here, PartitionSpec(*spec)))


def on_each_device(function: Callable, ins: list[tuple], outs: Any, batch: int, groups: int) -> Callable:
    """Applies `function` to each device's part of its arguments.

    Args:
      ins: the axes of each argument: "data" for rows, "model" for key/value heads, None for an axis that is not split.
      outs: the axes of the results, in the same form.
      batch, groups: numbers of rows and of key/value heads. An axis that the mesh does not divide is not split.
    """
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
