"""A target in one GGUF file: its configuration, tensors, special tokens and tokenizer.

Weights are dequantized to float32, one block of rows at a time, and then rounded to the dtype in which they are held.
They equal the weights of a Hugging Face folder in that dtype exactly. `gguf_layout.py` has the names and the layout.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import gguf
import numpy as np

from hsd_jax.config import ModelConfig
from hsd_jax.models import gguf_layout, gguf_tokenizer
from hsd_jax.models.gguf_header import Header
from hsd_jax.models.target import init_target
from hsd_jax.models.tensor_files import StoredTensor, matched
from hsd_jax.tokenizer import Tokenizer

_AT_ONCE = 1 << 17
"""How many numbers are dequantized at once: they fit into the cache of a core."""


def _can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """A tensor of a GGUF file, read as float32 in our layout."""

    readable = tuple(kind.name for kind in gguf.GGMLQuantizationType if _can_dequantize(kind))

    heads: int | None = None
    """The number of heads for `gguf_layout.interleaved_rows`. None: the rows are in our order."""
    added: float = 0.0
    """What the file has added to every number. Reading subtracts it."""

    @functools.cached_property
    def _kind(self) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType[self.dtype]

    def _bytes(self) -> np.ndarray:
        """Bytes [rows, blocks of a row, bytes of a block]. A tensor of one axis is one row.

        The file is mapped anew each time, so that the pages already read are released.
        """
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[self._kind]
        shape = (math.prod(self.shape[:-1]), self.shape[-1] // per_block, block_bytes)
        return np.memmap(self.file, np.uint8, "r", self.start, shape)

    def _floats(self, blocks: np.ndarray) -> np.ndarray:
        """[n, blocks, bytes of a block] -> float32 [n, numbers of the blocks]."""
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[self._kind]
        flat = blocks.reshape(-1, block_bytes)
        out, step = np.empty((len(flat), per_block), np.float32), max(_AT_ONCE // per_block, 1)
        with np.errstate(all="ignore"):  # damaged scales overflow here; the caller checks for infinities
            for at in range(0, len(flat), step):
                # As one row, because gguf processes 16 rows at a time, however short they are.
                part = np.ascontiguousarray(flat[at : at + step]).reshape(1, -1)
                out[at : at + step] = gguf.quants.dequantize(part, self._kind).reshape(-1, per_block)
            if self.added:
                out -= np.float32(self.added)
        return out.reshape(len(blocks), -1)

    def _theirs(self, rows: np.ndarray) -> np.ndarray:
        """The indices of our rows in the file."""
        return rows if self.heads is None else gguf_layout.interleaved_rows(rows, self.shape[0], self.heads)

    def block(self, rows: slice, *columns: slice) -> np.ndarray:
        theirs = self._theirs(np.arange(rows.start, rows.stop))
        if not columns:
            return self._floats(self._bytes())[0][theirs]
        per_block = gguf.GGML_QUANT_SIZES[self._kind][0]
        first, last = columns[0].start // per_block, -(-columns[0].stop // per_block)
        floats = self._floats(self._bytes()[theirs, first:last])
        return floats[:, columns[0].start - first * per_block : columns[0].stop - first * per_block]

    def sample(self, stride: int) -> np.ndarray:
        at = np.arange(0, math.prod(self.shape), stride)
        if len(self.shape) == 1:
            return self.block(slice(0, *self.shape))[at]
        row, column = np.divmod(at, self.shape[-1])
        block, place = np.divmod(column, gguf.GGML_QUANT_SIZES[self._kind][0])
        return self._floats(self._bytes()[self._theirs(row), block][:, None])[np.arange(len(at)), place]


class GgufFile:
    """A GGUF file of a model that this library runs. The constructor reads only the header."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.header = Header(self.path)

    @functools.cached_property
    def config(self) -> ModelConfig:
        shapes = {name: place.shape for name, place in self.header.places.items()}
        factors, numbers = self._stored().get(gguf_layout.ROPE_FACTORS), None
        if factors is not None:
            if factors.dtype not in factors.readable or len(factors.shape) != 1:
                raise ValueError(f"{factors}: found {factors.dtype} {list(factors.shape)}, expected a list of floats")
            numbers = factors.block(slice(0, *factors.shape))
        return gguf_layout.parse(self.header.values.get, shapes, numbers, str(self.path))

    @functools.cached_property
    def dtype(self) -> str:
        """bfloat16 if a matrix is stored in bfloat16 or quantized, else float32. GGUF's norms always are float32."""
        kinds = {place.kind_name for place in self.header.places.values() if len(place.shape) > 1}
        return "float32" if kinds <= {"F32", "F16", "F64"} else "bfloat16"

    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by our paths."""
        config, stored = self.config, self._stored()
        stored.pop(gguf_layout.ROPE_FACTORS, None)
        found = matched(stored, self.path, init_target, config, gguf_layout.tensor_name)
        return {
            path: dataclasses.replace(
                tensor, heads=gguf_layout.interleaved_heads(path, config), added=gguf_layout.added(path, config)
            )
            for path, tensor in found.items()
        }

    def special_tokens(self, name: str) -> tuple[int, ...]:
        """The tokens of the name "bos" or "eos"."""
        return gguf_tokenizer.special_tokens(self.header, name)

    def tokenizer(self) -> Tokenizer | None:
        return gguf_tokenizer.wrapped(self.header)

    def _stored(self) -> dict[str, GgufTensor]:
        """The tensors by the names in the file, in its layout."""
        return {name: GgufTensor(self.path, name, *place) for name, place in self.header.places.items()}
