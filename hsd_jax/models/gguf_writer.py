"""Writes a target as one GGUF file, for llama.cpp and for tests.

All matrices have one type. Vectors are float32, as llama.cpp requires. Besides the weights it holds one tensor at a
time. Read next: `gguf_layout.py`, the table that it shares with `gguf_file.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from hsd_jax.config import ModelConfig
from hsd_jax.host.files import replacing
from hsd_jax.models import gguf_layout
from hsd_jax.models.convert import shapes_of, stored_weights
from hsd_jax.models.target import init_target
from hsd_jax.models.tensor_files import StoredTensor, checked_numbers, checked_weights, read_whole
from hsd_jax.types import Weights

_PLAIN = {"F32": np.dtype(np.float32), "BF16": jnp.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}
_QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"} | {kind: kind for kind in _QUANTIZED}
"""The types in which matrices may be stored, and GGML's names for them."""


def save_gguf(
    path: str | Path,
    config: ModelConfig,
    weights: Weights | str | Path,
    dtype: str = "float32",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes the file. A file never appears half-written.

    Args:
      weights: weights in the tree of `init_target`, in any float dtype; or a Hugging Face folder, from which one tensor
        at a time is read.
      dtype: type of the matrices, one of TYPES.
      metadata: further keys, for example those of a tokenizer: bools, integers (written as uint32), floats (float32),
        texts, or lists of them. Without a tokenizer llama.cpp works only with token ids.
    Raises:
      FileNotFoundError: if `weights` is a path but not a folder.
      ValueError: if GGUF cannot express `config`; it names the field. Also if a weight is missing, unexpected,
        misshapen or not finite, or if the length of its rows is not a multiple of the type's block; it names the
        weight.
      OSError: naming the file, if it cannot be written.
    """
    if dtype not in TYPES:
        raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(TYPES)}")
    path, matrices, shapes = Path(path), gguf.GGMLQuantizationType[TYPES[dtype]], shapes_of(init_target, config)
    values, factors = gguf_layout.describe(config)
    if isinstance(weights, str | Path):
        flat: dict[str, Any] = stored_weights(weights, config)
    else:
        flat = checked_weights(weights, shapes)
    names = {key: gguf_layout.tensor_name(key) for key in shapes}
    per_block = gguf.GGML_QUANT_SIZES[matrices][0]
    kinds = {key: matrices if len(shape) > 1 else gguf.GGMLQuantizationType.F32 for key, shape in shapes.items()}
    for key, shape in shapes.items():
        if len(shape) > 1 and shape[-1] % per_block:
            raise ValueError(
                f"weights to save: {key!r} has rows of {shape[-1]} numbers: {matrices.name} takes multiples of"
                f" {per_block}"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, values.pop("general.architecture"))
        for key, value in (values | {"tokenizer.ggml.model": "no_vocab"} | dict(metadata or {})).items():
            _add(writer, key, value)
        if factors is not None:
            writer.add_tensor_info(gguf_layout.ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        for key, shape in shapes.items():
            as_bytes = gguf.quants.quant_shape_to_byte_shape(shape, kinds[key])
            size = int(np.prod(as_bytes))
            writer.add_tensor_info(names[key], as_bytes, np.dtype(np.uint8), size, kinds[key])
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors is not None:
                writer.write_tensor_data(factors)
            for key in shapes:
                writer.write_tensor_data(_encoded(key, flat[key], config, kinds[key]))
        finally:
            writer.close()


def _encoded(key: str, array: Any, config: ModelConfig, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The bytes of a weight in GGUF's layout."""
    heads, added = gguf_layout.interleaved_heads(key, config), gguf_layout.added(key, config)
    array = read_whole(array, np.dtype(np.float32)) if isinstance(array, StoredTensor) else np.asarray(array)
    if added:
        array = array.astype(np.float32) + np.float32(added)
    if heads is not None:
        ours, array = array, np.empty_like(array)
        array[gguf_layout.interleaved_rows(np.arange(len(ours)), len(ours), heads)] = ours
    numbers = checked_numbers(key, array, _PLAIN.get(kind.name, np.dtype(np.float32)))
    return numbers.view(np.uint8) if kind.name in _PLAIN else gguf.quants.quantize(numbers, kind)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)
