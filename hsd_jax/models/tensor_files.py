"""Stores and reads the weights of targets, drafters and what belongs to them, as safetensors beside a JSON file.

`store` and `read` take a name for the two files, and the function that makes such weights. Every name and shape is
checked before a number is read, and every number before it is used. A tensor goes from its file to its devices slice by
slice. The subclasses of `StoredTensor` know the kind of file.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hsd_jax.host import sharding
from hsd_jax.host.files import replacing, write_json
from hsd_jax.models.placement import HERE, Placement, all_finite, assemble
from hsd_jax.models.target import init_target
from hsd_jax.types import Weights
from hsd_jax.validation import shown

Init = Callable[..., Weights]
"""`init(key, config)`: the weights of a model, of which only shapes and dtypes are used here."""
MODEL = "model"
"""The name of a target's files, which are those of Hugging Face."""

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes in which weights may be held and stored."""
_IDS = "I32"
_NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "BF16": jnp.bfloat16,
    "F16": np.float16,
    _IDS: np.int32,
    "I64": np.int64,
}
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
    start: int
    """The position of its first byte in the file."""

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name!r}"

    def rows(self, index: tuple[slice, ...] = ()) -> Iterator[np.ndarray]:
        """Yields a slice of step 1 in blocks of rows of about `_ROWS_BYTES` each."""
        whole = (*index, *[slice(None)] * len(self.shape))
        rows, *rest = (slice(*s.indices(n)[:2]) for s, n in zip(whole, self.shape, strict=False))
        step = max(_ROWS_BYTES // (8 * math.prod(self.shape[1:])), 1)
        for row in range(rows.start, rows.stop, step):
            yield self.block(slice(row, min(row + step, rows.stop)), *rest)

    @abc.abstractmethod
    def block(self, rows: slice, *columns: slice) -> np.ndarray:
        """A slice with given ends. Once it is freed, no page of the file stays mapped."""

    @abc.abstractmethod
    def sample(self, stride: int) -> np.ndarray:
        """Every `stride`-th number of the tensor in row-major order. It reads little else from the file."""


class Safetensor(StoredTensor):
    """A tensor of a safetensors file."""

    readable = ("F64", "F32", "BF16", "F16")

    def _mapped(self) -> np.ndarray:  # anew each time, which releases the pages read before
        return np.memmap(self.file, _NUMPY[self.dtype], "r", self.start, self.shape)

    def block(self, rows: slice, *columns: slice) -> np.ndarray:
        return self._mapped()[rows, *columns]

    def sample(self, stride: int) -> np.ndarray:
        return self._mapped().reshape(-1)[::stride]


@dataclasses.dataclass(frozen=True)
class PickedRows(StoredTensor):
    """Some rows of a tensor of a safetensors file, in any order."""

    readable = Safetensor.readable

    whole: StoredTensor
    rows_of_whole: np.ndarray

    @classmethod
    def of(cls, whole: StoredTensor, rows: np.ndarray) -> PickedRows:
        return cls(whole.file, whole.name, (len(rows), *whole.shape[1:]), whole.dtype, whole.start, whole, rows)

    def block(self, rows: slice, *columns: slice) -> np.ndarray:
        return self.whole.block(slice(0, self.whole.shape[0]), *columns)[self.rows_of_whole[rows]]

    def sample(self, stride: int) -> np.ndarray:
        return self.block(slice(None)).reshape(-1)[::stride]


def checked_dtype(dtype: Any, allowed: tuple[str, ...] = DTYPES) -> np.dtype:
    """The dtype, if weights may be held in it. Else a ValueError names the allowed ones."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in allowed:
        raise ValueError(f"dtype={shown(dtype)}: allowed are {', '.join(allowed)}")
    return found


