"""Reads and writes Hugging Face `config.json`, the sizes and switches of a target, without torch or transformers.

It reads both styles: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5). It
writes the older style, which both versions read. `convert.py` reads the weights.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

from hsd_jax import validation
from hsd_jax.config import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    HeadDim,
    Layers,
    LayerType,
    ModelConfig,
    RopeConfig,
    RopeKind,
    Theta,
)
from hsd_jax.host.files import read_object
from hsd_jax.models import foreign
from hsd_jax.validation import Count, NotNegative, OneOf, Positive, PositiveShare, Whole

_GEMMA = {
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "gemma2": _GEMMA
    | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    # The text part of a Gemma 3 file leaves out every key that has its default, also sizes.
    "gemma3_text": _GEMMA
    | {
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "rope_theta": 1_000_000.0,
    },
}
"""The defaults of transformers for keys that a file leaves out, where they are not those of `_Keys`."""

_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
"""The fields of `ModelConfig` that have their own key."""


@validation.dataclass
class _Keys:
    """The keys that are read from a `config.json`, with their allowed values and defaults."""

    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    intermediate_size: Count
    max_position_embeddings: Count
    rms_norm_eps: PositiveShare = 1e-6
    rope_theta: Theta = 10_000.0
    num_key_value_heads: Count | None = None
    head_dim: HeadDim | None = None
    tie_word_embeddings: bool | None = False
    attention_bias: bool | None = False
    mlp_bias: bool | None = False
    hidden_act: Annotated[str, OneOf(ACTIVATIONS)] = "silu"
    hidden_activation: Annotated[str, OneOf(ACTIVATIONS)] | None = None
    """Null in early Gemma files."""
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    use_sliding_window: bool | None = False
    sliding_window: Count | None = None
    sliding_window_pattern: Count = 6
    max_window_layers: Whole = 28
    layer_types: tuple[LayerType, ...] | None = None
    rope_local_base_freq: Theta = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: Count | None = None
    partial_rotary_factor: float | None = None


_ORIGINAL = "original_max_position_embeddings"
_ROPE = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", _ORIGINAL),
}
"""The keys of `rope_scaling` of each kind. Their names are those of the fields of `RopeConfig`, without _embeddings."""


def read_config(folder: str | Path) -> ModelConfig:
    """The architecture in a folder's `config.json`. A ValueError names the key, its value and the allowed ones."""
    path = Path(folder) / "config.json"
    return parse_config(read_object(path), str(path))


