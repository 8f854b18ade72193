"""Hugging Face `config.json`, parsed and written by hand: the sizes and switches of a target.

Reads both styles, `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5), and writes the older one, which both read. Knows no weights and needs neither torch nor
transformers. Read next: `convert.py`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hsd_jax.config import FULL, SLIDING, ModelConfig, RopeConfig

ROPE_KINDS = ("default", "linear", "llama3")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")

_EVERYWHERE = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10_000.0}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "gemma2": _GEMMA
    | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    # The text part of a Gemma 3 file leaves out whatever has its default, sizes included.
    "gemma3_text": _GEMMA
    | {
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}
"""What transformers assumes for a key that a file leaves out."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      FileNotFoundError: if the folder or the file is missing.
      ValueError: if the file holds no JSON object.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder; give a local folder with a checkpoint")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a checkpoint folder holds {path.name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also what is not UTF-8
        raise ValueError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def read_config(folder: str | Path) -> ModelConfig:
    """The architecture in a folder's `config.json`.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the key, its value and the allowed ones, if the model is none this library runs.
    """
    path = Path(folder) / "config.json"
    return parse_config(read_json(path), str(path))


def parse_config(values: dict[str, Any], where: str) -> ModelConfig:
    """`read_config` for an object already in memory; `where` names it in errors."""
    family = values.get("model_type")
    if family == "gemma3":
        if not isinstance(values.get("text_config"), dict):
            raise ValueError(f"{where}: model_type 'gemma3' without a text_config object")
        tied = {k: values[k] for k in ("tie_word_embeddings",) if k in values}
        values, family = tied | values["text_config"], "gemma3_text"
    if family not in _FAMILIES:
        raise ValueError(f"{where}: model_type {family!r}: supported are {', '.join(_FAMILIES)}, gemma3")
    _refuse_unsupported(values, where)
    values = _EVERYWHERE | _FAMILIES[family] | values
    is_gemma = family.startswith("gemma")
    hidden_size, num_layers = _size(values, "hidden_size", where), _size(values, "num_hidden_layers", where)
    num_heads = _size(values, "num_attention_heads", where)
    num_kv_heads, head_dim = num_heads, hidden_size // num_heads
    if values.get("num_key_value_heads") is not None:
        num_kv_heads = _size(values, "num_key_value_heads", where)
    if values.get("head_dim") is not None:
        head_dim = _size(values, "head_dim", where)
    if num_heads % num_kv_heads:
        raise ValueError(f"{where}: num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}")
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim={head_dim}: must be even for rotary embedding")
    window, layer_types = _sliding(values, family, num_layers, where)
    rope, rope_local = _ropes(values, family, where)
    bias = bool(values.get("attention_bias", False)) and family != "mistral"
    return ModelConfig(
        vocab_size=_size(values, "vocab_size", where),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_size(values, "intermediate_size", where),
        max_position=_size(values, "max_position_embeddings", where),
        norm_eps=_number(values, "rms_norm_eps", where),
        tie_embeddings=bool(values["tie_word_embeddings"]),
        qkv_bias=family == "qwen2" or bias,
        output_bias=family != "qwen2" and bias,
        mlp_bias=family == "llama" and bool(values.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "gemma3_text"),
        activation=_activation(values, "hidden_activation" if is_gemma else "hidden_act", where),
        norm_offset=1.0 if is_gemma else 0.0,
        post_norms=is_gemma,
        embed_scale=hidden_size**0.5 if is_gemma else 1.0,
        query_scale=_number(values, "query_pre_attn_scalar", where) ** -0.5 if is_gemma else None,
        # transformers reads attn_logit_softcapping for Gemma 3 too, but its attention never applies it
        attention_softcap=_optional_number(values, "attn_logit_softcapping", where) if family == "gemma2" else None,
        logit_softcap=_optional_number(values, "final_logit_softcapping", where) if is_gemma else None,
        sliding_window=window,
        layer_types=layer_types,
        rope=rope,
        rope_local=rope_local,
        model_type=family,
    )


