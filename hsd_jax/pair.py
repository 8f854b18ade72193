"""`Params`, the models and settings that users pass around, and `load`, which makes them from names, folders and files.

A wrong checkpoint raises an error here, before anything compiles.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from hsd_jax.config import QUANTIZED, FeatureLayer, ModelConfig, TreeConfig
from hsd_jax.drafters import probe as probe_lib
from hsd_jax.drafters.both import BothConfig
from hsd_jax.drafters.files import DRAFTER, read_drafter, read_drafter_config, read_scorer
from hsd_jax.drafters.method import DraftedFor, DraftingMethod
from hsd_jax.drafters.published import check_readable, is_published, read_published
from hsd_jax.drafters.rescored.draft import ALPHA, RescoredConfig
from hsd_jax.drafters.stack import StackConfig, at_bottom
from hsd_jax.drafters.table import DRAFTING_METHODS, kinds_with, load_foreign, make_drafter, method_of, parse
from hsd_jax.host import sharding as sharding_lib
from hsd_jax.host.distributed import check_mesh, put
from hsd_jax.host.files import is_writer, sha256
from hsd_jax.host.jax_settings import check_jax_settings
from hsd_jax.kernels import int8, native, program
from hsd_jax.models import convert, draft_vocab, packing
from hsd_jax.models.checkpoint import BUNDLED, Checkpoint, Source, find, refuse_early
from hsd_jax.models.placement import Placement
from hsd_jax.models.tensor_files import MODEL, checked_dtype, is_stored
from hsd_jax.settings import Loading, LoadSettings
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.types import Weights
from hsd_jax.validation import Count, NotNegative, shown, take, takes

WITHOUT_WEIGHTS = tuple(method.config for method in DRAFTING_METHODS.values() if method.parse is not None)
"""Configurations that are complete drafters, because their methods have no weights."""
DTYPES = ("float32", "bfloat16")
"""The dtypes of a target's weights."""


@flax.struct.dataclass
class Params:
    """A target, a drafter if there is one, and the settings that decoding needs.

    The weights are leaves of a pytree and the other fields are static, so it passes through `jax.jit`,
    `jax.device_put` and `jax.tree.map`. `drafter` is {} for a drafter without weights and None for no drafter.
    """

    target: dict[str, Any]
    drafter: dict[str, Any] | None
    target_config: ModelConfig = flax.struct.field(pytree_node=False)
    drafter_config: Any = flax.struct.field(pytree_node=False, default=None)
    tokenizer: Tokenizer | None = flax.struct.field(pytree_node=False, default=None)
    eos: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    max_len: int = flax.struct.field(pytree_node=False, default=2048)
    precision: str = flax.struct.field(pytree_node=False, default="fast")
    tree: TreeConfig | None = flax.struct.field(pytree_node=False, default=None)
    """The tree of every `decode` that is given none. None: each call chooses its tree (`planning/plan.py`)."""
    mesh: Mesh | None = flax.struct.field(pytree_node=False, default=None)
    dtype: str = flax.struct.field(pytree_node=False, default="float32")
    """The dtype of the target's weights, or "int8" if they are quantized. The arrays may have a wider dtype with the
    same values (`Placement.widens`)."""
    fingerprint_pair: tuple[str, str] | None = flax.struct.field(pytree_node=False, default=None)
    """Fingerprints of target and drafter, by which processes find that they have the same models. None if the params
    were not made by `load`."""
    drafter_mesh: Mesh | None = flax.struct.field(pytree_node=False, default=None)
    """The mesh of a drafter that runs beside the target (`pearl`). None: one program runs both, on `mesh`."""
    sampling_defaults: tuple[tuple[str, Any], ...] = flax.struct.field(pytree_node=False, default=())
    """What the target's `generation_config.json` says of sampling, for calls with `defaults="checkpoint"`."""

    @property
    def arithmetic(self) -> str:
        """One line that says in which types the target's products and sums are computed."""
        return describe_arithmetic(self.dtype, self.mesh is None, self.precision)

    @property
    def matmul_precision(self) -> str | None:
        """The value for `jax.default_matmul_precision`. None: jax's default."""
        return "highest" if self.precision == "exact" else None

    def fingerprints(self) -> tuple[str, str]:
        """Two fingerprints: of the target's weights, and of the drafter's configuration and weights."""
        if self.fingerprint_pair is not None:
            return self.fingerprint_pair
        return convert.weights_hash(self.target), drafter_hash(self.drafter_config, self.drafter)

    @property
    def as_owner(self) -> DraftedFor:
        """The target as a drafter's files describe it."""
        return DraftedFor(self.target_config, self.fingerprints()[0], self.tokenizer)


