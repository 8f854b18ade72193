"""Reads drafters that others trained, in the layouts of the programs that wrote them.

`open_published` looks at the configuration and at the names of the tensors, and gives kind, layout and switches under
the names of speculators. `read_published` reads the weights, as the kind's `PublishedKind` says. What no reference
implementation can be run for is not read. Text never depends on what is read here, only its speed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from hsd_jax import validation
from hsd_jax.config import ModelConfig
from hsd_jax.drafters.method import DRAFTING_METHODS, DraftedFor, PublishedKind
from hsd_jax.host.files import read_object
from hsd_jax.models.convert import weight_files
from hsd_jax.models.placement import HERE, Placement
from hsd_jax.models.target import EMBEDDING
from hsd_jax.models.tensor_files import PickedRows, StoredTensor, load_tree, matched, open_all, specs_of
from hsd_jax.types import Weights
from hsd_jax.validation import shown

EAGLE3, DFLASH = "eagle3", "dflash"
_KINDS = {r"eagle_?3": EAGLE3, r"dflash|dspark": DFLASH}
"""The kinds that are read, by a word of the configuration."""
_NOT_READ = {
    r"medusa": "Medusa heads with projections of their own",
    r"p_?eagle": "P-EAGLE",
    r"dflash_?2": "DFlash 2",
    r"dspine": "DSpine",
    r"domino": "Domino",
    r"jetspec|causal_head": "JetSpec",
    r"xpress": "XPress",
    r"mtp": "layers for multi-token prediction (MTP)",
    r"eagle[12]?$": "EAGLE-1 or EAGLE-2",
}
_NOT_READ_TENSORS = {
    r"^(medusa_head\.)?\d+\.\d+\.(linear\.)?(weight|bias)$": _NOT_READ["medusa"],
    r"^mask_hidden$": _NOT_READ["p_?eagle"],
    r"(attention_conv|mlp_conv|candidate_selector)\.": _NOT_READ["dflash_?2"],
    r"^prefix_gru\.": _NOT_READ["domino"],
    r"^mtp\.|mtp_layers\.|\.eh_proj\.": _NOT_READ["mtp"],
}
"""What is refused for a word of the configuration, or for a tensor that only such a drafter has."""
_LEFT_OUT = re.compile(r"^(t2d|verifier_(lm_head|norm)\.weight|.*rotary_emb\.inv_freq)$")
"""Tensors that repeat what the target or another tensor says."""
_OLDER = {"midlayer.": "layers.0.", "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1."}
_OLDER |= {"aux_norm_high.": "fc_norm.2."}
_LAYER_IDS = {"eagle_aux_hidden_state_layer_ids": -1, "aux_hidden_state_layer_ids": -1, "target_layer_ids": 0}
"""What is added to a layer number of a key to get ours. The first two count as `hidden_states` of Hugging Face does,
from the embeddings on: so speculators and vLLM read them, while SGLang adds 0."""
_SIZES = {
    r"\.q_proj|\.o_proj": ("num_attention_heads", "head_dim", "hidden_size"),
    r"\.[kv]_proj": ("num_key_value_heads", "head_dim", "hidden_size"),
    r"\.mlp\.": ("intermediate_size", "hidden_size"),
    r"^confidence": ("hidden_size", "markov_rank"),
    r"lm_head|d2t|markov|embed": ("vocab_size", "draft_vocab_size", "hidden_size", "markov_rank"),
    r"": ("hidden_size",),
}
"""The keys of the configuration that decide the shape of a tensor."""


class Published(NamedTuple):
    """A drafter that others trained, as its files describe it. No tensor is read yet."""

    kind: str
    """EAGLE3, or DFLASH, which includes DSpark."""
    folder: Path
    format: str
    """The program whose layout it has, for messages."""
    layers: dict[str, Any]
    """The keys of the drafter's own transformer, as in the `config.json` of a Llama or Qwen3 model. `num_hidden_layers`
    is the number of layers that have tensors: some files give that of the target."""
    switches: dict[str, Any]
    """All keys, flat, under the names of speculators. A missing key has the default of speculators' class."""
    feature_layers: tuple[int, ...] | None
    """The layers of the target that it reads, as in `target.forward`. None: the files name none, and there is no
    default for their number."""
    is_documented: bool
    """Whether the layout says how it counts layers. If not, engines disagree by one (`layer_readings`)."""
    tensors: dict[str, StoredTensor]
    """The unread tensors by the names of speculators, without copies of the target's weights."""

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    @property
    def reduced_vocab_size(self) -> int | None:
        """The number of tokens that may be drafted, by the tensor that lists them. None: all may be drafted."""
        return math.prod(self.tensors["d2t"].shape) if "d2t" in self.tensors else None

    def switch(self, name: str, hint: Any, default: Any) -> Any:
        """The value of a switch, checked against an annotation. The default also stands for null."""
        value = self.switches.get(name)
        return validation.take(hint, default if value is None else value, f"{self.config_file}: {name}")


