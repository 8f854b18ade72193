"""GGUF's names for the sizes and weights of a model, and its layout of weights.

Apart from names, GGUF differs from our layout in three points. In the architecture "llama" the rows of q and k have
another order. Gemma's norms have 1 added. Llama 3's rotary scaling is one factor per frequency.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hsd_jax.config import FULL, SLIDING, ModelConfig, RopeConfig
from hsd_jax.models import foreign
from hsd_jax.models.hf_config import parse_config
from hsd_jax.models.layers import rope_frequencies
from hsd_jax.models.tensor_files import file_name
from hsd_jax.validation import MOST, shown

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""GGUF's architectures and our `model_type` for each."""
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

_OUTER = {"embedding": EMBEDDING, "head": HEAD, "final_norm.weight": "output_norm.weight"}
_MODULES = {
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn_norm": "attn_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
}
_SIZES = {  # GGUF's keys after the name of the architecture, and the keys of config.json
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_ONLY = {  # settings of other models, and the values with which they have no effect
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}
_YARN = {  # keys after rope.scaling, and those of config.json's rope_scaling
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_LAYERS_OF_27B = 62
"""The number of layers of Gemma 3 27B. Only this Gemma 3 does not scale queries by the size of a head. llama.cpp
recognises it by this number."""
_LOCAL_THETA = 10_000.0
_LOW, _HIGH = 1.0, 4.0
"""Frequency factors of every Llama 3 so far. A GGUF file does not store them."""


def tensor_name(path: str) -> str:
    """`layer_3.attn.q.kernel` -> `blk.3.attn_q.weight`."""
    return file_name(path, _OUTER, "blk", _MODULES)


def interleaved_heads(path: str, config: ModelConfig) -> int | None:
    """The number of heads whose rows GGUF stores in the order of `interleaved_rows`. None for a weight in our order.

    llama.cpp rotates neighbouring rows in "llama". In the other architectures it rotates halves, as we do.
    """
    if config.model_type != "llama":
        return None
    heads = {"attn.q": config.num_heads, "attn.k": config.num_kv_heads}
    return heads.get(path.partition(".")[2].rpartition(".")[0])


def interleaved_rows(rows: np.ndarray, num_rows: int, heads: int) -> np.ndarray:
    """The indices of our rows of q or k in GGUF, where rows i and i + half of each head are neighbours."""
    head, within = np.divmod(rows, num_rows // heads)
    half, place = np.divmod(within, num_rows // heads // 2)
    return head * (num_rows // heads) + 2 * place + half


def added(path: str, config: ModelConfig) -> float:
    """The number that GGUF has added to a weight. In a norm it is the model's `norm_offset`, which is 1 in Gemma."""
    return config.norm_offset if path.endswith(".weight") else 0.0


def parse(
    get: Callable[[str], Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None, where: str
) -> ModelConfig:
    """The architecture that metadata (`get`) and tensors describe, with the numbers of ROPE_FACTORS if they exist."""
    name, title, kind = (get(f"general.{key}") for key in ("architecture", "name", "type"))
    if kind not in (None, "model"):
        raise ValueError(f"{where}: general.type={shown(kind)}{foreign.kind_of(kind)}: allowed are models")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        what = f"general.architecture={shown(name)}{foreign.kind_of(name)}{(title and f' of {shown(title)}') or ''}"
        raise ValueError(f"{where}: {what}: allowed are {', '.join(ARCHITECTURES)}")
    if get("split.count") not in (None, 0, 1):
        raise ValueError(f"{where}: split.count={shown(get('split.count'))}: only models in one file are read")
    for key, allowed in _ONLY.items():
        if get(f"{name}.{key}") not in (None, *allowed):
            what = f"{name}.{key}={shown(get(f'{name}.{key}'))}{foreign.kind_of(key)}"
            raise ValueError(f"{where}: {what}: allowed are {', '.join(map(str, allowed))}")

    def number(key: str, *default: Any) -> Any:
        value = get(f"{name}.{key}")
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # one number per layer
        if value is None and default:
            return default[0]
        if type(value) not in (int, float):
            raise ValueError(f"{where}: {name}.{key}={shown(value)}: expected one number")
        return value

    if len(shapes.get(EMBEDDING, ())) != 2:
        raise ValueError(f"{where}: no matrix {EMBEDDING!r}")
    values = {own: number(key) for key, own in _SIZES.items()}
    heads, hidden_size = values["num_attention_heads"], values["hidden_size"]
    head_dim = number("attention.key_length", hidden_size // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ValueError(f"{where}: {name}.{key}={number(key)}: allowed is the size of a head, {head_dim}")
    window = number("attention.sliding_window", 0) or None
    if window is not None and name != "gemma3":
        raise ValueError(f"{where}: {name}.attention.sliding_window={window}: only gemma3 may have one")
    kind = get(f"{name}.rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn"):
        raise ValueError(f"{where}: {name}.rope.scaling.type={shown(kind)}: allowed are none, linear, yarn")
    factor = number("rope.scaling.factor", number("rope.scale_linear", 0))
    is_scaled = kind != "none" and factor not in (0, 1)  # a factor without a type is linear, as in llama.cpp
    scaling = {own: get(f"{name}.rope.scaling.{key}") for key, own in _YARN.items() if kind == "yarn"}
    values |= {
        "model_type": ARCHITECTURES[name],
        "vocab_size": shapes[EMBEDDING][0],
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_theta": number("rope.freq_base", 10_000.0),
        "rope_scaling": {"rope_type": kind or "linear", "factor": factor, **scaling} if is_scaled else None,
        "tie_word_embeddings": HEAD not in shapes,
        "attention_bias": tensor_name("layer_0.attn.q.bias") in shapes,
        "mlp_bias": tensor_name("layer_0.mlp.gate.bias") in shapes,
    }
    if name == "gemma3":
        is_27b = values["num_hidden_layers"] == _LAYERS_OF_27B
        pattern = get("gemma3.attention.sliding_window_pattern")
        values |= {
            "query_pre_attn_scalar": hidden_size // max(heads, 1) if is_27b else head_dim,
            "final_logit_softcapping": number("final_logit_softcapping", 0) or None,
            "sliding_window": window,
            "rope_local_base_freq": number("rope.freq_base_swa", _LOCAL_THETA),
        }
        if isinstance(pattern, list):
            values["layer_types"] = [SLIDING if is_sliding else FULL for is_sliding in pattern]
        elif pattern is not None:
            values["sliding_window_pattern"] = pattern
    config = parse_config(values, where)
    if rope_factors is None:
        return config
    if is_scaled:
        raise ValueError(f"{where}: two scalings, tensor {ROPE_FACTORS!r} and {name}.rope.scaling")
    return dataclasses.replace(config, rope=_llama3(rope_factors, config, where))


def _llama3(factors: np.ndarray, config: ModelConfig, where: str) -> RopeConfig:
    """The scaling that gives these factors."""
    theta, head_dim = config.rope.theta, config.head_dim
    plain = rope_frequencies(RopeConfig(theta), head_dim)
    if factors.shape == plain.shape and np.isfinite(factors).all() and factors.min() >= 1:
        largest = float(str(factors.max()))  # the shortest decimal
        if largest == 1:
            return config.rope
        wanted = factors.astype(np.float64)
        middle = (factors > 1) & (factors < factors.max())
        smooth = (1 / wanted - 1 / largest) / (1 - 1 / largest)
        lengths = (2 * np.pi / plain * (_LOW + (_HIGH - _LOW) * smooth))[middle]
        # Without a frequency in the middle, any length that separates the others gives the same factors.
        for length in [round(np.median(lengths))] if lengths.size else [1 << i for i in range(24)]:
            rope = RopeConfig(theta, "llama3", largest, _LOW, _HIGH, min(max(length, 1), MOST))
            if np.allclose(plain / rope_frequencies(rope, head_dim), factors, rtol=1e-5, atol=0):
                return rope
    raise ValueError(f"{where}: tensor {ROPE_FACTORS!r} does not hold the factors of Llama 3's scaling")
