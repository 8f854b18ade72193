"""A target in a Hugging Face folder: `config.json`, safetensors and a tokenizer; and the fingerprint of any weights.

Pickles are never opened. Kernels keep the [out, in] layout of the files, so reading only renames tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from hsd_jax.config import ModelConfig
from hsd_jax.host.files import read_object, sha256
from hsd_jax.models import foreign
from hsd_jax.models.hf_config import format_config, read_config
from hsd_jax.models.target import init_target
from hsd_jax.models.tensor_files import (
    MODEL,
    StoredTensor,
    are_equal,
    checked_dtype,
    file_name,
    matched,
    open_all,
    store,
)
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.types import Weights
from hsd_jax.validation import Whole, take

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PREFIXES = ("model.", "language_model.")
_TEXT = ("layers.", "embed_tokens.", "norm.", "lm_head.")
"""The starts of the names of the text model's tensors, without prefixes. Tensors of a vision tower have other names and
are left out."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTER = {"embedding": _EMBEDDING, "head": _HEAD, "final_norm.weight": "model.norm.weight"}
_HASH_SAMPLES = 4096

_MODULES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
PLAIN_MODULES = _MODULES | {"mlp_norm": "post_attention_layernorm"}
"""The names in files of the modules of a layer without second norms, by our names."""
_POST_NORMS = {  # in Gemma the name post_attention_layernorm means a different norm
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


class Folder:
    """The folder of a target. Each part is read when it is first used."""

    def __init__(self, path: Path):
        self.path = path

    @functools.cached_property
    def config(self) -> ModelConfig:
        return read_config(self.path)

    @functools.cached_property
    def dtype(self) -> str:
        """The dtype that holds the weights: "bfloat16" if all are stored in it, else "float32"."""
        return "bfloat16" if {tensor.dtype for tensor in open_all(weight_files(self.path))} == {"BF16"} else "float32"

    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by our paths. A tied checkpoint may hold the embedding as `embed_tokens`, `lm_head` or both."""
        config, stored = self.config, _open(self.path)
        head = stored.pop(_HEAD, None) if config.tie_embeddings else None
        if head is not None:
            stored.setdefault(_EMBEDDING, head)
        whole = self.path / WEIGHTS_FILE
        where = whole if whole.is_file() else self.path / INDEX_FILE
        found = matched(stored, where, init_target, config, lambda path: _hf_name(path, config))
        embedding = stored[_EMBEDDING]
        if head not in (None, embedding) and (head.dtype not in head.readable or not are_equal(embedding, head)):
            raise ValueError(f"{head}: differs from {embedding.name!r}, though tie_word_embeddings is true")
        return found

    def special_tokens(self, name: str) -> tuple[int, ...]:
        """The tokens of the name "bos" or "eos" in `generation_config.json`, else in `config.json`."""
        for file in ("generation_config.json", "config.json"):
            path = self.path / file
            values = read_object(path) if path.exists() else {}
            for part in (values, values.get("text_config") or {}):
                ids = part.get(f"{name}_token_id") if isinstance(part, dict) else None
                if ids is not None:
                    ids = tuple(ids) if isinstance(ids, list) else (ids,)
                    return take(tuple[Whole, ...], ids, f"{path}: {name}_token_id")
        return ()

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.find(self.path)


def save_target(
    folder: str | Path,
    config: ModelConfig,
    weights: Weights,
    dtype: Any = "float32",
    *,
    bos: int | None = None,
    eos: Iterable[int] = (),
) -> None:
    """Writes `model.safetensors` and `config.json` in the form that transformers reads.

    A missing `bos` or `eos` is written as null, so that readers use no default.
    """
    dtype, eos = checked_dtype(dtype), [int(token) for token in eos]
    values = format_config(config) | {"torch_dtype": dtype.name, "bos_token_id": bos}
    values["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    store(folder, MODEL, values, weights, init_target, config, dtype, lambda path: _hf_name(path, config))


def _open(folder: Path) -> dict[str, StoredTensor]:
    """The unread tensors of the text model by the names that `save_target` gives them."""
    stored: dict[str, StoredTensor] = {}
    for tensor in open_all(weight_files(folder)):
        name = tensor.name
        while name.startswith(_PREFIXES):
            name = name.partition(".")[2]
        if what := foreign.tensor(name):
            raise ValueError(f"{tensor}: {what}")
        if not name.startswith(_TEXT) or name.endswith("rotary_emb.inv_freq"):
            continue
        name = name if name == _HEAD else f"model.{name}"
        if name in stored:
            raise ValueError(f"{tensor}: also stored as {stored[name].name!r}")
        stored[name] = tensor
    return stored


def _hf_name(path: str, config: ModelConfig) -> str:
    """`layer_3.attn.q.kernel` -> `model.layers.3.self_attn.q_proj.weight`."""
    return file_name(path, _OUTER, "model.layers", _MODULES | _POST_NORMS if config.post_norms else PLAIN_MODULES)


def weight_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the shards that its index names."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        why = foreign.in_folder(folder) or f"no {WEIGHTS_FILE} or {INDEX_FILE} (pickles are never loaded)"
        raise FileNotFoundError(f"{folder}: {why}")
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no weight_map")
    files = sorted(set(map(str, weight_map.values())))
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{index}: weight_map names {name!r}: expected a file of this folder")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file, though {INDEX_FILE} names it")
    return [folder / name for name in files]


def weights_hash(weights: Weights) -> str:
    """Fingerprint of a target: 64 hexadecimal digits, the same in float32 and bfloat16.

    It covers names, shapes and at most 4096 numbers of each tensor, evenly spaced and rounded to bfloat16. Gigabytes
    therefore hash in seconds. Two targets that differ only in other numbers have the same hash. Fine-tuning changes
    every tensor and therefore the hash. float16 storage rounds twice and may change the hash.
    """

    def of(array: Any) -> tuple[tuple[int, ...], np.ndarray]:
        if isinstance(array, jax.Array) and array.platform() == "cpu" and array.is_fully_addressable:
            array = np.asarray(array)  # else jax compiles a gather for every shape
        index = np.arange(0, array.size, _stride(array.size))
        index = tuple(i.astype(np.int32) for i in np.unravel_index(index, array.shape))
        found = array[index]
        if isinstance(found, jax.Array) and not found.is_fully_addressable:  # other processes hold parts of it
            found = multihost_utils.process_allgather(found, tiled=True)
        return tuple(array.shape), np.asarray(found)

    flat: dict[str, Any] = flatten_dict(weights, sep=".")
    return _hash((path, *of(array)) for path, weight in flat.items() for array in jax.tree.leaves(weight))


def sampled_hash(tensors: Mapping[str, StoredTensor], dtype: Any) -> str:
    """`weights_hash` of tensors in files, by our paths, in a dtype. It reads a sample of a few megabytes."""
    dtype = checked_dtype(dtype)
    sample = {path: tensor.sample(_stride(math.prod(tensor.shape))) for path, tensor in tensors.items()}
    return _hash((path, tensors[path].shape, numbers.astype(dtype)) for path, numbers in sample.items())


def _stride(size: int) -> int:
    return -(-size // _HASH_SAMPLES) | 1  # odd: an even stride can stay in a few columns


def _hash(samples: Iterable[tuple[str, tuple[int, ...], np.ndarray]]) -> str:
    parts = []
    for path, shape, numbers in sorted(samples, key=lambda one: one[:2]):
        parts += [f"{path}{shape}", numbers.astype(jnp.bfloat16).view(np.uint16).astype("<u2").tobytes()]
    return sha256(*parts)