def is_published(folder: Path) -> bool:
    """Whether a folder holds a drafter that others trained, of a kind that is read or not."""
    file = folder / "config.json"
    if not file.is_file():
        return False
    values = read_object(file)
    if _first(_NOT_READ | _KINDS, _words(values)) is not None or "eagle_config" in values:
        return True
    names = {tensor.name for tensor in open_all(sorted(folder.glob("*.safetensors")))}
    has_layer = any(re.match(r"(model\.)?(midlayer|layers\.0)\.self_attn\.", name) for name in names)
    is_head = bool(names & {"fc.weight", "model.fc.weight"}) and has_layer
    return is_head or any(re.match(r"(medusa_head\.)?0\.0\.linear\.", name) for name in names)


def check_readable(folder: Path) -> None:
    """Raises a ValueError for a kind that is not read, by the configuration alone."""
    _refuse(folder, _first(_NOT_READ, _words(read_object(folder / "config.json"))))


def open_published(folder: Path, target: ModelConfig | None) -> Published:
    """Finds kind, layout, switches and feature layers. Without a target nothing is compared with it, and no layers have
    a default.

    Raises:
      FileNotFoundError, ValueError: in one line, for a kind that is not read, a folder without safetensors, a
        configuration of another target, or tensors of no kind that is known.
    """
    check_readable(folder)
    file = folder / "config.json"
    values, tensors = read_object(file), _tensors(folder)
    _refuse(folder, _first(_NOT_READ_TENSORS, tensors))
    kind = _first(_KINDS, _words(values)) or _kind_of(folder, tensors)
    for name in ("fc.weight", "layers.0.self_attn.q_proj.weight"):
        if name not in tensors:
            raise ValueError(f"{folder}: missing tensor {name!r} of {kind}")
    layers = switches = values
    for name in ("dflash_config", "eagle_config"):
        switches = switches | (validation.take(dict | None, values.get(name), f"{file}: {name}") or {})
    layout = _layout(values)
    if switches.get("use_aux_norm"):  # SGLang's older name
        switches = switches | {"fc_norm": True}
    if layout == "speculators":
        layers = validation.take(dict, values.get("transformer_layer_config"), f"{file}: transformer_layer_config")
    layers = {"model_type": "llama" if layout == "EAGLE-3" else "qwen3"} | layers
    layers["num_hidden_layers"] = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    layers.pop("architectures", None)
    if layers["model_type"] not in ("llama", "qwen3"):
        raise ValueError(f"{file}: model_type={shown(layers['model_type'])}: allowed are llama, qwen3")
    named, is_documented = _named_layers(switches, layout, str(file))
    found = Published(kind, folder, layout, layers, switches, named, is_documented, tensors)
    if target is None:
        return found
    _check_sizes(found, target)
    return found if named is not None else found._replace(feature_layers=_default_layers(found, target))