def drafter_hash(config: Any, weights: Weights | None) -> str:
    """Fingerprint of a drafter's configuration and weights."""
    return sha256(repr(config), convert.weights_hash(weights or {}))


def describe_arithmetic(dtype: str, has_kernels: bool = True, precision: str = "fast") -> str:
    """One line that says how this machine computes a target with weights of this dtype. A mesh has no CPU kernels."""
    if program.here().platform != "cpu":
        products = "products in the dtype of the rest" if dtype in QUANTIZED else "and products"
        return f"{dtype} weights{',' if dtype in QUANTIZED else ''} {products}, float32 sums"
    if has_kernels and native.available():
        rows = "float32 activations and sums"
        if dtype == "bfloat16" and native.rounds_rows():
            rows = "activations rounded to it, float32 sums"
        if dtype in QUANTIZED and precision == "fast":
            rows = f"activations rounded to 8 bits in blocks of {int8.BLOCK}, integer products"
        return f"{dtype} weights, {rows}, {native.selected_isa()} kernels"
    why = "no CPU kernels on a mesh" if not has_kernels else "no CPU kernels"
    return f"{dtype} weights, multiplied in float32 by XLA ({why})"


def fastest_dtype(has_kernels: bool = True) -> Any:
    """bfloat16 if the device or one of our own kernels multiplies it fast, else float32. A mesh has no CPU kernels."""
    is_fast = not native.is_emulated(jnp.bfloat16) or (has_kernels and native.available())
    return jnp.bfloat16 if is_fast else jnp.float32


@takes(LoadSettings)
def load(name: Source | None = None, **settings: Unpack[LoadSettings]) -> Params:
    """Loads a target and, if given, its drafter.

    Args:
      name: the target, as the setting `target`, which reads better together with `drafter`. Give one of the two. A path
        that exists comes before a repository of the hub. The hub is read through `huggingface_hub`, with its cache,
        its tokens and its offline mode.
    Raises:
      FileNotFoundError, ValueError: for a wrong argument, before anything compiles; it names the value and the remedy.
        Also if the weights do not fit into memory, before any are read, and for a setting of jax that is refused
        (`host/jax_settings.py`). Nothing stays loaded after an error.
    """
    check_jax_settings()
    asked = Loading(**settings)
    for argument, value in {"name": name, **vars(asked)}.items():
        kinds = (str, os.PathLike, Checkpoint, type(None), *(WITHOUT_WEIGHTS if argument == "drafter" else ()))
        if argument in ("name", "target", "tokenizer", "drafter") and not isinstance(value, kinds):
            raise ValueError(f"{argument}={shown(value)}: expected a name, a folder or a file")
    source = asked.target if name is None else name
    if source is None or (name is not None and asked.target is not None):
        raise ValueError('load() needs one target: load("demo"), load("ORG/NAME") or load(target=FOLDER)')
    mesh, dtype, is_exact = sharding_lib.make_mesh(asked.mesh), asked.dtype, asked.precision == "exact"
    check_mesh(mesh)
    if dtype is not None or is_exact:
        dtype = checked_dtype("float32" if dtype is None else dtype, DTYPES)
        if is_exact and dtype != jnp.float32:
            raise ValueError(f'dtype="{dtype}" with precision="exact": exact means float32')
    checkpoint = find(source, asked.revision, asked.tokenizer)
    config, words = checkpoint.config, checkpoint.tokenizer
    dtype = jnp.dtype(checkpoint.dtype) if dtype is None else dtype
    take(int | None, asked.max_len, "max_len", le=config.max_position)
    drafter = checkpoint.drafter if asked.drafter is None else asked.drafter
    # The drafter is read first, because it is smaller and more often refused.
    owner = DraftedFor(config, checkpoint.hash(dtype), words)
    drafter_config, drafter_weights, readings = None, None, ()
    if drafter is not None:
        how = _drafter_dtype(dtype, mesh, asked.precision), Placement(mesh, True), asked.strict, asked.feature_layers
        drafter_config, drafter_weights, readings = _load_drafter(drafter, owner, *how)
    elif asked.feature_layers is not None:
        raise ValueError(f"feature_layers={shown(asked.feature_layers)}: no drafter is loaded")
    try:
        weights = checkpoint.weights(dtype, Placement(mesh, True, asked.quantize, not is_exact))
    except BaseException:
        drafter_weights = None  # frees the memory: Python keeps the frames of the last error
        raise
    if drafter_weights:
        drafter_weights = _with_head(drafter_weights, weights, config)
        drafter_config, drafter_weights = _held_once(drafter_config, drafter_weights, weights)
    pair = owner.hash, drafter_hash(drafter_config, drafter_weights)
    params = Params(
        weights,
        None if drafter_weights is None else _narrowed(drafter_config, drafter_weights, mesh, asked.precision),
        config,
        drafter_config,
        words and dataclasses.replace(words, parse_special=asked.parse_special),
        checkpoint.eos,
        asked.max_len or config.max_position,
        asked.precision,
        asked.tree,
        mesh,
        asked.quantize or dtype.name,
        pair,
        sampling_defaults=checkpoint.sampling_defaults,
    )
    params = place(arranged(params, mesh, frees=True), mesh)
    return _tried(params, drafter, readings) if asked.probe else params


