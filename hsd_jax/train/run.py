"""Whole training runs: from files to a folder that decodes. What `hsd train` calls.

A run's folder holds `recipe.json`, `metrics.jsonl` and `checkpoints/`; the same call continues it where it broke off,
another recipe is refused. The result lies in the folder itself (target) or in `drafter/` below it. Read next:
`loop.py` for a step, `drafter.py` and `target.py` for the losses.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from hsd_jax import sharding
from hsd_jax.checkpoint import write_json
from hsd_jax.config import ModelConfig, to_dict
from hsd_jax.models import convert
from hsd_jax.models.hidden import init_drafter
from hsd_jax.models.target import init_target
from hsd_jax.train import data, drafter, target
from hsd_jax.train.loop import LoopConfig, fit
from hsd_jax.train.tokenizer import train_tokenizer

RECIPE = "recipe.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
Report = Callable[[str], None]


def train_drafter(
    target_dir: str | Path,
    data_files: Sequence[str | Path],
    out: str | Path,
    recipe: drafter.DrafterRecipe,
    mesh: Mesh | None = None,
    report: Report = print,
    target_dtype: Any = None,
) -> Path:
    """Trains a hidden-state drafter for the target in `target_dir` and writes it to `out/drafter`.

    Args:
      target_dtype: of the frozen target; None: float32 on CPU, else bfloat16.
    Returns:
      The folder of the drafter.
    Raises:
      FileNotFoundError: if the target, its tokenizer or a data file is missing.
      ValueError: for unreadable data, a recipe that does not fit the target, or an `out` with another recipe.
    """
    out, target_dir = Path(out), Path(target_dir)
    config = convert.read_config(target_dir)
    tokenizer, bos, eos = _read_tokenizer(target_dir)
    rows = _read_rows(data_files, tokenizer, bos, eos, recipe.train, config)
    if target_dtype is None:
        target_dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    frozen = convert.read_weights(target_dir, config, target_dtype)
    drafter_config = drafter.drafter_config(recipe.model, config, convert.weights_hash(frozen))
    if recipe.train.length <= drafter_config.num_steps:
        raise ValueError(
            f"train.length={recipe.train.length}: must be greater than model.num_steps={drafter_config.num_steps}"
        )
    _claim(
        out,
        {
            "kind": "drafter",
            "target": drafter_config.target_hash,
            "data": _fingerprints(data_files),
            **to_dict(recipe),
        },
    )
    params = init_drafter(jax.random.key(recipe.train.seed), drafter_config)
    _describe(report, "drafter", params, rows, recipe.train)
    shardings, batches = _placement(mesh, rows, recipe.train, drafter_config)
    if mesh is not None:
        frozen = jax.device_put(frozen, sharding.weight_shardings(mesh, frozen, config.num_heads, config.num_kv_heads))
    loss = drafter.make_loss(config, drafter_config, recipe.loss)
    params = fit(loss, params, frozen, batches, recipe.train, out, report, shardings)
    folder = out / "drafter"
    convert.save_drafter(folder, drafter_config, params)
    report(f"wrote {folder}")
    return folder


def train_target(
    data_files: Sequence[str | Path],
    out: str | Path,
    recipe: target.TargetRecipe,
    mesh: Mesh | None = None,
    report: Report = print,
    tokenizer_dir: str | Path | None = None,
) -> Path:
    """Trains a target from scratch and leaves `out` as a Hugging Face folder with its tokenizer.

    Args:
      tokenizer_dir: a folder with a `tokenizer.json`; None: the one in `out`, or a new one learned from the data.
    Returns:
      `out`.
    Raises:
      FileNotFoundError: if a data file or the tokenizer is missing.
      ValueError: for unreadable data, a tokenizer larger than the vocabulary, or an `out` with another recipe.
    """
    out = Path(out)
    if tokenizer_dir is None:
        tokenizer_dir = out
        if not all((out / name).is_file() for name in TOKENIZER_FILES[:2]):
            report(f"learning {recipe.vocab_size} tokens")
            train_tokenizer([str(f) for f in data_files], recipe.vocab_size, out)
    tokenizer_dir = Path(tokenizer_dir)
    tokenizer, bos, eos = _read_tokenizer(tokenizer_dir)
    if tokenizer.get_vocab_size() > recipe.vocab_size:
        raise ValueError(
            f"vocab_size={recipe.vocab_size}: the tokenizer in {tokenizer_dir} has {tokenizer.get_vocab_size()} tokens"
        )
    rows = _read_rows(data_files, tokenizer, bos, eos, recipe.train, recipe.model)
    tokenizer_print = _fingerprints([tokenizer_dir / "tokenizer.json"])
    _claim(
        out,
        {"kind": "target", "tokenizer": tokenizer_print, "data": _fingerprints(data_files), **to_dict(recipe)},
    )
    params = init_target(jax.random.key(recipe.train.seed), recipe.model)
    _describe(report, "target", params, rows, recipe.train)
    shardings, batches = _placement(mesh, rows, recipe.train, recipe.model)
    params = fit(target.make_loss(recipe.model), params, None, batches, recipe.train, out, report, shardings)
    for name in TOKENIZER_FILES:
        if tokenizer_dir.resolve() != out.resolve() and (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, out / name)
    convert.save_target(out, recipe.model, params, bos=bos, eos=(eos,))
    write_json(out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
    report(f"wrote {out}")
    return out


def _read_tokenizer(folder: Path) -> tuple[Tokenizer, int | None, int]:
    """The tokenizer of a folder, the token it puts before a text (None if it puts none), and the end token."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: training needs the target's tokenizer in this form")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: not a tokenizer ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eos = convert.read_eos(folder, tokenizer)
    if not eos:
        raise ValueError(f"{folder}: names no end token; set eos_token_id in config.json")
    bos = convert.read_bos(folder, tokenizer)
    starts = tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos]
    return tokenizer, bos if starts else None, eos[0]