def parse_config(values: dict[str, Any], where: str) -> ModelConfig:
    """`read_config` for an object in memory. `where` is its name in errors."""
    family, whole = values.get("model_type"), values
    if family == "gemma3":
        if not isinstance(values.get("text_config"), dict):
            raise ValueError(f"{where}: model_type 'gemma3' without a text_config object")
        tied = {k: values[k] for k in ("tie_word_embeddings",) if k in values}
        uncapped = {"final_logit_softcapping": None}  # that class of transformers never applies it
        values, family = tied | values["text_config"] | uncapped, "gemma3_text"
    if family == "ministral":
        family = "mistral"  # whose files transformers reads as this family where they have layer_types
    if not isinstance(family, str) or family not in _FAMILIES:
        supported = ", ".join(_FAMILIES)
        what = f"model_type {validation.shown(family)}{foreign.kind_of(family, values)}"
        raise ValueError(f"{where}: {what}: supported are {supported}, gemma3, ministral")
    if why := foreign.in_config(whole):
        raise ValueError(f"{where}: {why}")
    if values.get("use_bidirectional_attention"):
        raise ValueError(f"{where}: use_bidirectional_attention is set; only causal models generate")
    values = _FAMILIES[family] | values  # a file may hold any other keys
    known = {field.name: values[field.name] for field in dataclasses.fields(_Keys) if field.name in values}
    keys: _Keys = validation.read(_Keys, known, where)
    is_gemma = family.startswith("gemma")
    keys = dataclasses.replace(
        keys,
        num_key_value_heads=keys.num_key_value_heads or keys.num_attention_heads,
        head_dim=keys.head_dim or keys.hidden_size // keys.num_attention_heads,
        tie_word_embeddings=bool(keys.tie_word_embeddings),
    )
    bias = bool(keys.attention_bias) and family != "mistral"
    try:
        if is_gemma and keys.query_pre_attn_scalar is None:
            raise ValueError("query_pre_attn_scalar=None: allowed are finite numbers above 0")
        window, layer_types = _sliding(keys, family)
        rope, rope_local = _ropes(keys, family)
        return ModelConfig(
            **{field: getattr(keys, key) for field, key in _SAME.items()},
            qkv_bias=family == "qwen2" or bias,
            output_bias=family != "qwen2" and bias,
            mlp_bias=family == "llama" and bool(keys.mlp_bias),
            qk_norm=family in ("qwen3", "gemma3_text"),
            activation=(keys.hidden_activation or "gelu_pytorch_tanh") if is_gemma else keys.hidden_act,
            norm_offset=1.0 if is_gemma else 0.0,
            post_norms=is_gemma,
            embed_scale=keys.hidden_size**0.5 if is_gemma else 1.0,
            query_scale=keys.query_pre_attn_scalar**-0.5 if is_gemma and keys.query_pre_attn_scalar else None,
            # transformers reads attn_logit_softcapping for Gemma 3 too, but its attention never applies it
            attention_softcap=keys.attn_logit_softcapping if family == "gemma2" else None,
            logit_softcap=keys.final_logit_softcapping if is_gemma else None,
            sliding_window=window,
            layer_types=layer_types,
            rope=rope,
            rope_local=rope_local,
            model_type=family,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def format_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` object of a configuration, without special tokens and the dtype of the weights.

    A ValueError names what the family `config.model_type` cannot express.
    """
    family = config.model_type
    if family not in _FAMILIES:
        raise ValueError(f"ModelConfig.model_type={family!r}: allowed are {', '.join(_FAMILIES)}")
    name = f"{family.removesuffix('_text').capitalize()}ForCausalLM"  # as transformers names the class of each family
    values: dict[str, Any] = {"architectures": [name], "model_type": family}
    values |= {key: getattr(config, field) for field, key in _SAME.items()}
    rope, names = config.rope, _ROPE[config.rope.kind]
    scaling = {"rope_type": rope.kind} | {name: getattr(rope, _field(name)) for name in names}
    values |= {"rope_theta": rope.theta, "rope_scaling": scaling if names else None}
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
    is_mixed = family == "mistral" and FULL in config.layer_types
    if is_mixed or family.startswith(("qwen", "gemma")):
        values["layer_types"] = list(config.layer_types or (FULL,) * config.num_layers)
    if family.startswith("qwen"):
        values["use_sliding_window"] = config.sliding_window is not None
    if config.rope_local is not None:
        values["rope_local_base_freq"] = config.rope_local.theta
    again = parse_config(values, "config.json as written")
    for field in dataclasses.fields(config):
        wanted, found = getattr(config, field.name), getattr(again, field.name)
        if wanted != found:
            what = f"ModelConfig.{field.name}={wanted!r}"
            raise ValueError(f"{what}: a {config.model_type} config.json can only store {found!r}")
    return values


def _sliding(keys: _Keys, family: str) -> tuple[int | None, tuple[str, ...]]:
    """The window, and the kind of each layer. A model without sliding layers has neither."""
    window, num_layers = keys.sliding_window, keys.num_hidden_layers
    if family == "llama" or window is None or (family.startswith("qwen") and not keys.use_sliding_window):
        return None, ()
    if keys.layer_types is not None:
        types = keys.layer_types
    elif family == "mistral":
        types = (SLIDING,) * num_layers
    elif family.startswith("qwen"):
        types = tuple(SLIDING if i >= keys.max_window_layers else FULL for i in range(num_layers))
    else:
        every = 2 if family == "gemma2" else keys.sliding_window_pattern
        types = tuple(FULL if (i + 1) % every == 0 else SLIDING for i in range(num_layers))
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries for num_hidden_layers={num_layers}")
    return (window, types) if SLIDING in types else (None, ())


def _ropes(keys: _Keys, family: str) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of all layers, and that of sliding layers if it differs."""
    scaling, by_type = keys.rope_scaling or {}, keys.rope_parameters or {}
    if family != "gemma3_text":
        parameters = scaling or by_type
        if FULL in parameters or SLIDING in parameters:
            raise ValueError(f"rope_parameters differ by layer type, which {family} does not support")
        original = keys.original_max_position_embeddings or parameters.get(_ORIGINAL)
        return _rope(parameters | {_ORIGINAL: original}, keys, keys.rope_theta), None
    full, sliding = (
        validation.take(dict | None, by_type.get(name), f"rope_parameters.{name}") for name in (FULL, SLIDING)
    )
    return _rope((full or {}) | scaling, keys, keys.rope_theta), _rope(sliding or {}, keys, keys.rope_local_base_freq)


def _rope(parameters: dict[str, Any], keys: _Keys, theta: float) -> RopeConfig:
    values = {
        "rope_theta": theta,
        "rope_type": parameters.get("type", "default"),
        "original_max_position_embeddings": keys.max_position_embeddings,
        "partial_rotary_factor": keys.partial_rotary_factor,
    }
    values |= {key: value for key, value in parameters.items() if value is not None}
    if values["partial_rotary_factor"] not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor={values['partial_rotary_factor']!r}: only 1.0 is supported")
    kind = validation.take(RopeKind, values["rope_type"], "rope_scaling.rope_type")
    if kind == "yarn":
        values = _yarn_defaults(values, keys.max_position_embeddings) | values
    for key in _ROPE[kind]:
        if key not in values:
            raise ValueError(f"rope_scaling.{key}=None: rope_type {kind!r} needs it")
    return RopeConfig(values["rope_theta"], kind, **{_field(key): values[key] for key in _ROPE[kind]})


def _yarn_defaults(values: dict[str, Any], max_position: int) -> dict[str, Any]:
    """The keys of YaRN that a file may leave out."""

    def number(hint: Any, key: str, default: Any = None) -> Any:
        return validation.take(hint, values.get(key, default), f"rope_scaling.{key}")

    factor = number(Positive, "factor", max_position / number(Count, _ORIGINAL))
    scales = number(NotNegative | None, "mscale"), number(NotNegative | None, "mscale_all_dim")
    above, below = (1 + 0.1 * scale * math.log(max(factor, 1.0)) for scale in (scales if all(scales) else (1.0, 0.0)))
    return {"factor": factor, "beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": above / below}


def _field(key: str) -> str:
    return key.removesuffix("_embeddings")
