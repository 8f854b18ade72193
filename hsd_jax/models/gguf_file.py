"""A target in one GGUF file: its configuration, weights, hash, special tokens and tokenizer.

Weights are dequantized to float32, one block of rows at a time, and then rounded to the dtype in which they are held.
They equal the weights of a Hugging Face folder in that dtype exactly. `gguf_layout.py` has the names and the layout.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from hsd_jax.config import ModelConfig
from hsd_jax.host import sharding
from hsd_jax.models import gguf_layout, gguf_tokenizer
from hsd_jax.models.convert import check_num_layers, held_shapes, sampled_hash, shapes_of
from hsd_jax.models.gguf_header import Header
from hsd_jax.models.placement import HERE, Placement
from hsd_jax.models.target import init_target
from hsd_jax.models.tensor_files import StoredTensor, check_tensors, checked_dtype, load_tree
from hsd_jax.types import Weights

if TYPE_CHECKING:
    from hsd_jax.tokenizer import Tokenizer

_METADATA = "its metadata"
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

    start: int
    """The position of its first byte in the file."""
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

    def blocks(self, index: tuple[slice, ...], step: int) -> Iterator[np.ndarray]:
        stored, (rows, *rest) = self._bytes(), index
        if not rest:
            yield self._floats(stored)[0][self._theirs(np.arange(rows.start, rows.stop))]
            return
        (columns,) = rest
        per_block = gguf.GGML_QUANT_SIZES[self._kind][0]
        first, last = columns.start // per_block, -(-columns.stop // per_block)
        for row in range(rows.start, rows.stop, step):
            theirs = self._theirs(np.arange(row, min(row + step, rows.stop)))
            floats = self._floats(stored[theirs, first:last])
            yield floats[:, columns.start - first * per_block : columns.stop - first * per_block]

    def sample(self, stride: int) -> np.ndarray:
        at = np.arange(0, math.prod(self.shape), stride)
        if len(self.shape) == 1:
            return next(self.blocks((slice(0, *self.shape),), 1))[at]
        row, column = np.divmod(at, self.shape[-1])
        block, place = np.divmod(column, gguf.GGML_QUANT_SIZES[self._kind][0])
        return self._floats(self._bytes()[self._theirs(row), block][:, None])[np.arange(len(at)), place]


class GgufFile:
    """A GGUF file of a model that this library runs. The constructor reads only the header, in milliseconds."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._header = Header(self.path)

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The architecture."""
        return gguf_layout.parse(self._header.get, self._shapes, self._rope_factors(), str(self.path))

    @functools.cached_property
    def dtype(self) -> str:
        """bfloat16 if a matrix is stored in bfloat16 or quantized, else float32. GGUF's norms always are float32."""
        kinds = {place.kind_name for place in self._header.places.values() if len(place.shape) > 1}
        return "float32" if kinds <= {"F32", "F16", "F64"} else "bfloat16"

    def weights(self, dtype: Any = None, placement: Placement = HERE, vocab_size: int | None = None) -> Weights:
        """As `convert.read_weights`."""
        dtype, heads = checked_dtype(self.dtype if dtype is None else dtype), sharding.heads_of(self.config)
        tensors = self._tensors()  # first, because it checks the number of layers
        rest = {"placement": placement, "heads": heads, "held_shapes": held_shapes(self.config, vocab_size)}
        return load_tree(*tensors, dtype, self.path, _METADATA, **rest)

    def hash(self, dtype: Any = None) -> str:
        """`convert.weights_hash` of the weights in this dtype, from a few megabytes of the file."""
        stored, wanted, shapes = self._tensors()
        check_tensors(stored, wanted, shapes, self.path, _METADATA)
        return sampled_hash(stored, wanted, self.dtype if dtype is None else dtype)

    @property
    def bos(self) -> int | None:
        return gguf_tokenizer.bos(self._header)

    @property
    def eos(self) -> tuple[int, ...]:
        return gguf_tokenizer.eos(self._header)

    @property
    def has_chat_template(self) -> bool:
        return bool(gguf_tokenizer.chat_template(self._header))

    def tokenizer(self) -> Tokenizer:
        return gguf_tokenizer.wrapped(self._header)

    def save_tokenizer(self, folder: Path) -> None:
        self.tokenizer().save(folder)

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self._header.places.items()}

    def _tensors(self) -> tuple[dict[str, StoredTensor], dict[str, str], dict[str, tuple[int, ...]]]:
        """Three mappings: GGUF's names to tensors, our paths to GGUF's names, and our paths to our shapes."""
        config, names = self.config, [name for name in self._header.places if name != gguf_layout.ROPE_FACTORS]
        stored: dict[str, StoredTensor] = {name: self._tensor(name) for name in names}
        check_num_layers(config.num_layers, stored, self.path, _METADATA)
        shapes = shapes_of(init_target, config)
        wanted = {path: gguf_layout.tensor_name(path) for path in shapes}
        for path, name in wanted.items():
            if name in stored:
                layout = gguf_layout.interleaved_heads(path, config), gguf_layout.added(path, config)
                stored[name] = self._tensor(name, *layout)
        return stored, wanted, shapes

    def _tensor(self, name: str, *layout: Any) -> GgufTensor:
        """A tensor, in the layout of the file unless `heads` and `added` are given."""
        place = self._header.places[name]
        return GgufTensor(self.path, name, place.shape, place.kind_name, place.start, *layout)

    def _rope_factors(self) -> np.ndarray | None:
        if gguf_layout.ROPE_FACTORS not in self._header.places:
            return None
        tensor = self._tensor(gguf_layout.ROPE_FACTORS)
        if tensor.dtype not in tensor.readable or len(tensor.shape) != 1:
            raise ValueError(f"{tensor}: found {tensor.dtype} {list(tensor.shape)}, expected a list of floats")
        return next(tensor.blocks((slice(0, *tensor.shape),), 1))