def _read_rows(
    files: Sequence[str | Path], tokenizer: Tokenizer, bos: int | None, eos: int, train: LoopConfig, model: ModelConfig
) -> np.ndarray:
    if not files:
        raise ValueError("no data files given")
    if train.length > model.max_position:
        raise ValueError(f"train.length={train.length}: the model has {model.max_position} positions")
    documents = [document for file in files for document in data.read_documents(file)]
    rows = data.pack(documents, tokenizer, train.length, bos, eos, train.seed)
    if rows.max() >= model.vocab_size:
        raise ValueError(f"the tokenizer writes token {rows.max()}; the model has {model.vocab_size} tokens")
    next(data.batches(rows, train.batch, train.seed))  # too few rows must show before anything compiles
    return rows


def _fingerprints(files: Sequence[str | Path]) -> list[str]:
    """Name and content of each file, so that a folder may move but its data may not change."""
    return [f"{Path(f).name} {hashlib.sha256(Path(f).read_bytes()).hexdigest()[:16]}" for f in files]


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {name: value}
    return {k: v for key, part in items for k, v in _flatten(part, f"{name}.{key}" if name else str(key)).items()}


def _claim(out: Path, values: dict[str, Any]) -> None:
    """Writes `recipe.json` into `out`, or checks that the one there is the same.

    Raises:
      ValueError: naming the first key that differs.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / RECIPE
    values = json.loads(json.dumps(values))
    if not path.is_file():
        write_json(path, values)
        return
    try:
        there = _flatten(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); choose another folder") from error
    here = _flatten(values)
    for key in [*here, *there]:
        if key not in here or key not in there or here[key] != there[key]:
            raise ValueError(
                f"{out} holds a run with another recipe: {key} is {there.get(key, 'missing')!r} there and"
                f" {here.get(key, 'missing')!r} here; choose another folder, or the same recipe to continue"
            )


def _describe(report: Report, kind: str, params: Any, rows: np.ndarray, train: LoopConfig) -> None:
    size = sum(p.size for p in jax.tree.leaves(params))
    seen = train.steps * train.batch / len(rows)
    report(
        f"{kind} of {size / 1e6:.2f}M parameters; {len(rows)} rows of {train.length} tokens, seen {seen:.2f} times in"
        f" {train.steps} steps of {train.batch}"
    )


def _placement(mesh: Mesh | None, rows: np.ndarray, train: LoopConfig, config: Any) -> tuple[Callable, Callable]:
    """Where the state of `fit` lies on a mesh, and the batches of every step, split over the mesh's data axis.

    Raises:
      ValueError: if a pass has too few rows for the mesh.
    """

    def batches(start: int):
        return data.batches(rows, train.batch, train.seed, start)

    if mesh is None:
        return lambda state: None, batches
    per_pass, multiple = train.batch // train.num_passes, sharding.rows_multiple(mesh)
    if per_pass % multiple:
        raise ValueError(f"a pass has {per_pass} rows; mesh axis data={multiple} needs a multiple (train.micro_batch)")

    def shardings(state):
        return sharding.weight_shardings(mesh, state, config.num_heads, config.num_kv_heads)

    def placed(start: int):
        for batch in batches(start):
            yield jax.device_put(jnp.asarray(batch), sharding.row_shardings(mesh, batch, len(batch)))

    return shardings, placed