def open_all(files: list[Path]) -> list[StoredTensor]:
    """All tensors of some safetensors files, unread."""
    tensors: list[StoredTensor] = []
    for file in files:
        size = file.stat().st_size
        try:
            with safe_open(file, framework="np"):  # checks the header and the length of the file
                pass
        except (SafetensorError, OSError) as error:  # an empty file cannot be mapped
            if size < 1024 and file.read_bytes().startswith(b"version https://git-lfs."):
                raise ValueError(f"{file}: a pointer of Git LFS: fetch the file with `git lfs pull`") from error
            raise ValueError(f"{file}: not a complete safetensors file ({error}; {size} bytes found)") from error
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, facts in header.items():
            start = 8 + length + facts["data_offsets"][0]
            tensors.append(Safetensor(file, name, tuple(facts["shape"]), facts["dtype"], start))
    return tensors


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers."""
    return one.shape == other.shape and all(map(np.array_equal, one.rows(), other.rows()))


def _read(
    tensor: StoredTensor, index: tuple[slice, ...], dtype: np.dtype, held_dtype: np.dtype, whole: tuple[int, ...]
) -> np.ndarray:
    """A slice of a tensor, rounded to `dtype` and held in `held_dtype`. `index` is of an array of the shape `whole`.

    The array starts at a cache line, so that jax uses it as an array of a CPU device without a copy.
    """
    index = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, whole, strict=True))
    shape = [s.stop - s.start for s in index]
    size = math.prod(shape) * held_dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    out, at = room[start : start + size].view(held_dtype).reshape(shape), 0
    for rows in tensor.rows(index):
        with np.errstate(over="ignore"):  # the caller checks for infinities
            out[at : at + len(rows)] = rows.astype(dtype, copy=False)
        at += len(rows)
    out[at:] = 0
    return out


def _check_finite(is_finite: bool, dtype: np.dtype, where: Any) -> None:
    if not is_finite:
        raise ValueError(f"{where}: holds NaN or infinity in {dtype.name}")


def _check_names(found: Iterable[str], expected: Iterable[str], where: Any) -> None:
    found, expected = set(found), set(expected)
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing or extra:
        fault, names = ("missing", missing) if missing else ("unexpected", extra)
        raise ValueError(f"{where}: {fault} tensor {names[0]!r} ({len(names)} in all)")


def _check_shape(found: Iterable[int], expected: tuple[int, ...], where: Any) -> None:
    if tuple(found) != expected:
        raise ValueError(f"{where}: found shape {list(found)}, expected {list(expected)}")


@functools.lru_cache(maxsize=16)  # tracing a small model takes longer than reading it
def specs_of(init: Init, config: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and the dtype of each weight of `init(key, config)` by its dotted path. No weight is computed.

    The layers of a target have equal shapes, so one of them is traced.
    """
    is_target = init is init_target
    traced = dataclasses.replace(config, num_layers=1, layer_types=()) if is_target else config
    tree = dict(jax.eval_shape(lambda: init(jax.random.key(0), traced)))
    if is_target:
        tree |= {f"layer_{i}": tree["layer_0"] for i in range(config.num_layers)}
    return dict[str, Any](flatten_dict(tree, sep="."))


def _is_ids(spec: jax.ShapeDtypeStruct) -> bool:
    """Whether a weight is token ids, which have one dtype everywhere."""
    return jnp.issubdtype(spec.dtype, jnp.integer)


def file_name(path: str, outer: Mapping[str, str], layers: str, modules: Mapping[str, str]) -> str:
    """The name in a file of one of our paths: `layer_3.attn.q.kernel` -> `LAYERS.3.QUERY.weight`."""
    if path in outer:
        return outer[path]
    layer, _, rest = path.partition(".")
    module, _, leaf = rest.rpartition(".")
    return f"{layers}.{layer.removeprefix('layer_')}.{modules[module]}.{'bias' if leaf == 'bias' else 'weight'}"


def matched(
    stored: Mapping[str, StoredTensor], where: Path, init: Init, config: Any, named: Callable[[str], str] = str
) -> dict[str, StoredTensor]:
    """The tensor of each weight by our path. `named` gives the path's name in the files.

    Raises a ValueError unless `stored` has exactly the weights of `init`, in the right shapes and dtypes.
    """
    num_layers = getattr(config, "num_layers", 1)
    if len(stored) < num_layers:  # before the specs of so many are made
        raise ValueError(f"{where}: {num_layers} layers, but only {len(stored)} tensors")
    specs = specs_of(init, config)
    names = {path: named(path) for path in specs}
    _check_names(stored, names.values(), where)
    for path, spec in specs.items():
        tensor = stored[names[path]]
        _check_shape(tensor.shape, spec.shape, tensor)
        allowed = (_IDS,) if _is_ids(spec) else tensor.readable
        if tensor.dtype not in allowed:
            raise ValueError(f"{tensor}: found dtype {tensor.dtype}, expected one of {', '.join(allowed)}")
    return {path: stored[name] for path, name in names.items()}


