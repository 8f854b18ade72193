"""The mesh of devices, and one table that maps each logical axis to mesh axes.

The program is the same on one device and on many. Only the placement of weights and decode states differs, and XLA
inserts the collective operations (Auto axes). To change the parallelism, edit `SPLITS`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hsd_jax.axes import KV_HEADS, ROWS, SLOTS, Axes, map_named
from hsd_jax.validation import shown

MESH_AXES = ("data", "model")
FSDP = "fsdp"
TRAINING_AXES = ("data", FSDP, "model")
"""In training, "fsdp" splits rows as "data" does. It also splits weights and optimizer state along an axis whose size
it divides, and XLA gathers a weight where a product needs it. Decoding reads every weight in every round, so it has no
such axis."""

SPLITS: dict[str | None, tuple[str, ...]] = {
    ROWS: ("data", FSDP),
    SLOTS: (),
    "vocab": ("model",),
    "heads": ("model",),
    KV_HEADS: ("model",),
    "mlp": ("model",),
    "embed": (),
    None: (),
}
"""The mesh axes that split each logical axis. Axes that a mesh lacks are skipped."""

WEIGHT_AXES: dict[str, tuple[str | None, ...]] = {
    "q": ("heads", "embed"),
    "k": ("kv_heads", "embed"),
    "v": ("kv_heads", "embed"),
    "o": ("embed", "heads"),
    "qkv": ("kv_heads", "embed"),  # packed (`models/packing.py`)
    "gate": ("mlp", "embed"),
    "up": ("mlp", "embed"),
    "down": ("embed", "mlp"),
    "gate_up": (None, "mlp", "embed"),
    "steer": (None, "mlp", "embed"),
    "injector.bias": ("vocab", None),
    "embedding": ("vocab", "embed"),
    "head": ("vocab", "embed"),
}
"""Logical axes of a kernel by the name of its layer, whose bias has the first of them, or of a weight by its own name.
Weights that are not listed are replicated."""


def make_mesh(spec: str | Mesh | None, axes: tuple[str, ...] = MESH_AXES) -> Mesh | None:
    """A mesh from a text such as "data=2,model=4", or from a `Mesh`. None stays None. `axes` are those it may have."""
    if spec is None:
        return None
    if isinstance(spec, Mesh):
        if not set(spec.axis_names) <= set(axes):
            raise ValueError(f"mesh axes {spec.axis_names}: allowed are {axes}")
        return Mesh(spec.devices, spec.axis_names, axis_types=(AxisType.Auto,) * len(spec.axis_names))
    sizes = mesh_sizes(spec, axes)
    needed, there = int(np.prod(list(sizes.values()))), jax.device_count()
    if needed > there:
        of = f", in all {jax.process_count()} processes together" if jax.process_count() > 1 else ""
        raise ValueError(f"mesh={spec!r} needs {needed} devices; there are {there}{of}")
    return jax.make_mesh(
        tuple(sizes.values()), axes, axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[:needed]
    )


def mesh_sizes(spec: str, axes: tuple[str, ...] = MESH_AXES) -> dict[str, int]:
    """The number of devices along each axis of a mesh, from a text such as "data=2,model=4"."""
    allowed = ", ".join(f"{name}=N" for name in axes)
    if not isinstance(spec, str):
        raise ValueError(f"mesh={shown(spec)}: expected a text made of {allowed}, or a Mesh")
    sizes: dict[str, int] = dict.fromkeys(axes, 1)
    for part in spec.split(","):
        name, _, size = part.strip().partition("=")
        if name not in sizes or not size.isdigit() or int(size) < 1:
            raise ValueError(f"mesh={spec!r}: {part.strip()!r} is not one of {allowed} with N >= 1")
        sizes[name] = int(size)
    return sizes


def _split(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...], units: dict) -> list[Any]:
    """The mesh axes over which each axis of an array is split. An axis whose size the mesh does not divide is not.

    `units` gives the number of heads along an axis, so that no head is split.
    """
    spec: list[Any] = []
    for size, axis in zip(shape, axes, strict=True):
        names = tuple(name for name in SPLITS[axis] if name in mesh.axis_names)
        divides = names and units.get(axis, size) % _devices(mesh, names) == 0
        spec.append((names[0] if len(names) == 1 else names) if divides else None)
    return spec


def _devices(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def heads_of(config: Any) -> tuple[int, int]:
    """The numbers of query heads and key/value heads of a model, for `weight_shardings`; 1 and 1 without attention."""
    return getattr(config, "num_heads", 1), getattr(config, "num_kv_heads", 1)


def weight_shardings(mesh: Mesh, weights: Any, num_heads: int, num_kv_heads: int) -> Any:
    """A sharding for every weight of a target or drafter, by `WEIGHT_AXES`.

    If the mesh has an axis "fsdp", it also splits each matrix, along the first unsplit axis whose size it divides.
    """
    units = {"heads": num_heads, "kv_heads": num_kv_heads}

    def one(path, leaf):
        layer, name = ["", *(p.key for p in path if isinstance(p, jax.tree_util.DictKey))][-2:]
        found = (WEIGHT_AXES.get(key) for key in (f"{layer}.{name}", layer, name))
        axes = next(filter(None, found), (None,) * leaf.ndim)
        spec = _split(mesh, leaf.shape, axes[: leaf.ndim], units)  # scales are split as the outputs of their kernel
        if FSDP in mesh.axis_names and leaf.ndim > 1:
            free = [i for i, size in enumerate(leaf.shape) if spec[i] is None and size % mesh.shape[FSDP] == 0]
            spec = [FSDP if [i] == free[:1] else split for i, split in enumerate(spec)]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(one, weights)


def row_shardings(mesh: Mesh, tree: Any, batch: int) -> Any:
    """Shardings of per-row arrays, by the names of their axes.

    Rows are split over "data" and "fsdp", caches also over key/value heads. An array whose first axis is not `batch`
    long is replicated.
    """

    def one(axes: Axes, leaf: Any) -> NamedSharding:
        if leaf.ndim == 0 or leaf.shape[0] != batch:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, PartitionSpec(*_split(mesh, leaf.shape, axes, {})))

    return map_named(one, tree)


def placed(shapes: Any, shardings: Any) -> Any:
    """Shapes with their shardings, for programs that are lowered without arrays."""
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)


def check_rows(mesh: Mesh, num_rows: int) -> None:
    """Checks that the mesh divides the number of rows of a training pass."""
    if num_rows % (multiple := rows_multiple(mesh)):
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if name in SPLITS["rows"] and size > 1)
        raise ValueError(f"a pass has {num_rows} rows (train.batch); mesh axis {axes} needs a multiple of {multiple}")


def rows_here(mesh: Mesh | None) -> tuple[int, int]:
    """The index of the part of a batch's rows on this process's devices, and the number of parts. (0, 1): all rows."""
    if mesh is None:
        return 0, 1
    of_rows = [mesh.axis_names.index(name) for name in SPLITS["rows"] if name in mesh.axis_names]
    others = [axis for axis in range(mesh.devices.ndim) if axis not in of_rows]
    is_here = np.vectorize(lambda device: device.process_index == jax.process_index())(mesh.devices)
    here = np.flatnonzero(is_here.transpose(*of_rows, *others).reshape(rows_multiple(mesh), -1).any(1))
    first, num = here[0], len(here)
    is_whole_part = rows_multiple(mesh) % num == first % num == 0 and here[-1] == first + num - 1
    return (int(first) // num, rows_multiple(mesh) // num) if is_whole_part else (0, 1)


def rows_multiple(mesh: Mesh | None) -> int:
    """The number of rows must be a multiple of this."""
    return 1 if mesh is None else _devices(mesh, tuple(name for name in SPLITS["rows"] if name in mesh.axis_names))