def _drafter_dtype(dtype: Any, mesh: Mesh | None, precision: str) -> Any:
    """The dtype of a drafter's weights, given that of its target's."""
    return fastest_dtype(mesh is None) if precision == "fast" and dtype == jnp.float32 else dtype


def default_tree(config: Any) -> TreeConfig:
    """The default tree of this kind of drafter. It can also be a drawn tree."""
    return method_of(config).planning.default_tree(config)


class _Loaded(NamedTuple):
    """A drafter that was read."""

    config: Any
    weights: Weights
    readings: tuple[tuple[int, ...], ...] = ()
    """Of a drafter that others trained: the layers of the target that its files may mean, the likeliest first."""


def check_drafts(folder: Path) -> None:
    """Raises the errors of the settings of what drafts, before its weights are fetched."""
    if is_published(folder):
        check_readable(folder)
    else:
        refuse_early(folder)


def _load_drafter(
    drafter: Any,
    target: DraftedFor,
    dtype: Any,
    placement: Placement,
    strict: bool = False,
    feature_layers: tuple[int, ...] | None = None,
) -> _Loaded:
    """Reads a drafter of any kind and checks it against its target.

    It gets the target's number of tokens. With a reduced draft vocabulary it still lacks its rows of the target's head
    (`_with_head`), unless it has a head of its own.
    """
    if isinstance(drafter, str):
        two = BothConfig.split(drafter)
        if two is not None and (two[0] in BUNDLED or not Path(drafter).expanduser().exists()):
            found = _load_drafter(two[0], target, dtype, placement, strict, feature_layers)
            if not _reads_features(method_of(found.config)):
                allowed = ", ".join(kinds_with(_reads_features))
                raise ValueError(f"drafter={shown(drafter)}: {found.config.kind} with lookup; allowed are {allowed}")
            return found._replace(config=BothConfig(found.config, two[1]))
        own = BUNDLED[drafter].drafter if drafter in BUNDLED else None
        if own is not None and read_drafter_config(own).target_hash == target.hash:
            drafter = own  # for any other target the name means the bundled language model
        else:
            drafter = parse(drafter) or drafter
    found = None if isinstance(drafter, WITHOUT_WEIGHTS) else find(drafter, check=check_drafts)
    if found is not None and found.path.is_dir() and is_published(found.path):
        return _Loaded(*read_published(found.path, target, dtype, placement, feature_layers))
    if feature_layers is not None:
        why = "only for a drafter that others trained; ours read the layers for which they were trained"
        raise ValueError(f"feature_layers={shown(feature_layers)} with drafter={shown(str(drafter))}: {why}")
    if found is None:
        return _Loaded(drafter, {})
    if found.path.is_file() or (is_stored(found.path, MODEL) and not is_stored(found.path, DRAFTER)):
        return _Loaded(*load_foreign(found, target, dtype, placement, strict))
    return _Loaded(*read_drafter(found.path, dtype, placement, target, strict))