def format_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` object of a configuration, without special tokens and storage dtype.

    Raises:
      ValueError: if the family named by `config.model_type` cannot express the configuration.
    """
    family = config.model_type
    if family not in _FAMILIES:
        raise ValueError(f"ModelConfig.model_type={family!r}: allowed are {', '.join(_FAMILIES)}")
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _format_rope(config.rope),
    }
    if family.startswith("gemma"):
        values |= {
            "hidden_activation": config.activation,
            "query_pre_attn_scalar": round(config.attention_scale**-2),
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    else:
        values["hidden_act"] = config.activation
    if family not in ("mistral", "qwen2"):
        values["attention_bias"] = config.qkv_bias
    if family == "llama":
        values["mlp_bias"] = config.mlp_bias
    else:
        values["sliding_window"] = config.sliding_window
    if family.startswith(("qwen", "gemma")):
        values["layer_types"] = list(config.layer_types or (FULL,) * config.num_layers)
    if family.startswith("qwen"):
        values["use_sliding_window"] = config.sliding_window is not None
    if config.rope_local is not None:
        values["rope_local_base_freq"] = config.rope_local.theta
    _check_expressed(config, values)
    return values


def _refuse_unsupported(values: dict[str, Any], where: str) -> None:
    if values.get("quantization_config"):
        raise ValueError(f"{where}: quantization_config is set; only unquantised checkpoints are read")
    if values.get("use_bidirectional_attention"):
        raise ValueError(f"{where}: use_bidirectional_attention is set; only causal models generate")


def _size(values: dict[str, Any], key: str, where: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {key}={value!r}: expected a positive integer")
    return value


def _number(values: dict[str, Any], key: str, where: str) -> float:
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{where}: {key}={value!r}: expected a positive number")
    return float(value)


def _optional_number(values: dict[str, Any], key: str, where: str) -> float | None:
    return None if values.get(key) is None else _number(values, key, where)


def _activation(values: dict[str, Any], key: str, where: str) -> str:
    value = values.get(key)
    if value is None and key == "hidden_activation":  # null in early Gemma files
        return "gelu_pytorch_tanh"
    if value not in ACTIVATIONS:
        raise ValueError(f"{where}: {key}={value!r}: allowed are {', '.join(ACTIVATIONS)}")
    return value


def _sliding(values: dict[str, Any], family: str, num_layers: int, where: str) -> tuple[int | None, tuple[str, ...]]:
    """Window and kind of each layer; a model without sliding layers has neither."""
    if family == "llama" or values["sliding_window"] is None:
        return None, ()
    if family.startswith("qwen") and not values["use_sliding_window"]:
        return None, ()
    window, given = _size(values, "sliding_window", where), values.get("layer_types")
    if family == "mistral":
        types = (SLIDING,) * num_layers
    elif given is not None:
        types = tuple(given)
    elif family.startswith("qwen"):
        types = tuple(SLIDING if i >= values["max_window_layers"] else FULL for i in range(num_layers))
    else:
        every = 2 if family == "gemma2" else _size(values, "sliding_window_pattern", where)
        types = tuple(FULL if (i + 1) % every == 0 else SLIDING for i in range(num_layers))
    wrong = [t for t in types if t not in (FULL, SLIDING)]
    if wrong:
        raise ValueError(f"{where}: layer_types has {wrong[0]!r}: allowed are {FULL}, {SLIDING}")
    if len(types) != num_layers:
        raise ValueError(f"{where}: layer_types has {len(types)} entries for num_hidden_layers={num_layers}")
    return (window, types) if SLIDING in types else (None, ())


def _ropes(values: dict[str, Any], family: str, where: str) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of all layers, and of sliding ones where it is another."""
    scaling = values.get("rope_scaling") or {}
    parameters = scaling or values.get("rope_parameters") or {}
    if family != "gemma3_text":
        if FULL in parameters or SLIDING in parameters:
            raise ValueError(f"{where}: rope_parameters differ by layer type, which {family} does not know")
        return _rope(parameters, values, "rope_theta", where), None
    by_type = values.get("rope_parameters") or {}
    full = dict(by_type.get(FULL) or {}) | scaling
    return (
        _rope(full, values, "rope_theta", where),
        _rope(by_type.get(SLIDING) or {}, values, "rope_local_base_freq", where),
    )


def _rope(parameters: dict[str, Any], values: dict[str, Any], theta_key: str, where: str) -> RopeConfig:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"{where}: rope_type {kind!r} is not supported; allowed are {', '.join(ROPE_KINDS)}")
    partial = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"{where}: partial_rotary_factor={partial!r}: only 1.0 is supported")
    theta = _number({"rope_theta": parameters.get("rope_theta", values[theta_key])}, "rope_theta", where)
    if kind == "default":
        return RopeConfig(theta)
    factor = _number(parameters, "factor", where)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    filled = {"original_max_position_embeddings": values["max_position_embeddings"]} | parameters
    low, high = _number(filled, "low_freq_factor", where), _number(filled, "high_freq_factor", where)
    if not high > low:
        raise ValueError(f"{where}: high_freq_factor={high} must be above low_freq_factor={low}")
    return RopeConfig(theta, kind, factor, low, high, _size(filled, "original_max_position_embeddings", where))


def _format_rope(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    values: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        values |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    return values


def _check_expressed(config: ModelConfig, values: dict[str, Any]) -> None:
    """Reads `values` back: what a family's file cannot say must not get lost in silence."""
    again = parse_config(values, "config.json as written")
    for field in dataclasses.fields(config):
        wanted, found = getattr(config, field.name), getattr(again, field.name)
        if wanted != found:
            raise ValueError(
                f"ModelConfig.{field.name}={wanted!r}: a {config.model_type} config.json can only say {found!r}"
            )
