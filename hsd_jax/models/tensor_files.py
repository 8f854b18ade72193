"""Trees of weights in safetensors files: opening, checking, reading, and writing whole or not at all.

Every name and shape is checked before a number is read, and every number before it is used. Knows files and dotted
paths, no models. Read next: `convert.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hsd_jax.files import replacing
from hsd_jax.types import Weights

DTYPES = ("float32", "bfloat16", "float16")
"""What weights may be held and stored in."""
_READABLE = ("F64", "F32", "BF16", "F16")
_IDS = "I32"


class Stored(NamedTuple):
    """A tensor in an open file, under the name it has there."""

    file: Path
    handle: Any
    name: str

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name!r}"


def checked_dtype(dtype: Any) -> np.dtype:
    """The dtype, if weights may be kept in it; a ValueError names the allowed ones."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    return found


def open_all(files: list[Path], stack: contextlib.ExitStack) -> list[Stored]:
    """All tensors of some safetensors files, unread; `stack` closes them."""
    tensors = []
    for file in files:
        size = file.stat().st_size
        if size == 0:  # cannot be mapped
            raise ValueError(f"{file}: empty; fetch the file again")
        try:
            handle = stack.enter_context(safe_open(file, framework="np"))
        except SafetensorError as error:
            raise ValueError(
                f"{file}: not a whole safetensors file ({error}; {size} bytes found). A download cut short or a"
                " Git LFS pointer? Fetch it again"
            ) from error
        tensors += [Stored(file, handle, name) for name in handle.keys()]  # noqa: SIM118
    return tensors


def stored_dtype(tensors: Iterable[Stored]) -> str:
    """What tensors are to be held in so that none is rounded: bfloat16 if all are stored in it, else float32."""
    kinds = {tensor.handle.get_slice(tensor.name).get_dtype() for tensor in tensors}
    return "bfloat16" if kinds == {"BF16"} else "float32"


def read_array(tensor: Stored, allowed: tuple[str, ...] = _READABLE) -> np.ndarray:
    """Reads one tensor, of a floating dtype only unless `allowed` says otherwise."""
    kind = tensor.handle.get_slice(tensor.name).get_dtype()
    if kind not in allowed:
        raise ValueError(f"{tensor}: found dtype {kind}, expected one of {', '.join(allowed)}")
    return tensor.handle.get_tensor(tensor.name)


def _cast(array: Any, dtype: np.dtype, where: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # an overflow is reported below
        cast = np.asarray(array).astype(dtype)
    if not np.isfinite(cast).all():
        raise ValueError(f"{where}: holds NaN or infinity in {dtype.name}, expected finite numbers; the file is damaged"
                         " or its numbers need a wider dtype")  # fmt: skip
    return np.ascontiguousarray(cast)


def _check_names(found: Iterable[str], expected: Iterable[str], where: str, config: str) -> None:
    found, expected = set(found), set(expected)
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing:
        raise ValueError(
            f"{where}: missing tensor {missing[0]!r} ({len(missing)} of {len(expected)} missing) which {config} asks"
            f" for; found {', '.join(sorted(found)[:3]) or 'none'}. The files or {config} belong to another model"
        )
    if extra:
        raise ValueError(
            f"{where}: tensor {extra[0]!r} ({len(extra)} in all) has no place in the model of {config}, which expects"
            f" {len(expected)} tensors; {config} belongs to another model"
        )


def _check_shape(found: Iterable[int], expected: tuple[int, ...], where: str, config: str) -> None:
    if tuple(found) != expected:
        raise ValueError(
            f"{where}: found shape {list(found)}, expected {list(expected)} from {config}; the two belong to"
            " different models"
        )


def load_tree(
    stored: dict[str, Stored],
    wanted: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    folder: Path,
    config: str,
    ids: tuple[str, ...] = (),
) -> Weights:
    """The tensors `wanted` (our path -> stored name) as a nested tree; all shapes are checked before any is read.

    Args:
      ids: paths that hold token ids, int32 whatever `dtype` is.
    """
    _check_names(stored, wanted.values(), str(folder), config)
    for path, name in wanted.items():
        tensor = stored[name]
        _check_shape(tensor.handle.get_slice(tensor.name).get_shape(), shapes[path], str(tensor), config)
    arrays = {}
    for path, name in wanted.items():
        if path in ids:
            arrays[path] = jnp.asarray(read_array(stored[name], (_IDS,)))
        else:
            arrays[path] = jnp.asarray(_cast(read_array(stored[name]), dtype, str(stored[name])))
    return unflatten_dict(arrays, sep=".")


def store_tree(
    path: Path,
    weights: Weights,
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    name: Callable[[str], str],
    ids: tuple[str, ...] = (),
) -> None:
    """Writes a tree to one safetensors file, whole or not at all; `ids` as in `load_tree`.

    Raises:
      ValueError: if a weight is missing, unexpected, misshapen or not finite.
      OSError: naming the file, if it cannot be written.
    """
    flat: dict[str, Any] = flatten_dict(weights, sep=".")
    _check_names(flat, shapes, "weights to save", "the configuration")
    tensors = {}
    for key, array in flat.items():
        _check_shape(np.shape(array), shapes[key], f"weights to save: {key!r}", "the configuration")
        where = f"weights to save: {key!r}"
        tensors[name(key)] = np.asarray(array, np.int32) if key in ids else _cast(array, dtype, where)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})  # transformers refuses files without it
        except SafetensorError as error:  # so it calls a full disk
            raise OSError(str(error)) from error
        temporary.chmod(0o644)  # safetensors writes files for the owner only
