"""What the operations of a program depend on while it is traced, and how they reach the devices of its mesh.

jax reuses a compiled program by its function and the shapes of its arguments; it does not see this record. So each
record needs functions of its own (`Program.traced`), or is a static argument of the function.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

OFF = "off"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that is being traced. The defaults are those of a function that nobody has bound to a record."""

    backend: str | None = None
    """The platform, "cpu", "gpu" or "tpu". None: that of this process."""
    mesh: Mesh | None = None
    """None: one device. The axes are among `sharding.TRAINING_AXES`."""
    precision: str | None = None
    """A name for `jax.default_matmul_precision`. None: what is set outside."""
    isa: str = OFF
    """The instruction set of the CPU kernels (`native.py`). OFF: they are not used."""
    has_gpu_kernels: bool = False
    """Whether a program for a GPU uses the kernels of `triton.py`."""
    interprets: bool = False
    """Whether these run in Pallas's interpreter, on any platform, for tests."""
    widens: bool = True
    """Whether XLA for a CPU multiplies bfloat16 in float32. Otherwise a row's bits depend on the other rows."""
    active: Array | None = None
    """The rows [B] or nodes [B, N] that count (`native.only`). None: all."""

    @property
    def platform(self) -> str:
        return self.backend or jax.default_backend()

    def traced(self, function: Callable) -> Callable:
        """`function`, which is traced as part of this program."""

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            inherits = contextlib.nullcontext()
            with jax.default_matmul_precision(self.precision) if self.precision else inherits, tracing(**vars(self)):
                return function(*args, **kwargs)

        return wrapped


_UNBOUND = Program()
_here: contextvars.ContextVar[Program] = contextvars.ContextVar("hsd_program", default=_UNBOUND)


def here() -> Program:
    """The program that is being traced."""
    return _here.get()


@contextlib.contextmanager
def tracing(**fields: Any) -> Iterator[None]:
    """Programs traced inside have these values of the fields of `Program`, and the others of the program outside."""
    token = _here.set(dataclasses.replace(_here.get(), **fields))
    try:
        yield
    finally:
        _here.reset(token)


def shards(axis: str, size: int) -> int:
    """The number of devices along the mesh's `axis` if it divides this size of an array's axis, else 1."""
    mesh = here().mesh
    num = 1 if mesh is None or axis not in mesh.axis_names else mesh.shape[axis]
    return num if size % num == 0 else 1


def placed(x: Array, *axes: str | None) -> Array:
    """`x`, split over the given axes of the mesh where they divide its sizes, and not split elsewhere."""
    mesh = here().mesh
    if mesh is None:
        return x
    spec = (axis if axis and shards(axis, size) > 1 else None for axis, size in zip(axes, x.shape, strict=True))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def on_each_device(function: Callable, ins: list[tuple], outs: Any, batch: int, groups: int) -> Callable:
    """Applies `function` to each device's part of its arguments.

    Args:
      ins: the axes of each argument: "data" for rows, "model" for key/value heads, None for an axis that is not split.
        Rows that training splits over "fsdp" are not split.
      outs: the axes of the results, in the same form.
      batch, groups: numbers of rows and of key/value heads. An axis that the mesh does not divide is not split.
    """
    mesh = here().mesh
    if mesh is None:
        return function
    shared = {"data": shards("data", batch) > 1, "model": shards("model", groups) > 1}

    def spec(axes: tuple) -> PartitionSpec:
        return PartitionSpec(*(axis if shared.get(axis) else None for axis in axes))

    def is_axes(x: Any) -> bool:
        return type(x) is tuple and all(type(axis) is not tuple for axis in x)

    in_specs, out_specs = (jax.tree.map(spec, tree, is_leaf=is_axes) for tree in (tuple(ins), outs))
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
