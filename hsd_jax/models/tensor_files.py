"""Checks and reads trees of weights in files, and writes safetensors.

Every name and shape is checked before a number is read, and every number before it is used. A tensor goes from its file
to its devices slice by slice. The subclasses of `StoredTensor` know the kind of file.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hsd_jax.host.files import replacing
from hsd_jax.models.placement import HERE, Placement, all_finite, assemble
from hsd_jax.types import Weights

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes in which weights may be held and stored."""
_NUMPY = {"F64": np.float64, "F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16}
_IDS = "I32"
_ROWS_BYTES = 64 << 20
"""The approximate size of a block that is read at once. The host holds one block besides the weights."""


@dataclasses.dataclass(frozen=True)
class StoredTensor(abc.ABC):
    """An unread tensor in a file, with the name that it has there."""

    readable: ClassVar[tuple[str, ...]]
    """The dtypes of this kind of file that can be read as floats."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """The file's name for the dtype."""

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name!r}"

    @abc.abstractmethod
    def blocks(self, index: tuple[slice, ...], step: int) -> Iterator[np.ndarray]:
        """Yields a slice of step 1 in blocks of at most `step` rows. At the end no page of the file stays mapped."""

    @abc.abstractmethod
    def sample(self, stride: int) -> np.ndarray:
        """Every `stride`-th number of the tensor in row-major order. It reads little else from the file."""


@dataclasses.dataclass(frozen=True)
class Safetensor(StoredTensor):
    """A tensor of a safetensors file."""

    readable = tuple(_NUMPY)

    def blocks(self, index: tuple[slice, ...], step: int) -> Iterator[np.ndarray]:
        with safe_open(self.file, framework="np") as handle:  # mapped anew, which releases the pages read before
            part, (rows, *rest) = handle.get_slice(self.name), index
            for row in range(rows.start, rows.stop, step):
                yield part[tuple([slice(row, min(row + step, rows.stop)), *rest])]

    def sample(self, stride: int) -> np.ndarray:
        about = self.file.stat()
        start = _starts(self.file, about.st_size, about.st_mtime_ns)[self.name]
        size = int(np.prod(self.shape))
        return np.memmap(self.file, _NUMPY[self.dtype], "r", start, size)[::stride]


def checked_dtype(dtype: Any) -> np.dtype:
    """The dtype, if weights may be held in it. Else a ValueError names the allowed ones."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    return found


def open_all(files: list[Path]) -> list[StoredTensor]:
    """All tensors of some safetensors files, unread."""
    tensors: list[StoredTensor] = []
    for file in files:
        size = file.stat().st_size
        if size == 0:  # an empty file cannot be mapped
            raise ValueError(f"{file}: empty")
        try:
            with safe_open(file, framework="np") as handle:
                for name in handle.keys():  # noqa: SIM118
                    facts = handle.get_slice(name)
                    tensors.append(Safetensor(file, name, tuple(facts.get_shape()), facts.get_dtype()))
        except SafetensorError as error:
            raise ValueError(f"{file}: not a complete safetensors file ({error}; {size} bytes found)") from error
    return tensors


def _rows(tensor: StoredTensor, index: tuple[slice, ...] = ()) -> Iterator[np.ndarray]:
    """Yields a slice of a tensor in blocks of rows of about `_ROWS_BYTES` each."""
    whole = (*index, *[slice(None)] * len(tensor.shape))
    within = tuple(slice(*s.indices(n)[:2]) for s, n in zip(whole, tensor.shape, strict=False))
    step = max(_ROWS_BYTES // (8 * int(np.prod(tensor.shape[1:], dtype=np.int64)) or 1), 1)
    return tensor.blocks(within, step)


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers."""
    return one.shape == other.shape and all(np.array_equal(a, b) for a, b in zip(_rows(one), _rows(other), strict=True))


def _read(
    tensor: StoredTensor, index: tuple[slice, ...], dtype: np.dtype, held_dtype: np.dtype, whole: tuple[int, ...]
) -> np.ndarray:
    """A slice of a tensor, rounded to `dtype` and held in `held_dtype`. `index` is of an array of the shape `whole`.

    The array starts at a cache line, so that jax uses it as an array of a CPU device without a copy.
    """
    index = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, whole, strict=True))
    shape = [s.stop - s.start for s in index]
    size = int(np.prod(shape)) * held_dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    out, at = room[start : start + size].view(held_dtype).reshape(shape), 0
    for rows in _rows(tensor, index):
        with np.errstate(over="ignore"):  # the caller checks for infinities
            out[at : at + len(rows)] = rows.astype(dtype, copy=False)
        at += len(rows)
    out[at:] = 0
    return out


def _check_finite(is_finite: bool, dtype: np.dtype, where: str) -> None:
    if not is_finite:
        raise ValueError(f"{where}: holds NaN or infinity in {dtype.name}")