def _reads_features(method: DraftingMethod) -> bool:
    """Whether it drafts from its target's states, and lookup may draft beside it."""
    return method.training is not None or method.published is not None


def _held_once(config: Any, drafter: Weights, target: Weights) -> tuple[Any, Weights]:
    """`_without_copy` of a drafter, or of the base of `both`."""
    if not isinstance(config, BothConfig):
        return _without_copy(config, drafter, target)
    base, drafter = _without_copy(config.base, drafter, target)
    return dataclasses.replace(config, base=base), drafter


def _tried(params: Params, drafter: Any, readings: tuple[tuple[int, ...], ...]) -> Params:
    """The same models, with what a probe tells of a drafter that others trained (`drafters/probe.py`): which of the
    layers it reads, and its profile. It is said on stderr. Other drafters have no `readings` and are not tried."""
    if not readings or probe_lib.is_off():
        return params
    whole, weights = params.drafter_config, params.drafter or {}
    base = whole.base if isinstance(whole, BothConfig) else whole

    def run(layers: tuple[int, ...]) -> probe_lib.Probe:
        models, config = {"target": params.target, "drafter": weights}, dataclasses.replace(base, feature_layers=layers)
        return probe_lib.run_probe(
            models, params.target_config, config, params.tokenizer, params.matmul_precision, params.mesh
        )

    about = params.fingerprints()[0], drafter_hash(base, weights), params.dtype
    found, is_new = probe_lib.probed(readings, about, run)
    say = f"{drafter}: {found}" if is_new else ""
    if len(readings) > 1:
        others = " or ".join(str(list(layers)) for layers in readings if layers != found.feature_layers)
        say = (
            f"{say or drafter}; its files do not say how they count layers: read are {list(found.feature_layers)}, not"
        )
        say += f" {others}"
    if say and is_writer():
        print(say, file=sys.stderr, flush=True)
    if found.first < probe_lib.LOW:
        warnings.warn(
            f"{drafter}: only {found.first:.0%} of the first drafts are accepted, with feature_layers="
            f"{list(found.feature_layers)}: was it trained for this target, and for these layers?",
            stacklevel=3,
        )
    base = dataclasses.replace(base, feature_layers=found.feature_layers, profile=found.profile)
    config = dataclasses.replace(whole, base=base) if isinstance(whole, BothConfig) else base
    return _drafted_by(params, config, weights)


def _with_head(drafter: Weights, target: Weights, config: ModelConfig) -> Weights:
    """The drafter with what `draft_vocab.attach` adds, in its dtype. Some drafters have a head of their own."""
    draft_to_target = drafter.get("draft_to_target")
    if draft_to_target is None or "head" in drafter:
        return drafter
    attached = draft_vocab.attach(drafter, draft_to_target, target, config)
    if isinstance(attached["head"], int8.Quantized):
        return attached
    return {**attached, "head": attached["head"].astype(drafter["output_norm"]["weight"].dtype)}


def _without_copy(drafter_config: Any, drafter: Weights, target: Weights) -> tuple[Any, Weights]:
    """The drafter without an embedding or a head of its own that equals the target's, as files of others often hold.

    The target's is the head that `target.lm_head` reads.
    """
    for name, theirs in (("embedding", target["embedding"]), ("head", target.get("head", target["embedding"]))):
        if not getattr(drafter_config, f"has_{name}", False) or isinstance(theirs, int8.Quantized):
            continue
        own = drafter[name]
        if own.shape == theirs.shape and bool(jnp.array_equal(own, theirs.astype(own.dtype))):
            drafter = {key: part for key, part in drafter.items() if key != name}
            drafter_config = dataclasses.replace(drafter_config, **{f"has_{name}": False})
    return drafter_config, drafter