def load_tree(
    tensors: Mapping[str, StoredTensor], where: Path, init: Init, config: Any, dtype: Any, placement: Placement
) -> Weights:
    """Reads tensors that `matched` found, rounded to `dtype`, as the tree of `init`.

    `config` may have another size of the vocabulary than the files. The result then has the first rows of a tensor, or
    further rows of zeros.
    """
    dtype, heads, specs = checked_dtype(dtype), sharding.heads_of(config), specs_of(init, config)
    held = placement.held_dtype(dtype)
    floats = {path: spec if _is_ids(spec) else jax.ShapeDtypeStruct(spec.shape, held) for path, spec in specs.items()}
    tree = unflatten_dict(floats, sep=".")
    placement.check_room(tree, heads, str(where))
    shardings = placement.shardings(tree, heads)
    arrays, checks, array = {}, {}, None
    try:
        for path, spec in floats.items():
            kinds = {"dtype": spec.dtype if _is_ids(spec) else dtype, "held_dtype": jnp.dtype(spec.dtype)}
            read = functools.partial(_read, tensors[path], whole=spec.shape, **kinds)
            array = assemble(spec.shape, shardings[path], read)
            checks[path] = all_finite(array)
            arrays[path] = placement.quantized(array)
        for path, is_finite in checks.items():
            _check_finite(bool(is_finite), dtype, tensors[path])
    except BaseException:
        arrays, checks, array = {}, {}, None  # frees the memory: Python keeps the frames of the last error
        raise
    return unflatten_dict(arrays, sep=".")


def config_file(folder: str | Path, name: str) -> Path:
    """The file of a configuration that `store` writes."""
    return Path(folder) / ("config.json" if name == MODEL else f"{name}_config.json")


def weights_file(folder: str | Path, name: str) -> Path:
    """The file of the weights that `store` writes."""
    return Path(folder) / f"{name}.safetensors"


def is_stored(folder: str | Path, name: str) -> bool:
    """Whether a folder has one of the two files."""
    return config_file(folder, name).is_file() or weights_file(folder, name).is_file()


def read(
    folder: str | Path,
    name: str,
    init: Init,
    config: Any,
    dtype: Any = "float32",
    placement: Placement = HERE,
    held: Any = None,
) -> Weights:
    """Reads the weights that `store` wrote. `held`: the configuration of the result, as in `load_tree`."""
    file = weights_file(folder, name)
    tensors = matched({tensor.name: tensor for tensor in open_all([file])}, file, init, config)
    return load_tree(tensors, file, init, config if held is None else held, dtype, placement)


def store(
    folder: str | Path,
    name: str,
    values: dict[str, Any],
    weights: Weights,
    init: Init,
    config: Any,
    dtype: Any = "float32",
    named: Callable[[str], str] = str,
) -> None:
    """Writes weights as NAME.safetensors, and `values`, which describe `config`, as the JSON file of that name.

    The weights must have the names and shapes of `init`. `named` gives each path its name in the file. No file appears
    half-written.
    """
    dtype, file, specs = checked_dtype(dtype), weights_file(folder, name), specs_of(init, config)
    flat, tensors = dict[str, Any](flatten_dict(weights, sep=".")), {}
    _check_names(flat, specs, f"weights for {file}")
    for path, array in flat.items():
        what, spec = f"weights for {file}: {path!r}", specs[path]
        _check_shape(np.shape(array), spec.shape, what)
        with np.errstate(over="ignore"):  # an overflow is reported below
            numbers = np.asarray(array).astype(spec.dtype if _is_ids(spec) else dtype)
        _check_finite(bool(np.isfinite(numbers).all()), dtype, what)
        tensors[named(path)] = np.ascontiguousarray(numbers)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})  # transformers refuses files without it
        except SafetensorError as error:  # a full disk, for example
            raise OSError(str(error)) from error
        temporary.chmod(0o644)  # safetensors writes files for the owner only
    write_json(config_file(folder, name), values)