@functools.lru_cache(maxsize=64)
def _starts(file: Path, size: int, changed: int) -> dict[str, int]:
    """The offset of each tensor's data in a file. A changed file, by `size` and `changed`, is read again."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {name: 8 + length + facts["data_offsets"][0] for name, facts in header.items() if name != "__metadata__"}


def _check_names(found: Iterable[str], expected: Iterable[str], where: str, config: str) -> None:
    found, expected = set(found), set(expected)
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing or extra:
        fault, names = ("missing", missing) if missing else ("unexpected", extra)
        raise ValueError(f"{where}: {fault} tensor {names[0]!r} ({len(names)} in all) for the model of {config}")


def _check_shape(found: Iterable[int], expected: tuple[int, ...], where: str, config: str) -> None:
    if tuple(found) != expected:
        raise ValueError(f"{where}: found shape {list(found)}, expected {list(expected)} from {config}")


def check_tensors(
    stored: dict[str, StoredTensor],
    wanted: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    where: Path,
    config: str,
    ids: tuple[str, ...] = (),
) -> None:
    """Raises a ValueError unless `stored` has exactly the tensors `wanted`, in the right shapes and dtypes."""
    _check_names(stored, wanted.values(), str(where), config)
    for path, name in wanted.items():
        tensor = stored[name]
        _check_shape(tensor.shape, shapes[path], str(tensor), config)
        allowed = (_IDS,) if path in ids else tensor.readable
        if tensor.dtype not in allowed:
            raise ValueError(f"{tensor}: found dtype {tensor.dtype}, expected one of {', '.join(allowed)}")


def load_tree(
    stored: dict[str, StoredTensor],
    wanted: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    where: Path,
    config: str,
    ids: tuple[str, ...] = (),
    placement: Placement = HERE,
    heads: tuple[int, int] = (1, 1),
    held_shapes: dict[str, tuple[int, ...]] | None = None,
) -> Weights:
    """Reads tensors as a nested tree. All shapes are checked before any tensor is read.

    Args:
      stored: the tensors by their names in the files.
      wanted, shapes: the name in the files and the expected shape for each of our paths.
      dtype: dtype to which the numbers are rounded.
      where, config: the file or folder and its configuration, for error messages.
      ids: paths of token ids, which are int32 for every `dtype`.
      heads: numbers of query heads and of key/value heads, which a mesh never splits.
      held_shapes: the shapes of the result. They may have fewer rows than the file, or further rows of zeros.
    """
    check_tensors(stored, wanted, shapes, where, config, ids)
    held, shapes = placement.held_dtype(dtype), held_shapes or shapes
    kinds = {path: (jnp.dtype(jnp.int32),) * 2 if path in ids else (dtype, held) for path in wanted}
    floats = unflatten_dict({path: jax.ShapeDtypeStruct(shapes[path], kinds[path][1]) for path in wanted}, sep=".")
    placement.check_room(floats, heads, str(where))
    shardings = placement.shardings(floats, heads)
    arrays, checks, array = {}, {}, None
    try:
        for path, name in wanted.items():
            types = {"dtype": kinds[path][0], "held_dtype": kinds[path][1]}
            read = functools.partial(_read, stored[name], whole=shapes[path], **types)
            array = assemble(shapes[path], shardings[path], read)
            checks[path] = all_finite(array)
            arrays[path] = placement.quantized(array)
        for path, is_finite in checks.items():
            _check_finite(bool(is_finite), dtype, str(stored[wanted[path]]))
    except BaseException:
        arrays, checks, array = {}, {}, None  # frees the memory: Python keeps the frames of the last error
        raise
    return unflatten_dict(arrays, sep=".")


def store_tree(
    path: Path,
    weights: Weights,
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    name: Callable[[str], str],
    ids: tuple[str, ...] = (),
) -> None:
    """Writes a tree to one safetensors file, in which `name` gives each path its name. No file appears half-written."""
    flat, tensors = dict[str, Any](flatten_dict(weights, sep=".")), {}
    _check_names(flat, shapes, "weights to save", "the configuration")
    for key, array in flat.items():
        what = f"weights to save: {key!r}"
        _check_shape(np.shape(array), shapes[key], what, "the configuration")
        with np.errstate(over="ignore"):  # an overflow is reported below
            numbers = np.asarray(array).astype(np.int32 if key in ids else dtype)
        _check_finite(key in ids or bool(np.isfinite(numbers).all()), dtype, what)
        tensors[name(key)] = np.ascontiguousarray(numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})  # transformers refuses files without it
        except SafetensorError as error:  # a full disk, for example
            raise OSError(str(error)) from error
        temporary.chmod(0o644)  # safetensors writes files for the owner only
