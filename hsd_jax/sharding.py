"""The mesh and one table: logical axis name -> mesh axis.

Weights and decode states are placed from outside; the program is the same on one device and on many, and XLA
inserts the collectives (Auto axes). Changing the parallelism means editing `RULES`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hsd_jax.settings import shown

MESH_AXES = ("data", "model")

RULES: dict[str | None, str | None] = {
    "rows": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "embed": None,
    None: None,
}
"""Which mesh axis splits each logical axis."""

WEIGHT_AXES: dict[tuple[str, str], tuple[str | None, ...]] = {
    ("q", "kernel"): ("heads", "embed"),
    ("k", "kernel"): ("kv_heads", "embed"),
    ("v", "kernel"): ("kv_heads", "embed"),
    ("o", "kernel"): ("embed", "heads"),
    ("gate", "kernel"): ("mlp", "embed"),
    ("up", "kernel"): ("mlp", "embed"),
    ("down", "kernel"): ("embed", "mlp"),
    ("qkv", "kernel"): ("kv_heads", "embed"),  # packed (`models/packing.py`)
    ("gate_up", "kernel"): (None, "mlp", "embed"),
    ("q", "bias"): ("heads",),
    ("k", "bias"): ("kv_heads",),
    ("v", "bias"): ("kv_heads",),
    ("gate", "bias"): ("mlp",),
    ("up", "bias"): ("mlp",),
    ("qkv", "bias"): ("kv_heads",),
    ("gate_up", "bias"): (None, "mlp"),
    ("injector", "bias"): ("vocab", None),
    ("trunk", "slots"): (None, "embed"),
    ("", "embedding"): ("vocab", "embed"),
    ("", "head"): ("vocab", "embed"),
}
"""Logical axes of each weight by the last two names of its path; weights that are not listed are replicated."""


def make_mesh(spec: str | Mesh | None) -> Mesh | None:
    """A mesh from "data=2,model=4"; a `Mesh` and None pass through.

    Raises:
      ValueError: naming the wrong part, the allowed axes, or the devices there are.
    """
    if spec is None:
        return None
    if isinstance(spec, Mesh):
        if not set(spec.axis_names) <= set(MESH_AXES):
            raise ValueError(f"mesh axes {spec.axis_names}: allowed are {MESH_AXES}")
        return Mesh(spec.devices, spec.axis_names, axis_types=(AxisType.Auto,) * len(spec.axis_names))
    sizes = mesh_sizes(spec)
    needed, there = int(np.prod(list(sizes.values()))), jax.device_count()
    if needed > there:
        raise ValueError(f"mesh={spec!r} needs {needed} devices; there are {there}")
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:needed]
    )


def mesh_sizes(spec: str) -> dict[str, int]:
    """Devices along each axis of a mesh, from "data=2,model=4".

    Raises:
      ValueError: naming the wrong part and the allowed axes.
    """
    if not isinstance(spec, str):
        raise ValueError(f"mesh={shown(spec)}: expected a text of data=N, model=N, or a Mesh")
    sizes: dict[str, int] = dict.fromkeys(MESH_AXES, 1)
    for part in spec.split(","):
        name, _, size = part.strip().partition("=")
        if name not in sizes or not size.isdigit() or int(size) < 1:
            raise ValueError(f"mesh={spec!r}: {part.strip()!r} is not one of data=N, model=N with N >= 1")
        sizes[name] = int(size)
    return sizes


def _sharding(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...], units: dict) -> NamedSharding:
    """The placement of one array; an axis that does not divide evenly is replicated.

    `units` counts the whole heads of an axis: a head is never cut in two.
    """
    spec = []
    for size, axis in zip(shape, axes, strict=True):
        mesh_axis = RULES[axis]
        if mesh_axis is not None and mesh_axis not in mesh.axis_names:
            mesh_axis = None
        count = units.get(axis, size)
        spec.append(mesh_axis if mesh_axis is not None and count % mesh.shape[mesh_axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def weight_shardings(mesh: Mesh, weights: Any, num_heads: int, num_kv_heads: int) -> Any:
    """A sharding for every weight of a target or drafter, by `WEIGHT_AXES`."""
    units = {"heads": num_heads, "kv_heads": num_kv_heads}

    def one(path, leaf):
        names = ["", *(p.key for p in path if isinstance(p, jax.tree_util.DictKey))]
        axes = WEIGHT_AXES.get((names[-2], names[-1])) or WEIGHT_AXES.get(("", names[-1])) or (None,) * leaf.ndim
        return _sharding(mesh, leaf.shape, axes[: leaf.ndim], units)  # scales lie as the outputs of their kernel

    return jax.tree_util.tree_map_with_path(one, weights)


def row_shardings(mesh: Mesh, tree: Any, batch: int) -> Any:
    """Shardings of per-row arrays: the leading axis over "data"; cache buffers also over key/value heads."""

    def one(leaf):
        if leaf.ndim == 0 or leaf.shape[0] != batch:
            return NamedSharding(mesh, PartitionSpec())
        axes = ("rows", "kv_heads", None, None) if leaf.ndim == 4 else ("rows",) + (None,) * (leaf.ndim - 1)
        return _sharding(mesh, leaf.shape, axes, {})

    return jax.tree.map(one, tree)


def rows_multiple(mesh: Mesh | None) -> int:
    """Rows must come in multiples of this."""
    return 1 if mesh is None or "data" not in mesh.axis_names else mesh.shape["data"]
