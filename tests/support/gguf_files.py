"""GGUF files by llama.cpp's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind


def write(
    path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: Kind = Kind.F32
) -> Path:
    """Keys with None are left out. Matrices are quantized to `kind`; `uint8` tensors are taken to be its blocks."""
    writer = gguf.GGUFWriter(path, arch)
    add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
    for key, value in metadata.items():
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    for name, array in tensors.items():
        if array.dtype != np.float32:
            writer.add_tensor(name, array, raw_dtype=kind if array.dtype == np.uint8 else None)
        else:
            own = kind if array.ndim > 1 else Kind.F32
            writer.add_tensor(name, gguf.quants.quantize(array, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
