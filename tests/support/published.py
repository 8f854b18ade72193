"""Folders of drafters in the layouts of other programs, with random weights; nothing of those programs is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hsd_jax.config import ModelConfig

RAW_NAMES = {"layers.0.": "midlayer.", "fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid."}
RAW_NAMES |= {"fc_norm.2.": "aux_norm_high."}
"""What the raw layout calls tensors of speculators."""
LAYER_KEYS = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_position_embeddings": 512,
}


def drawn(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Norms between 0.5 and 1.5, and products that keep the size of what they read; of the head they are larger."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        if "norm" in name:
            weight = rng.uniform(0.5, 1.5, shape)
        elif len(shape) == 1:
            weight = rng.normal(0, 0.3, shape)
        else:
            weight = rng.normal(0, 2 if "lm_head" in name else 1, shape) * shape[-1] ** -0.5
        found[name] = weight.astype(np.float32)
    return found


def layer_shapes(at: str, keys: dict[str, Any], read: int) -> dict[str, tuple[int, ...]]:
    """Of a decoder layer whose attention reads `read` numbers."""
    width, wider, size = keys["hidden_size"], keys["intermediate_size"], keys["head_dim"]
    heads = {"q": keys["num_attention_heads"], "k": keys["num_key_value_heads"], "v": keys["num_key_value_heads"]}
    shapes = {f"{at}.self_attn.{name}_proj.weight": (num * size, read) for name, num in heads.items()}
    shapes[f"{at}.self_attn.o_proj.weight"] = (width, heads["q"] * size)
    shapes |= {f"{at}.mlp.{name}_proj.weight": (wider, width) for name in ("gate", "up")}
    shapes[f"{at}.mlp.down_proj.weight"] = (width, wider)
    if keys.get("attention_bias"):
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items() if "self_attn" in name}
    if keys["model_type"] == "qwen3":
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (size,) for name in "qk"}
    return shapes | {f"{at}.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}


def save(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def write_eagle3(
    folder: Path,
    target: ModelConfig,
    tokens: list[int] | None = None,
    is_raw: bool = False,
    num_taps: int = 3,
    has_embedding: bool = False,
    **changes: Any,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Writes a head and returns its tensors by the names of speculators, and all keys of its configuration.

    Args:
      tokens: those that it may draft, in the order of its columns. None: all.
      is_raw: in the layout of SpecForge and SGLang, and not of speculators.
      changes: of the keys of LAYER_KEYS, and other keys.
    """
    layer = LAYER_KEYS | {"vocab_size": target.vocab_size, "num_hidden_layers": 1}
    layer |= {key: value for key, value in changes.items() if key in layer or key.startswith(("attention_", "rope_"))}
    switches = {key: value for key, value in changes.items() if key not in layer}
    width, taps = layer["hidden_size"], num_taps * target.hidden_size
    columns = target.vocab_size if tokens is None else len(tokens)
    shapes = {"fc.weight": (width, taps), "norm.weight": (width,), "lm_head.weight": (columns, width)}
    shapes["layers.0.hidden_norm.weight"] = (width,)
    for i in range(layer["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{i}", layer, width if i else 2 * width)
    if has_embedding:
        shapes["embed_tokens.weight"] = (target.vocab_size, width)
    if switches.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target.hidden_size,) for i in range(num_taps)}
    if switches.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps,)
    tensors = drawn(shapes)
    if tokens is not None:
        tensors["d2t"] = np.array(tokens, np.int64) - np.arange(columns)
    files = dict(tensors) if tokens is None else tensors | {"t2d": np.isin(np.arange(target.vocab_size), tokens)}
    switches = {"draft_vocab_size": columns} | switches
    if is_raw:
        for name, raw in RAW_NAMES.items():
            files = {raw + at.removeprefix(name) if at.startswith(name) else at: x for at, x in files.items()}
        save(folder, layer | {"architectures": ["LlamaForCausalLMEagle3"]} | switches, files)
    else:
        spoken = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        save(folder, spoken | {"transformer_layer_config": layer} | switches, files)
    return tensors, layer | switches
