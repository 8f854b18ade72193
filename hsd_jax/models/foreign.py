"""Says what a checkpoint is that this library does not run, and what to do with it.

Whoever reads a folder, a repository or a GGUF file takes the words of a refusal from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsd_jax.host.files import read_object
from hsd_jax.validation import shown

_HEADS = "which draft from the states of another model and are not read"
_DRAFTER = "a drafter for another model: give it as drafter=, with that model as the target"
_PLAIN = "only weights in float32, bfloat16 or float16 are read: name the model that was quantized"
_FILES = {
    r"\.gguf$": "GGUF files: name one of them",
    r"^medusa_": f"Medusa heads, {_HEADS}",
    r"^consolidated": "weights in the form of Mistral or Meta: take those for transformers",
    r"\.(bin|pt|pth|ckpt)$": "pickles, which are never loaded: save the model as safetensors",
}
_CONFIGS = {
    r"^adapter\b": "an adapter, as of LoRA: merge it into its model first",
    r"\bmedusa_": f"Medusa heads, {_HEADS}",
    r"speculator": _DRAFTER,
    r"moe|mixtral|gpt_oss|expert": "a mixture of experts",
    r"vision|_vl\b": "a model of images and text",
    r"audio": "a model of sound and text",
}
_TENSORS = {
    r"^(fc\.weight|midlayer\.)": _DRAFTER,
    r"\.(qweight|weight_packed|weight_scale|weight_scale_inv|weight\.absmax|scales)$": f"quantized; {_PLAIN}",
    r"\.(experts|block_sparse_moe)\.": "a mixture of experts, which is not run",
    r"\.lora_[AB]\.": "an adapter (LoRA): merge it into its model first",
}
"""These tables say what something is that has a file, a key of `config.json` or a tensor of such a name."""


def in_folder(folder: Path) -> str | None:
    """What a folder holds in place of a model. None: a model, or nothing that is known."""
    names = sorted(path.name for path in folder.iterdir())
    if any(name.endswith(".safetensors") and not name.startswith(("adapter_", "consolidated")) for name in names):
        return None
    if "adapter_config.json" in names:
        adapter = read_object(folder / "adapter_config.json")
        kind, base = adapter.get("peft_type", "PEFT"), adapter.get("base_model_name_or_path")
        return f"an adapter ({kind}) of {shown(base)}: merge it into that model first"
    for name in names:
        if what := _first(_FILES, name):
            return f"{what} ({name})"
    return None


def kind_of(name: Any, values: Mapping[str, Any] | None = None) -> str:
    """What a model that is not run is, by the name of its family and the keys of its configuration. Empty: unknown."""
    what = _first(_CONFIGS, " ".join([str(name), *(key for key, value in (values or {}).items() if value)]).lower())
    return f" ({what})" if what else ""


def in_config(values: Mapping[str, Any]) -> str | None:
    """Why a `config.json` of a family that is run is not that of a language model in plain weights. None: it is."""
    names = values.get("architectures")
    for name in names if isinstance(names, list) else ():
        if re.search("Eagle|DraftModel|DFlash|DSpark", str(name)):
            return f"architectures={shown(names)}: {_DRAFTER}"
        if re.search("For(?!CausalLM|ConditionalGeneration)[A-Z]", str(name)):
            return f"architectures={shown(names)}: allowed are language models (ForCausalLM, ForConditionalGeneration)"
    for key in ("quantization_config", "quantization"):  # the second one is MLX's
        if how := values.get(key):
            method = how.get("quant_method", how) if isinstance(how, dict) else how
            return f"{key}: the weights are quantized ({shown(method)}); {_PLAIN}, or a GGUF file of it"
    return None


def tensor(name: str) -> str | None:
    """What has a tensor of this name, without prefixes. None: perhaps a model that is run."""
    return _first(_TENSORS, name)


def _first(table: dict[str, str], text: str) -> str | None:
    return next((what for pattern, what in table.items() if re.search(pattern, text)), None)