def _narrowed(config: Any, drafter: Weights, mesh: Mesh | None, precision: str) -> Weights:
    """The drafter with its matrices in 8 bits, if the CPU kernels read them and precision is fast.

    A round reads them whole, so it drafts in about half the time. The tau of SmolLM2 and of the bundled pair stays
    within 2 per cent of that with bfloat16. No text depends on it.
    """
    base = config.base if isinstance(config, BothConfig) else config
    if precision != "fast" or mesh is not None or not native.available():
        return drafter
    held, names = Placement(quantize="int8", rounds_rows=True).quantized, method_of(base).products
    weights: dict[Any, Any] = flatten_dict(drafter)
    return unflatten_dict({path: held(weight) if path[-1] in names else weight for path, weight in weights.items()})


def check_loads(folder: Path, params: Params, target: DraftedFor) -> None:
    """Raises the errors of `load` for a drafter of the target of `params`. It reads nothing of the target."""
    config, weights, _ = _load_drafter(folder, target, "bfloat16", Placement(), strict=True)
    jax.eval_shape(lambda own, of_target: _with_head(own, of_target, params.target_config), weights, params.target)
    make_drafter(params.target_config, config, default_tree(config))


def with_drafter(
    params: Params,
    drafter: str | Path | Any,
    strict: bool = False,
    feature_layers: tuple[int, ...] | None = None,
    probe: bool = True,
) -> Params:
    """The same target with another drafter, named as in `load`. The target's weights are shared."""
    take(tuple[FeatureLayer, ...] | None, feature_layers, "feature_layers")
    dtype = params.target["final_norm"]["weight"].dtype if params.dtype in QUANTIZED else jnp.dtype(params.dtype)
    dtype = _drafter_dtype(dtype, params.mesh, params.precision)
    found = _load_drafter(drafter, params.as_owner, dtype, Placement(params.mesh, True), strict, feature_layers)
    params = dataclasses.replace(params, tree=None)  # the tree was for the previous drafter
    weights = _with_head(found.weights, params.target, params.target_config)
    params = _drafted_by(params, *_held_once(found.config, weights, params.target))
    return _tried(params, drafter, found.readings) if probe else params


def _drafted_by(params: Params, config: Any, weights: Weights) -> Params:
    """The same target with this drafter. A pair that was unknown stays so (`Params.fingerprint_pair`)."""
    pair = params.fingerprint_pair and (params.fingerprint_pair[0], drafter_hash(config, weights))
    weights = _narrowed(config, weights, params.mesh, params.precision)
    params = dataclasses.replace(params, drafter=weights, drafter_config=config, fingerprint_pair=pair)
    return place(params, params.mesh)


def restrict(params: Params, draft_to_target: Sequence[int] | np.ndarray | jax.Array) -> Params:
    """The same models with a drafter that drafts only the tokens `draft_to_target`. The decoded text does not change.

    Args:
      draft_to_target: ascending token ids, for example from `train.frequent_tokens.most_frequent`.
    Raises:
      ValueError: without a trained drafter, or for ids that are not ascending or that it cannot draft.
    """
    if params.drafter is None or method_of(params.drafter_config).training is None:
        kinds = ", ".join(kinds_with(lambda method: method.training is not None))
        raise ValueError(f"restrict() needs a drafter that is trained here: {kinds}")
    config, weights = draft_vocab.restrict(params.drafter_config, params.drafter, draft_to_target)
    return _drafted_by(params, config, _with_head(weights, params.target, params.target_config))


def rescore(params: Params, scorer: str | Path, alpha: float = ALPHA) -> Params:
    """The same models with drafts that a scorer helps to choose (methods.md 3.1). The decoded text does not change.

    Args:
      scorer: a folder of `hsd train ngram`; a folder of a hidden-state drafter, whose token information scores; a
        Hugging Face folder, whose model scores; or "0-gram", which takes the likeliest paths by the drafter alone.
      alpha: the weight of the scorer: alpha * log p(scorer) is added to log p(drafter).
    Raises:
      FileNotFoundError, ValueError: if the scorer does not exist or does not suit this target and drafter.
    """
    config, weights = params.drafter_config, params.drafter
    config = config.base if isinstance(config, RescoredConfig) else config
    if not weights or config is None or method_of(config).lattice is None:
        kinds = " or ".join(kinds_with(lambda method: method.lattice is not None))
        raise ValueError(f"rescore() needs a drafter whose states read no drafted token: {kinds}")
    take(NotNegative, alpha, "alpha")
    dtype = weights["output_norm"]["weight"].dtype
    found, own = read_scorer(scorer, params.as_owner, dtype, Placement(params.mesh, True))
    weights = {**weights, "rescorer": {**own, "alpha": jnp.full(1, alpha, jnp.float32)}}
    return _drafted_by(params, RescoredConfig(config, found), weights)


