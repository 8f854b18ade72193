"""Reads and writes the weights of targets as safetensors in Hugging Face folders. Drafters: `drafters/files.py`.

Every file is checked against the configuration before anything compiles. Pickles are never opened. Kernels keep the
[out, in] layout of the files, so reading only renames tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from hsd_jax.config import ModelConfig
from hsd_jax.host import sharding
from hsd_jax.host.files import read_object, sha256, write_json
from hsd_jax.models.hf_config import format_config
from hsd_jax.models.hf_config import read_config as read_config
from hsd_jax.models.placement import HERE, Placement
from hsd_jax.models.target import init_target
from hsd_jax.models.tensor_files import (
    StoredTensor,
    are_equal,
    check_tensors,
    checked_dtype,
    load_tree,
    open_all,
    store_tree,
)
from hsd_jax.settings import Whole, take
from hsd_jax.types import Weights

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PREFIXES = ("model.", "language_model.")
_TEXT = ("layers.", "embed_tokens.", "norm.", "lm_head.")
"""The starts of the names of the text model's tensors, without prefixes. Tensors of a vision tower have other names and
are left out."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
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
_PLAIN_NORMS = {"mlp_norm": "post_attention_layernorm"}
_POST_NORMS = {  # in Gemma the name post_attention_layernorm means a different norm
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def weights_dtype(folder: str | Path) -> str:
    """The dtype that holds a checkpoint's weights: "bfloat16" if all are stored in it, else "float32"."""
    return "bfloat16" if {tensor.dtype for tensor in open_all(_weight_files(Path(folder)))} == {"BF16"} else "float32"


def read_weights(
    folder: str | Path,
    config: ModelConfig,
    dtype: Any = "float32",
    placement: Placement = HERE,
    vocab_size: int | None = None,
) -> Weights:
    """A target's weights from `model.safetensors` or its shards, in `dtype`, in the tree of `init_target`.

    Embedding and LM head get `vocab_size` rows, the first ones of the file, or all and rows of zeros. A tied checkpoint
    may hold the embedding as `embed_tokens`, as `lm_head` or as both.
    """
    dtype, folder = checked_dtype(dtype), Path(folder)
    stored, wanted, shapes = _tensors(folder, config)
    rest = {"placement": placement, "heads": sharding.heads_of(config), "held_shapes": held_shapes(config, vocab_size)}
    return load_tree(stored, wanted, shapes, dtype, folder, "config.json", **rest)


def stored_hash(folder: str | Path, config: ModelConfig, dtype: Any = "float32") -> str:
    """`weights_hash` of the weights that `read_weights` reads in this dtype.

    It does not depend on their devices or on quantization. It reads a sample of a few megabytes from the files.
    """
    stored, wanted, _ = _tensors(Path(folder), config)
    return sampled_hash(stored, wanted, dtype)


def sampled_hash(stored: dict[str, StoredTensor], wanted: dict[str, str], dtype: Any) -> str:
    """`weights_hash` of tensors in files. It reads only a sample of their numbers."""
    dtype, tensors = checked_dtype(dtype), {path: stored[name] for path, name in wanted.items()}
    return _hash((path, x.shape, x.sample(_stride(math.prod(x.shape))).astype(dtype)) for path, x in tensors.items())


def _tensors(
    folder: Path, config: ModelConfig
) -> tuple[dict[str, StoredTensor], dict[str, str], dict[str, tuple[int, ...]]]:
    """Three mappings: file names to checked tensors, our paths to file names, and our paths to shapes."""
    stored = _open(folder)
    check_num_layers(config.num_layers, stored, folder, "config.json")
    shapes = shapes_of(init_target, config)
    wanted = {path: _hf_name(path, config) for path in shapes}
    head = stored.pop(_HEAD, None) if config.tie_embeddings else None
    if head is not None:
        stored.setdefault(_EMBEDDING, head)
    _check_complete(stored, list(wanted.values()), folder)
    check_tensors(stored, wanted, shapes, folder, "config.json")
    embedding = stored.get(_EMBEDDING)
    if head is None or embedding is None or embedding is head:
        return stored, wanted, shapes
    if head.dtype not in head.readable or not are_equal(embedding, head):
        raise ValueError(f"{head}: differs from {embedding.name!r}, though config.json has tie_word_embeddings=true")
    return stored, wanted, shapes


def _check_complete(stored: dict[str, StoredTensor], wanted: list[str], folder: Path) -> None:
    """Raises a ValueError if a tensor is missing. It names the file that should hold it, or the index that lacks it."""
    missing = sorted(set(wanted) - set(stored))
    if not missing:
        return
    prefix = next((tensor.name.removesuffix(bare) for bare, tensor in stored.items() if bare != _HEAD), "model.")
    name = missing[0] if missing[0] == _HEAD else prefix + missing[0]
    where = folder / WEIGHTS_FILE
    if not where.is_file():
        where = folder / read_object(folder / INDEX_FILE)["weight_map"].get(name, INDEX_FILE)
    tied = "; if the embedding is also the head, set tie_word_embeddings to true in config.json"
    count = f"{len(missing)} of {len(wanted)} missing"
    raise ValueError(f"{where}: missing tensor {name!r} ({count}){tied if missing == [_HEAD] else ''}")


def _open(folder: Path) -> dict[str, StoredTensor]:
    """The unread tensors of the text model by their names without prefixes."""
    stored: dict[str, StoredTensor] = {}
    for tensor in open_all(_weight_files(folder)):
        name = _bare_name(tensor.name)
        if not name.startswith(_TEXT) or name.endswith("rotary_emb.inv_freq"):
            continue
        if name in stored:
            raise ValueError(f"{tensor}: also stored as {stored[name].name!r}")
        stored[name] = tensor
    return stored


def save_target(
    folder: str | Path,
    config: ModelConfig,
    weights: Weights,
    dtype: Any = "float32",
    *,
    bos: int | None = None,
    eos: Iterable[int] = (),
) -> None:
    """Writes `model.safetensors` and `config.json` in the form that transformers reads. No file appears half-written.

    A missing `bos` or `eos` is written as null, so that readers use no default.
    """
    dtype, folder, eos = checked_dtype(dtype), Path(folder), [int(token) for token in eos]
    values = format_config(config) | {"torch_dtype": dtype.name, "bos_token_id": bos}
    values["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None

    def name(path: str) -> str:
        bare = _hf_name(path, config)
        return bare if bare == _HEAD else f"model.{bare}"

    store_tree(folder / WEIGHTS_FILE, weights, shapes_of(init_target, config), dtype, name)
    write_json(folder / "config.json", values)


def read_eos(folder: str | Path) -> tuple[int, ...]:
    """End tokens of a checkpoint, from `generation_config.json`, else `config.json`, else `tokenizer_config.json`."""
    return _special_tokens(Path(folder), "eos_token")


def read_bos(folder: str | Path) -> int | None:
    """The start token of a checkpoint, if these files name one. The tokenizer decides whether prompts begin with it."""
    return next(iter(_special_tokens(Path(folder), "bos_token")), None)


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


def _stride(size: int) -> int:
    return -(-size // _HASH_SAMPLES) | 1  # odd: an even stride can stay in a few columns


def _hash(samples: Iterable[tuple[str, tuple[int, ...], np.ndarray]]) -> str:
    parts = []
    for path, shape, numbers in sorted(samples, key=lambda one: one[:2]):
        parts += [f"{path}{shape}", numbers.astype(jnp.bfloat16).view(np.uint16).astype("<u2").tobytes()]
    return sha256(*parts)


def check_num_layers(num_layers: int, stored: dict[str, StoredTensor], folder: Path, config: str) -> None:
    """Refuses fewer tensors than layers, before every layer is traced to find the missing tensors."""
    if 0 < len(stored) < num_layers:
        raise ValueError(f"{folder}: {config} has {num_layers} layers, but there are only {len(stored)} tensors")


def held_shapes(config: ModelConfig, vocab_size: int | None) -> dict[str, tuple[int, ...]]:
    """The shapes of a target's weights by our paths, with another size of the vocabulary unless it is None."""
    return shapes_of(init_target, dataclasses.replace(config, vocab_size=vocab_size or config.vocab_size))


def shapes_of(init: Callable[..., Weights], config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each weight by its dotted path. No weight is computed."""
    return dict(_shapes_of(init, config))


@functools.lru_cache(maxsize=16)  # tracing a small model takes longer than reading it
def _shapes_of(init: Callable[..., Weights], config: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    tree = jax.eval_shape(lambda: init(jax.random.key(0), config))
    flat: dict[str, Any] = flatten_dict(tree, sep=".")
    return tuple((path, leaf.shape) for path, leaf in flat.items())


def _hf_name(path: str, config: ModelConfig) -> str:
    """`layer_3.attn.q.kernel` -> `layers.3.self_attn.q_proj.weight`."""
    outer = {"embedding": _EMBEDDING, "head": _HEAD, "final_norm.weight": "norm.weight"}
    if path in outer:
        return outer[path]
    layer, _, rest = path.partition(".")
    module, _, leaf = rest.rpartition(".")
    modules = _MODULES | (_POST_NORMS if config.post_norms else _PLAIN_NORMS)
    return f"layers.{layer.removeprefix('layer_')}.{modules[module]}.{'bias' if leaf == 'bias' else 'weight'}"


def _bare_name(name: str) -> str:
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def _weight_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the shards that its index names."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise FileNotFoundError(f"{folder}: no {WEIGHTS_FILE} or {INDEX_FILE} (pickles are never loaded)")
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


def _special_tokens(folder: Path, name: str) -> tuple[int, ...]:
    for file in ("generation_config.json", "config.json"):
        path = folder / file
        values = read_object(path) if path.exists() else {}
        for part in (values, values.get("text_config") or {}):
            ids = part.get(f"{name}_id") if isinstance(part, dict) else None
            if ids is not None:
                ids = tuple(ids) if isinstance(ids, list) else (ids,)
                return take(tuple[Whole, ...], ids, f"{path}: {name}_id")
    path = folder / "tokenizer_config.json"
    values = read_object(path) if path.exists() else {}
    token = values.get(name)
    token = take(str | None, token.get("content") if isinstance(token, dict) else token, f"{path}: {name}")
    return tuple(i for i, content in _added_tokens(folder, path, values) if content == token)[:1]


def _added_tokens(folder: Path, path: Path, values: dict[str, Any]) -> list[tuple[int, str]]:
    """Ids and texts of the special tokens in the tokenizer's own files. `values` are the contents of `path`."""
    try:
        added = [(int(i), str(t["content"])) for i, t in values.get("added_tokens_decoder", {}).items()]
        path = folder / "tokenizer.json"
        if path.exists():
            added += [(int(t["id"]), str(t["content"])) for t in read_object(path).get("added_tokens", [])]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its added tokens cannot be read ({error!r})") from error
    return added
