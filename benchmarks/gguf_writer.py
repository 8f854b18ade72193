"""Writes a target as one GGUF file, for llama.cpp (`peers.py`) and for tests. It has no tokenizer: only ids work.

All matrices have one type. Vectors are float32, as llama.cpp requires.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from flax.traverse_util import flatten_dict

from hsd_jax.config import ModelConfig, RopeConfig
from hsd_jax.models import gguf_layout
from hsd_jax.models.gguf_file import GgufFile
from hsd_jax.models.layers import rope_frequencies
from hsd_jax.types import Weights

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "Q8_0": "Q8_0", "Q4_1": "Q4_1"}
"""The types in which matrices may be stored, and GGML's names for them."""


def architecture(config: ModelConfig) -> str:
    """GGUF's name for this kind of model. Raises a ValueError if it has none."""
    names = {own: name for name, own in gguf_layout.ARCHITECTURES.items()}
    if config.model_type not in names:
        raise ValueError(f"ModelConfig.model_type={config.model_type!r}: allowed in GGUF are {', '.join(names)}")
    return names[config.model_type]


def save_gguf(path: str | Path, config: ModelConfig, weights: Weights, dtype: str = "float32") -> None:
    """Writes weights in the tree of `init_target`, with matrices of one of TYPES."""
    name, matrices = architecture(config), gguf.GGMLQuantizationType[TYPES[dtype]]
    writer = gguf.GGUFWriter(path, name)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in _metadata(config).items():
        add[type(value)](f"{name}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    if config.rope.kind == "llama3":
        writer.add_tensor(gguf_layout.ROPE_FACTORS, llama3_factors(config.rope, config.head_dim))
    for key, array in flatten_dict(weights, sep=".").items():
        heads, numbers = gguf_layout.interleaved_heads(key, config), np.asarray(array, np.float32)
        numbers = numbers + np.float32(gguf_layout.added(key, config))
        if heads is not None:
            ours, numbers = numbers, np.empty_like(numbers)
            numbers[gguf_layout.interleaved_rows(np.arange(len(ours)), len(ours), heads)] = ours
        kind = matrices if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_layout.tensor_name(key), gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if (found := GgufFile(path).config) != config:
        raise ValueError(f"{path}: GGUF cannot store {config}, only {found}")


def _metadata(config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "context_length": config.max_position,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.theta),
    }
    if config.rope.kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope.factor)}
    if config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    if config.logit_softcap is not None:
        values["final_logit_softcapping"] = float(config.logit_softcap)
    return values


def llama3_factors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """The divisors of the frequencies in Llama 3's scaling, float32 [head_dim / 2]: llama.cpp's ROPE_FACTORS."""
    turns = rope.original_max_position * rope_frequencies(RopeConfig(rope.theta), head_dim).astype(np.float64)
    smooth = (turns / (2 * np.pi) - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / rope.factor + smooth)).astype(np.float32)