def stack(params: Params, inner: str | Path | Any, length: int | None = None) -> Params:
    """The same models, where a second drafter drafts for the small language model that drafts (methods.md 4.3).

    The decoded text does not change. A repeated call adds a level: `inner` then drafts for the smallest model of the
    stack.

    Args:
      inner: a drafter for that small model, as `drafter` of `load`: a folder of `hsd train drafter --target SMALL`, a
        Hugging Face folder with the same vocabulary, or prompt lookup.
      length: tokens that it drafts per round. None: the depth of its default tree. The tree of a decode bounds the
        tokens that reach the target: the small model stops its rounds when the next one might not fit.
    Raises:
      FileNotFoundError, ValueError: if no small language model drafts, or if `inner` does not suit it.
    """
    take(Count | None, length, "length")

    def stacked(config: Any, weights: Weights) -> tuple[StackConfig, Weights]:
        if config is None or not method_of(config).is_language_model:
            raise ValueError("stack() needs a small language model that drafts")
        model = DraftedFor(config, config.fingerprint, params.tokenizer)
        dtype = jax.tree.leaves(weights["embedding"])[0].dtype
        below, own, _ = _load_drafter(inner, model, dtype, Placement(params.mesh, True), strict=True)
        own = _with_head(own, weights, config)
        depth = default_tree(below).depth if length is None else length
        return StackConfig(config, below, depth), {"middle": weights, "inner": own}

    config, weights = at_bottom(params.drafter_config, params.drafter or {}, stacked)
    make_drafter(params.target_config, config, default_tree(config))  # raises errors before anything compiles
    return _drafted_by(params, config, weights)


def place(params: Params, mesh: Mesh | None, drafter_mesh: Mesh | None = None) -> Params:
    """Puts the weights on one device, or on a mesh by the table of `host/sharding.py`.

    Args:
      drafter_mesh: mesh of a drafter that is to run beside the target (`measure/pearl.py`). None: `mesh`.
    """
    params = dataclasses.replace(arranged(params, mesh, drafter_mesh=drafter_mesh), drafter_mesh=drafter_mesh)
    if mesh is None:
        was_on_mesh = params.mesh is not None
        return dataclasses.replace(jax.device_put(params, jax.devices()[0] if was_on_mesh else None), mesh=None)
    target = sharding_lib.weight_shardings(mesh, params.target, *sharding_lib.heads_of(params.target_config))
    placed = dataclasses.replace(params, target=put(params.target, target), mesh=mesh)
    if params.drafter:
        heads = sharding_lib.heads_of(params.drafter_config)
        drafter = sharding_lib.weight_shardings(drafter_mesh or mesh, params.drafter, *heads)
        placed = dataclasses.replace(placed, drafter=put(params.drafter, drafter))
    return placed


def arranged(params: Params, mesh: Mesh | None, frees: bool = False, drafter_mesh: Mesh | None = None) -> Params:
    """The same weights in the layout that the devices of this process or mesh multiply fastest (`models/packing.py`).

    `frees`: whether the original arrays of weights that change are deleted.
    """
    packs = program.here().platform != "cpu"
    num_shards, of_drafter = (1 if x is None else x.shape.get("model", 1) for x in (mesh, drafter_mesh or mesh))
    target, config = packing.arranged(params.target, params.target_config, num_shards, packs, frees)
    params = dataclasses.replace(params, target=target, target_config=config)
    if not params.drafter:
        return params
    whole = params.drafter_config
    is_on_base = method_of(whole).has_weights_of_base
    reader = whole.base if is_on_base else whole  # the configuration that describes these weights and their heads
    drafter, reader = packing.arranged(params.drafter, reader, of_drafter, packs, frees)
    config = dataclasses.replace(whole, base=reader) if is_on_base else reader
    return dataclasses.replace(params, drafter=drafter, drafter_config=config)