def layer_readings(published: Published, target: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """The feature layers that the files may mean, the likeliest first: one reading if it is documented, else up to two
    that differ by one layer."""
    first = published.feature_layers
    if not first or published.is_documented:
        return () if first is None else (first,)
    ours = _default_layers(published, target)
    both = [tuple(layer + by for layer in first) for by in (0, 1)]
    both = [layers for layers in both if layers[-1] < target.num_layers]
    return tuple(sorted(both, key=lambda layers: layers != ours)) or (first,)


def described(
    folder: Path, target: DraftedFor, feature_layers: tuple[int, ...] | None = None
) -> tuple[Published, tuple[tuple[int, ...], ...], PublishedKind, Any]:
    """The files of a drafter that others trained, the layers that they may mean, how its kind is read, and its
    configuration, with the vocabulary of the files. Arguments and errors are those of `read_published`, but for missing
    and unexpected tensors."""
    published = open_published(folder, target.config)
    readings = layer_readings(published, target.config) if feature_layers is None else (tuple(feature_layers),)
    published = published._replace(feature_layers=readings[0] if readings else None)
    _check_layers(published, target.config)
    kind = DRAFTING_METHODS[published.kind].published
    assert kind is not None, published.kind
    config = kind.parse(published, dataclasses.replace(target.config, vocab_size=target.vocab_size))
    _check_shapes(published, kind, config)
    return published, readings, kind, config


def read_published(
    folder: Path,
    target: DraftedFor,
    dtype: Any = "float32",
    placement: Placement = HERE,
    feature_layers: tuple[int, ...] | None = None,
) -> tuple[Any, Weights, tuple[tuple[int, ...], ...]]:
    """The configuration and the weights of a drafter that others trained, and the layers that its files may mean, the
    likeliest first. The configuration has the first.

    Args:
      feature_layers: the target's layers that it reads. None: the first of `layer_readings`.
    Raises:
      FileNotFoundError, ValueError: as `open_published`; and for layers that do not suit the target or the drafter, or
        a tensor that is missing, unexpected or of another shape, before any is read.
    """
    published, readings, kind, config = described(folder, target, feature_layers)
    stored = dict(published.tensors)
    held = dataclasses.replace(config, vocab_size=target.config.vocab_size)
    offsets, ids = stored.pop("d2t", None), None
    if offsets is not None:
        ids, columns = _draft_vocabulary(offsets, target)
        config, held = (dataclasses.replace(one, reduced_vocab_size=len(ids)) for one in (config, held))
        for name in {kind.named(path, config) for path in kind.by_column} & stored.keys():
            stored[name] = PickedRows.of(stored[name], columns)
    where = stored["fc.weight"].file
    found = matched(stored, where, kind.init_weights, config, lambda path: kind.named(path, config))
    weights = load_tree(found, where, kind.init_weights, held, dtype, placement)
    return held, weights if ids is None else {**weights, "draft_to_target": jnp.asarray(ids)}, readings


def config_of(published: Published, kind: type, own: ModelConfig, target: ModelConfig, **switches: Any) -> Any:
    """The configuration of a kind: `switches`, what `own` says of the transformer, and what all kinds have."""
    tensors, names = published.tensors, {field.name for field in dataclasses.fields(kind)}
    shared = {name: value for name, value in vars(own).items() if name in names}
    shared |= {"vocab_size": target.vocab_size, "reduced_vocab_size": published.reduced_vocab_size}
    shared |= {"feature_layers": published.feature_layers, "has_embedding": "embed_tokens.weight" in tensors}
    try:
        return kind(**shared | switches)
    except ValueError as error:
        raise ValueError(f"{published.config_file}: {error}") from error


def _first(table: Mapping[str, str], words: Iterable[str]) -> str | None:
    """What a table says of the first word that one of its patterns matches."""
    return next((what for word in words for pattern, what in table.items() if re.search(pattern, word)), None)


def _words(values: dict[str, Any]) -> list[str]:
    own = values.get("dflash_config")
    values = values | (own if isinstance(own, dict) else {})
    names = values.get("architectures")
    words = [values.get(key) for key in ("speculators_model_type", "projector_type")]
    words += names if isinstance(names, list) else []
    words += [key for key in values if key.startswith(("medusa_", "dflash_", "causal_head")) and values[key]]
    return [str(word).lower() for word in words if word]


def _refuse(folder: Path, what: str | None) -> None:
    if what is not None:
        raise ValueError(f"{folder}: {what}, which is not read; read are EAGLE-3, DFlash and DSpark")


def _kind_of(folder: Path, tensors: dict[str, StoredTensor]) -> str:
    """The kind by names and widths, for a configuration that does not say it."""
    fc, query = (tensors.get(name) for name in ("fc.weight", "layers.0.self_attn.q_proj.weight"))
    if fc is not None and query is not None and len(fc.shape) == len(query.shape) == 2:
        if query.shape[1] == 2 * fc.shape[0]:
            return EAGLE3
        if "hidden_norm.weight" in tensors:
            return DFLASH
        if fc.shape[1] == 2 * fc.shape[0]:
            _refuse(folder, _NOT_READ["eagle[12]?$"])
    raise ValueError(f"{folder}: neither the configuration nor the tensors are those of EAGLE-3, DFlash or DSpark")


def _layout(values: dict[str, Any]) -> str:
    own = values.get("dflash_config")
    if "speculators_model_type" in values:
        return "speculators"
    if own:
        return "SpecForge" if "projector_type" in own else "DFlash"
    return "DeepSpec" if "target_layer_ids" in values else "EAGLE-3"


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for tensor in open_all(weight_files(folder)):
        name = tensor.name.removeprefix("model.")
        old = next((old for old in _OLDER if name.startswith(old)), "")
        name = _OLDER.get(old, "") + name.removeprefix(old)
        if name in tensors:
            raise ValueError(f"{tensor}: also stored as {tensors[name].name!r}")
        if not _LEFT_OUT.match(name):
            tensors[name] = tensor
    return tensors


def _named_layers(switches: dict[str, Any], layout: str, where: str) -> tuple[tuple[int, ...] | None, bool]:
    """The layers that the files name in our numbers, and whether their numbers are documented."""
    for key, shift in _LAYER_IDS.items():
        if switches.get(key) is not None:
            ids = switches[key]
            ids = validation.take(tuple[int, ...], tuple(ids) if isinstance(ids, list) else ids, f"{where}: {key}")
            return tuple(number + shift for number in ids), shift == 0 or layout == "speculators"
    return None, True


def _default_layers(published: Published, target: ModelConfig) -> tuple[int, ...] | None:
    """The layers that all engines read if the files name none; None if the target is too shallow for them."""
    num, most = target.num_layers, published.layers["num_hidden_layers"] - 1
    layers = (1, num // 2 - 1, num - 4)
    if published.kind == DFLASH:
        layers = tuple(round(1 + i * (num - 4) / most) for i in range(most + 1)) if most else (num // 2,)
    return layers if list(layers) == sorted(set(layers)) and layers[0] >= 0 else None


def _check_sizes(published: Published, target: ModelConfig) -> None:
    """Checks what the configuration says of its target."""
    said = published.switches | {"vocab_size": published.layers.get("vocab_size")}
    sizes = {"vocab_size": target.stored_vocab_size or target.vocab_size, "target_hidden_size": target.hidden_size}
    for key, wanted in (sizes | {"num_target_layers": target.num_layers}).items():
        if said.get(key) not in (None, wanted):
            this = f"this target has {key.replace('target_', '')}={wanted}"
            raise ValueError(f"{published.config_file}: {key}={shown(said[key])}: a drafter of another target; {this}")


def _check_layers(published: Published, target: ModelConfig) -> None:
    layers, fc = published.feature_layers, published.tensors["fc.weight"]
    if layers is None:
        raise ValueError(f"{published.config_file}: names no layers of the target: give feature_layers=(...)")
    in_order = layers and list(layers) == sorted(set(layers))
    if not in_order or layers[0] < EMBEDDING or layers[-1] >= target.num_layers:
        allowed = f"ascending numbers from {EMBEDDING} (the embeddings) to {target.num_layers - 1}, the last layer"
        raise ValueError(f"{published.folder}: feature_layers={list(layers)}: allowed are {allowed}")
    if len(fc.shape) != 2 or fc.shape[-1] != len(layers) * target.hidden_size:
        expected = f"{len(layers)} layers of the target's hidden_size={target.hidden_size}"
        raise ValueError(f"{fc}: found shape {list(fc.shape)}, expected {expected}: another target, or other layers")


def _check_shapes(published: Published, kind: PublishedKind, config: Any) -> None:
    """Names the keys of the configuration that decide the shape of a tensor which has another one."""
    keys = published.switches | published.layers
    for path, spec in specs_of(kind.init_weights, config).items():
        tensor = published.tensors.get(name := kind.named(path, config))
        if tensor is None or tensor.shape == spec.shape:
            continue
        sizes = next(sizes for pattern, sizes in _SIZES.items() if re.search(pattern, name))
        by = ", ".join(f"{key}={shown(keys[key])}" for key in sizes if keys.get(key) is not None)
        raise ValueError(f"{tensor}: found shape {list(tensor.shape)}, expected {list(spec.shape)} by {by}")


def _draft_vocabulary(offsets: StoredTensor, target: DraftedFor) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drafted, ascending, and the row of each in the files."""
    if offsets.dtype not in ("I64", "I32") or len(offsets.shape) != 1:
        raise ValueError(f"{offsets}: found {offsets.dtype} {list(offsets.shape)}, expected a list of I64")
    ids = np.concatenate([np.zeros(0, np.int64), *offsets.rows()])
    ids = ids + np.arange(len(ids))  # the file holds what is added to the number of a column
    rows = np.argsort(ids, kind="stable")
    ids = ids[rows]
    if not len(ids) or ids[0] < 0 or ids[-1] >= target.vocab_size or not (ids[1:] > ids[:-1]).all():
        raise ValueError(f"{offsets}: expected offsets that give each token once, below vocab_size={target.vocab_size}")
    kept = ids < target.config.vocab_size
    return ids[kept].astype(np.int32), rows[kept]
