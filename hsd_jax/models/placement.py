"""Decides how weights are held: the device of each slice, the dtype, quantization, and whether they fit into memory.

A tensor is assembled from the slices of its devices, so no device ever holds more than its own slice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from hsd_jax.host import sharding as sharding_lib
from hsd_jax.kernels import int8, native
from hsd_jax.types import Weights

_BLOCK = 1 << 24
"""How many numbers the host checks at once."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """How loaded weights are held."""

    mesh: Mesh | None = None
    """None: the default device."""
    widens: bool = False
    """Whether bfloat16 weights are held as float32 on a CPU that would widen them in every pass. The values stay the
    same."""
    quantize: str | None = None
    """One of `config.QUANTIZED`, for all matrices, the embedding and the LM head included. Norms and biases are not
    quantized."""
    rounds_rows: bool = False
    """Whether products with quantized matrices may round rows to 8 bits too. They do where the CPU kernels run."""

    def held_dtype(self, dtype: Any) -> np.dtype:
        """The dtype in which weights are held: float32 for bfloat16 on a CPU without kernels, if `widens`."""
        is_multiplied = not native.is_emulated(dtype) or (self.mesh is None and native.available())
        return jnp.dtype(dtype if is_multiplied or not self.widens else jnp.float32)

    def shardings(self, weights: Weights, heads: tuple[int, int]) -> dict[str, Any]:
        """The sharding of each weight by its path, given the numbers of heads, which are never split.

        None: the weight is not split and lies on the default device.
        """
        if self.mesh is None:
            return dict.fromkeys(flatten_dict(weights, sep="."))
        return dict(flatten_dict(sharding_lib.weight_shardings(self.mesh, weights, *heads), sep="."))

    def quantized(self, weight: Any) -> Any:
        """Quantizes a matrix if `quantize` is set and it is not quantized. Each part stays on its device."""
        if not self._is_quantized(weight):
            return weight
        is_grouped = self.rounds_rows and self.mesh is None and native.available()
        held = _grouped(weight) if is_grouped else _quantize(weight)
        return jax.block_until_ready(held)  # one at a time: the floats of a second one may not fit

    def _is_quantized(self, weight: Any) -> bool:
        if self.quantize is None or isinstance(weight, int8.Quantized):
            return False
        return weight.ndim == 2 and jnp.issubdtype(weight.dtype, jnp.floating)

    def check_room(self, floats: Weights, heads: tuple[int, int], what: str) -> None:
        """Checks that weights with these shapes and dtypes, before quantization, fit into memory."""
        shardings, largest, needed = self.shardings(floats, heads), 0, 0
        weights: dict[str, Any] = flatten_dict(floats, sep=".")
        for path, weight in weights.items():
            sharding = shardings[path]
            count = math.prod(weight.shape if sharding is None else sharding.shard_shape(weight.shape))
            needed += count if self._is_quantized(weight) else count * weight.dtype.itemsize
            largest = max(largest, count * weight.dtype.itemsize)
        needed += largest if self.quantize else 0  # a weight is read as floats first
        on_host = _devices(self.mesh)[0].platform == "cpu"
        advice = 'Use a smaller type (dtype="bfloat16", quantize="int8")'
        advice += "" if on_host else ' or spread them over more devices (mesh="model=N")'
        check_free(self.mesh, needed, f"{what}: its weights need", advice)


HERE = Placement()


def check_free(mesh: Mesh | None, needed: int, what: str, advice: str) -> None:
    """Checks that `needed` bytes are free on each device. `what` and `advice` begin and end the error message."""
    devices = _devices(mesh)
    on_host = devices[0].platform == "cpu"
    needed *= len(devices) if on_host else 1
    free = _free_on_host() if on_host else _free_on_devices(devices)
    if free is not None and needed > free:
        where = "this machine" if on_host else f"each of {len(devices)} devices"
        raise ValueError(f"{what} {needed / 1e9:.2f} GB on {where}, where {free / 1e9:.2f} GB are free. {advice}")


def assemble(
    shape: tuple[int, ...], sharding: Sharding | None, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> Array:
    """Assembles an array from the slices of its devices. Slices are read one by one, and replicated slices once."""
    if sharding is None:
        return jax.device_put(read((slice(None),) * len(shape)))
    parts, there = [], {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None  # every addressable device has an index
        key = str(index)
        if key not in there:
            there[key] = read(index)
        there[key] = jax.device_put(there[key], device)
        parts.append(there[key])
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def all_finite(weight: Array) -> Any:
    """Whether no number is NaN or infinity. An accelerator checks its own numbers and returns a flag asynchronously."""
    if weight.platform() != "cpu":
        return _all_finite(weight)
    return all(_is_finite_here(np.asarray(part.data)) for part in weight.addressable_shards if part.replica_id == 0)


def _is_finite_here(numbers: np.ndarray) -> bool:
    flat = numbers.reshape(-1)
    if flat.dtype == jnp.bfloat16:  # numpy has no fast test: NaN and infinity have an exponent of all ones
        flat = (flat.view(np.uint16) for flat in np.split(flat, range(_BLOCK, flat.size, _BLOCK)))
        return all(not ((block & 0x7F80) == 0x7F80).any() for block in flat)
    return all(np.isfinite(block).all() for block in np.split(flat, range(_BLOCK, flat.size, _BLOCK)))


_all_finite = jax.jit(lambda weight: jnp.isfinite(weight).all())
_grouped = jax.jit(lambda weight: int8.grouped(int8.quantize(weight)))


def _quantize(weight: Array) -> int8.Int8:
    """`int8.quantize` on the devices that hold the weight. A row that is split over devices has one scale."""
    if not isinstance(weight.sharding, NamedSharding):
        return jax.jit(int8.quantize)(weight)
    scales = NamedSharding(weight.sharding.mesh, PartitionSpec(weight.sharding.spec[0]))
    out = int8.Int8(cast(Any, weight.sharding), cast(Any, scales), weight.dtype.name)
    return jax.jit(int8.quantize, out_shardings=out)(weight)


def _devices(mesh: Mesh | None) -> list[Any]:
    return jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)


def _free_on_devices(devices: list[Any]) -> int | None:
    """Free bytes on the fullest device. None if the devices do not report them."""
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in stat for stat in stats):
        return None
    return min(stat["bytes_limit"] - stat.get("bytes_in_use", 0) for stat in stats)


def _free_on_host(root: Path = Path("/")) -> int | None:
    """Bytes that processes may still use, by the machine and by its container. None if the system does not report
    them."""
    found = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        group = root / "sys/fs/cgroup"
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        found += [int(most) - int(used) + int(stat["file"])] if most != "max" else []
    except (OSError, KeyError, ValueError):
        pass
    return min(found, default=None)
