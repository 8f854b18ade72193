"""A Hugging Face folder of Llama or Mistral as a GGUF file, so that llama.cpp runs the same weights (`peers.py`).

Token ids go in and out, so no vocabulary is written. Runs in the environment of the peers: imports nothing of hsd_jax,
and only `write` needs the package gguf. Read next: `peer_worker.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FAMILIES = ("llama", "mistral")
"""What llama.cpp's one architecture "llama" computes."""
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
STORED = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""What safetensors hold; numpy has no bfloat16, so its bits stand for it."""

_OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def metadata(config: Any) -> dict[str, int | float | str]:
    """What llama.cpp has to know of a target; GGUF's own keys.

    Args:
      config: a `hsd_jax.config.ModelConfig`.
    Raises:
      ValueError: for a family or a setting that llama.cpp's "llama" does not have.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r}: only {' and '.join(FAMILIES)} are written as GGUF")
    if config.rope.kind != "default":
        raise ValueError(f"rope {config.rope.kind!r}: only unscaled rotary embedding is written as GGUF")
    if config.activation != "silu":
        raise ValueError(f"activation {config.activation!r}: llama.cpp's Llama has silu")
    return {
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": config.max_position,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope.theta),
        "tokenizer.ggml.model": "no_vocab",
    }


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order: it rotates neighbours, Hugging Face row i with row i + head_dim / 2."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`.

    Raises:
      ValueError: naming a tensor that no Llama has.
    """
    module, _, leaf = name.removeprefix("model.").rpartition(".")
    first, _, rest = module.partition(".")
    layer, _, block = rest.partition(".")
    if first == "layers" and block in _BLOCK:
        return f"blk.{layer}.{_BLOCK[block]}.{leaf}"
    if module in _OUTER:
        return f"{_OUTER[module]}.{leaf}"
    raise ValueError(f"tensor {name!r}: llama.cpp's Llama has none like it")


def weight_files(folder: str | Path) -> list[Path]:
    """`model.safetensors`, or the shards its index names; a folder may hold the same weights in other files too."""
    whole, index = Path(folder) / "model.safetensors", Path(folder) / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [Path(folder) / name for name in sorted(set(names))]


def read_tensors(folder: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 numbers of a folder's safetensors, read by hand: the peers' environment need not have more."""
    for file in weight_files(folder):
        raw = np.memmap(file, np.uint8, "r")
        start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        header = json.loads(raw[8:start].tobytes())
        for name, about in header.items():
            if name == "__metadata__":
                continue
            first, last = about["data_offsets"]
            array = raw[start + first : start + last].view(STORED[about["dtype"]]).reshape(about["shape"])
            if about["dtype"] == "BF16":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            yield name, np.asarray(array, np.float32)


def tensors(folder: str | Path, values: dict[str, Any], is_tied: bool) -> dict[str, np.ndarray]:
    """The weights under llama.cpp's names and in its order of rows, in float32.

    Args:
      values: of `metadata`.
      is_tied: the head is the embedding, which llama.cpp takes where it finds no head.
    """
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    found = {}
    for name, array in read_tensors(folder):
        if name.endswith("rotary_emb.inv_freq"):  # of old files; computed anew
            continue
        own = gguf_name(name)
        if is_tied and own == "output.weight":
            own = "token_embd.weight"
        module = own.split(".")[-2]
        found[own] = interleave(array, values[heads[module]]) if module in heads else array
    return found


def write(folder: str | Path, out: str | Path, dtype: str, values: dict[str, Any], is_tied: bool) -> None:
    """Writes the file, matrices in `dtype`, vectors in float32 as llama.cpp wants them."""
    import gguf

    kind = gguf.GGMLQuantizationType[TYPES[dtype]]
    writer = gguf.GGUFWriter(out, "llama")
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in values.items():
        add[type(value)](key, value)
    for name, array in tensors(folder, values, is_tied).items():
        own = kind if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(array, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
