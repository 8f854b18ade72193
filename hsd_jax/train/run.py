"""Whole training runs: from files to a folder that decodes. What `hsd train` calls.

A run's folder holds `recipe.json`, `metrics.jsonl`, `checkpoints/` and, with a reduced draft vocabulary,
`draft_to_target.json`; the same call continues it where it broke off, another recipe is refused. The result lies in the
folder itself (target) or in `drafter/` below it. Read next: `loop.py` for a step, `drafter.py` and `target.py` for the
losses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hsd_jax.config import SLIDING, DrafterConfig, ModelConfig, TrunkConfig
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.table import init_drafter
from hsd_jax.host import lock, sharding
from hsd_jax.host.distributed import check_mesh, check_same, fetch, wait_for_all
from hsd_jax.host.files import is_writer, replace_folder, write_json
from hsd_jax.models import convert, draft_vocab
from hsd_jax.models.checkpoint import Checkpoint, Source, find, path_of
from hsd_jax.models.hf_config import format_config
from hsd_jax.models.placement import Placement
from hsd_jax.models.target import init_target
from hsd_jax.params import Params
from hsd_jax.planning import simulate
from hsd_jax.tokenizer import TOKENIZER_FILES
from hsd_jax.train import data, distill, drafter, features, frequent_tokens, manifest, target
from hsd_jax.train.curves import draw_curves
from hsd_jax.train.journal import Journal
from hsd_jax.train.loop import Judge, LoopConfig, fit
from hsd_jax.train.rows import beginnings
from hsd_jax.train.tokenizer import train_tokenizer
from hsd_jax.train.trained import begun_with_target, started_from
from hsd_jax.types import Weights

Report = Callable[[str], None]


@manifest.alone(lock.of_folder)
def train_drafter(
    source: Source,
    data_files: Sequence[str | Path],
    out: str | Path,
    recipe: drafter.DrafterRecipe,
    mesh: Mesh | None = None,
    report: Report = print,
    target_dtype: Any = None,
    force: bool = False,
    start_dir: str | Path | None = None,
) -> Path:
    """Trains a drafter of the recipe's kind for a target and writes the best so far to `out/drafter`.

    Args:
      source: the target (`models/checkpoint.py`).
      start_dir: a drafter of the same target to start from; weights of another shape than the recipe's start fresh.
      target_dtype: of the frozen target; None: float32 on CPU, else bfloat16.
      force: continue a run that was begun with another recipe.
    Returns:
      The folder of the drafter.
    Raises:
      FileNotFoundError: if the target, its tokenizer or a data file is missing.
      ValueError: for unreadable data, a recipe that does not fit the target, or an `out` that holds checkpoints of
        another recipe or is being written by another process. Nothing is left of a run that is refused.
      FloatingPointError, OSError: see `loop.fit`.
    """
    check_mesh(mesh)
    out, checkpoint, report = Path(out), find(source), of_writer(report)
    recipe = dataclasses.replace(recipe, train=recipe.train.on_platform())
    train, config = recipe.train, checkpoint.config
    rows = read_rows(data_files, checkpoint, train, recipe.data, config)
    about_rows = rows.describe()
    rows, prompts = hold_out(rows, recipe.eval, train)
    frozen, target_hash = read_frozen(checkpoint, mesh, target_dtype)
    owner = DraftedFor(config, target_hash, checkpoint.tokenizer)
    drafter_config = drafter.drafter_config(recipe.model, config, target_hash, owner.vocabulary_hash)
    if train.length <= drafter_config.num_steps:
        raise ValueError(
            f"train.length={train.length}: must be greater than model.num_steps={drafter_config.num_steps}"
        )
    eos = checkpoint.eos
    is_begun, start = manifest.has_checkpoints(out), None
    about = {"kind": "drafter", "target": drafter_config.target_hash, "files": manifest.fingerprints(data_files)}
    if is_begun and "start" in (claimed := manifest.claimed(out)):
        # Where it once began does not matter any more, nor whether that is still there.
        about["start"] = claimed["start"]
    elif start_dir is not None:
        start_dir = path_of(start_dir)
        start = drafter_files.read_drafter(start_dir)
        drafter_files.check_drafter(start[0], owner)
        about["start"] = manifest.fingerprints([start_dir / drafter_files.DRAFTER_FILE])
    claims = manifest.check(out, force, recipe, **about)
    check_same("recipe, target and data of the run", repr(claims))
    folder = out / "drafter"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; the drafter is to become a folder there")
    params = init_drafter(jax.random.key(train.seed), drafter_config, frozen["embedding"])
    report(about_rows)
    describe(report, "drafter", params, rows, train)
    if recipe.model.trunk_begins == drafter.LAST_LAYER:
        begun = begun_with_target(params, drafter_config, frozen, config, jax.numpy.asarray(rows.tokens[:1, :-1]))
        params = begun.weights
        report(f"the trunk begins as the target's last layer; fresh in it: {', '.join(begun.fresh) or 'nothing'}")
    if isinstance(drafter_config, TrunkConfig):  # others have no attention
        remedy = f"model.window={train.length} keeps drafts on long contexts like those of training"
        say_reach(report, train.length, drafter_config.window, drafter_config.max_position, remedy)
    labels, draft_to_target = rows.tokens[rows.mask], None
    if drafter_config.reduced_vocab_size is not None:
        draft_to_target = frequent_tokens.of_run(out, is_begun, labels, drafter_config, eos, report)
    if start is not None:
        begun = started_from(params, start[1], draft_to_target)
        params = begun.weights
        dropped, fresh = (", ".join(names) or "nothing" for names in (begun.dropped, begun.fresh))
        report(f"starting from {start_dir}; dropped: {dropped}; fresh: {fresh}")
    shardings, place = placement(mesh, train, drafter_config)
    pass_rows = train.batch // train.num_passes
    cached = features.open_features(
        recipe.features,
        rows,
        frozen,
        config,
        drafter_config.target_hash,
        pass_rows,
        report,
        layers=drafter_config.feature_layers,
        likeliest=0 if recipe.loss.sample is None else recipe.loss.likeliest,
    )
    judge, save = None, functools.partial(_save, folder, recipe.model.stored_in, drafter_config, draft_to_target)
    if recipe.eval.every:
        target_params = Params(frozen, None, config, eos=eos, max_len=config.max_position, mesh=mesh)
        judge = _judge(recipe.eval, out, target_params, drafter_config, draft_to_target, prompts, save, report)
    frequency = draft_vocab.draft_columns(draft_to_target, frequent_tokens.smoothed(labels, config.vocab_size))
    of_loss = config, drafter_config, recipe.loss, draft_to_target, train.remat, frequency
    loss, stages = drafter.make_loss(*of_loss), drafter.make_stages(*of_loss)
    with batches_of(rows, train, recipe.data, mesh, cached) as batches, journal_of(out, train, report) as journal:
        note, begin = manifest.note(claims, rows.fingerprint), functools.partial(manifest.write, out, claims)
        params = fit(
            loss, params, frozen, batches, train, out, journal, shardings, place, judge, note, begin, stages=stages
        )
    if judge is None:
        save(params)
    wait_for_all(f"{folder} is written")
    report(f"wrote {folder}")
    return folder


@manifest.alone(lock.of_folder)
def train_target(
    data_files: Sequence[str | Path],
    out: str | Path,
    recipe: target.TargetRecipe,
    mesh: Mesh | None = None,
    report: Report = print,
    tokenizer_dir: str | Path | None = None,
    force: bool = False,
    start_dir: str | Path | None = None,
) -> Path:
    """Trains a target and leaves `out` as a Hugging Face folder with its tokenizer.

    Args:
      tokenizer_dir: with a `tokenizer.json`; None: `start_dir`, else `out`, and a new one learned from the data.
      force: continue a run that was begun with another recipe.
      start_dir: a model to start from, grown to the recipe's layers; a run that is continued needs it too. None: from
        scratch.
    Returns:
      `out`.
    Raises:
      FileNotFoundError: if a data file or the tokenizer is missing.
      ValueError: for unreadable data, a tokenizer larger than the vocabulary, a model that a Hugging Face folder cannot
        describe, a start of another shape than the recipe's, or an `out` that holds checkpoints of another recipe or
        is being written by another process.
      FloatingPointError, OSError: see `loop.fit`.
    """
    check_mesh(mesh)
    out, report = Path(out), of_writer(report)
    recipe = dataclasses.replace(recipe, train=recipe.train.on_platform())
    format_config(recipe.model)  # what cannot be written must not be trained
    check_length(recipe.train, recipe.model)
    tokenizer_dir = start_dir if tokenizer_dir is None else tokenizer_dir
    if tokenizer_dir is None:
        tokenizer_dir = out
        if is_writer() and not all((out / name).is_file() for name in TOKENIZER_FILES[:2]):
            report(f"learning {recipe.vocab_size} tokens")
            train_tokenizer([str(f) for f in data_files], recipe.vocab_size, out)
        wait_for_all("the tokenizer is there")
    words = find(tokenizer_dir)
    tokenizer, bos, eos = data.read_tokenizer(words)
    if tokenizer.get_vocab_size() > recipe.vocab_size:
        raise ValueError(
            f"vocab_size={recipe.vocab_size}: the tokenizer in {words} has {tokenizer.get_vocab_size()} tokens"
        )
    rows = read_rows(data_files, words, recipe.train, recipe.data, recipe.model)
    holder = words.path / TOKENIZER_FILES[0] if words.path.is_dir() else words.path
    about: dict[str, Any] = {"tokenizer": manifest.fingerprints([holder])}
    start = None if start_dir is None else target.grown_from(find(start_dir), recipe.model)
    if start is not None:
        about["start"] = convert.weights_hash(start)
    claims = manifest.check(out, force, recipe, kind="target", **about, files=manifest.fingerprints(data_files))
    check_same("recipe and data of the run", repr(claims))
    params = init_target(jax.random.key(recipe.train.seed), recipe.model) if start is None else start
    report(rows.describe())
    describe(report, "target", params, rows, recipe.train)
    is_sliding = all(recipe.model.layer_type(i) == SLIDING for i in range(recipe.model.num_layers))
    remedy = f"longer rows, or a model.sliding_window={recipe.train.length} in all layers, end that"
    window = recipe.model.sliding_window if is_sliding else None
    say_reach(report, recipe.train.length, window, recipe.model.max_position, remedy)
    shardings, place = placement(mesh, recipe.train, recipe.model)
    loss = target.make_loss(recipe.model, recipe.train.remat)
    with batches_of(rows, recipe.train, recipe.data, mesh) as batches, journal_of(out, recipe.train, report) as journal:
        note, begin = manifest.note(claims, rows.fingerprint), functools.partial(manifest.write, out, claims)
        params = fit(loss, params, None, batches, recipe.train, out, journal, shardings, place, None, note, begin)
    params = jax.tree.map(fetch, params)
    if is_writer():
        words.save_tokenizer(out)
        convert.save_target(out, recipe.model, params, bos=bos, eos=(eos,))
        write_json(out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
    wait_for_all(f"{out} is written")
    report(f"wrote {out}")
    return out


@contextlib.contextmanager
def batches_of(
    rows: data.Rows, train: LoopConfig, config: data.DataConfig, mesh: Mesh | None, cached: Any = None
) -> Iterator[data.Batches]:
    """The part of the batches that lies on the devices of this process."""
    seed = train.seed if config.seed is None else config.seed
    check_same("recipe and data of the run", f"{rows.fingerprint} {train} {config}")
    index, count = sharding.rows_here(mesh)
    part = data.Batches(rows, train.batch, seed, features=cached, process_index=index, process_count=count)
    with contextlib.closing(part) as batches:
        yield batches


@contextlib.contextmanager
def journal_of(out: Path, train: LoopConfig, report: Report) -> Iterator[Journal]:
    """The run's journal; curves are drawn when the run is through."""
    journal = Journal(out, train.steps, report)
    try:
        yield journal
    finally:
        journal.close()
    if not is_writer():
        return
    try:
        report(f"wrote {draw_curves(out)}")
    except ImportError:
        report("no curves.png: pip install 'hsd_jax[train]' for it")


def read_frozen(checkpoint: Checkpoint, mesh: Mesh | None, dtype: Any = None) -> tuple[Weights, str]:
    """The weights of a target that is not trained, and their fingerprint; without `dtype` in float32 on CPU, else
    in bfloat16."""
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return checkpoint.weights(dtype, Placement(mesh)), checkpoint.hash(dtype)


def read_rows(
    files: Sequence[str | Path],
    checkpoint: Checkpoint,
    train: LoopConfig,
    config: data.DataConfig,
    model: ModelConfig,
) -> data.Rows:
    """The rows of a run, none longer than the model allows."""
    check_length(train, model)
    return data.read_rows(files, checkpoint, train.length, train.seed, model.vocab_size, config)


def check_length(train: LoopConfig, model: ModelConfig) -> None:
    """Raises a ValueError if rows are longer than a model has positions."""
    if train.length > model.max_position:
        raise ValueError(f"train.length={train.length}: the model has {model.max_position} positions")


def hold_out(
    rows: data.Rows, config: drafter.EvalConfig | distill.DistillEval, train: LoopConfig
) -> tuple[data.Rows, list[np.ndarray]]:
    """The rows to train on, and the beginnings of the last rows as prompts to judge by."""
    count = config.prompts if config.every else 0
    if len(rows.tokens) < train.batch + (count and count + 1):
        raise ValueError(
            f"{len(rows.tokens)} rows of text: fewer than one batch of {train.batch}"
            + (f" and {count} held-out rows (eval.prompts; eval.every=0 judges nothing)" if count else "")
        )
    if not count:
        return rows, []
    prompts = beginnings(rows, count, min(config.prompt_tokens, train.length))
    used = rows.take(slice(None, -count - 1))  # a document may end in the first held-out row
    return dataclasses.replace(rows, **used), prompts


def _judge(
    config: drafter.EvalConfig,
    out: Path,
    target: Params,
    drafter_config: DrafterConfig,
    draft_to_target: jax.Array | None,
    prompts: list[np.ndarray],
    keep: Callable[[Any, dict[str, Any]], None],
    report: Report,
) -> Judge:
    """Simulated tau on texts the target writes once; `keep(params, judged)` puts away the best drafter so far."""
    frozen, target_config, target_hash = target.target, target.target_config, drafter_config.target_hash
    texts = {}
    for name, temperature in (("greedy", 0.0), ("sampled", config.temperature)):
        settings = config.max_new_tokens, temperature, report
        text = simulate.stored_texts(out, f"held-out-{name}", target, target_hash, prompts, *settings)
        texts[name] = text, temperature
        if draft_to_target is not None:
            report(frequent_tokens.describe(draft_to_target, text.written, f"tokens of the held-out {name} texts"))
    tree = config.tree(drafter_config.num_steps)

    def judged(params: Any) -> dict[str, Any]:
        values = {}
        whole = draft_vocab.attach(params, draft_to_target, frozen, target_config)
        for name, (text, temperature) in texts.items():
            found = simulate.simulate(whole, drafter_config, frozen, target_config, text, tree, temperature)
            values |= found if name == "greedy" else {f"sampled_{k}": v for k, v in found.items()}
        return values

    return Judge(config.every, judged, keep)


def _save(
    folder: Path,
    dtype: str,
    config: DrafterConfig,
    draft_to_target: jax.Array | None,
    params: Any,
    judged: dict[str, Any] | None = None,
) -> None:
    """Puts a drafter, its `draft_to_target` ids and its scores, if there are any, in the place of the one in
    `folder`."""

    params = jax.tree.map(fetch, params)
    if judged is not None:
        config = dataclasses.replace(config, **_profiles(judged))

    def write(new: Path) -> None:
        weights = params if draft_to_target is None else {**params, "draft_to_target": draft_to_target}
        drafter_files.save_drafter(new, config, weights, dtype)
        if judged is not None:
            write_json(new / "judged.json", judged)

    replace_folder(folder, write)


def _profiles(judged: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """What a drafter's file keeps of its scores, for `planning/plan.py`: acceptance by depth of a chain."""
    names = {"profile": "chain_acceptance", "sampled_profile": "sampled_chain_acceptance"}
    return {name: tuple(round(float(x), 3) for x in judged[key]) for name, key in names.items() if key in judged}


def describe(report: Report, kind: str, params: Any, rows: data.Rows, train: LoopConfig) -> None:
    """Says what is trained, and on how much of the data."""
    size = sum(p.size for p in jax.tree.leaves(params))
    seen = train.steps * train.batch / len(rows.tokens)
    report(
        f"{kind} of {size / 1e6:.2f}M parameters, {train.steps} steps of {train.batch} rows: {seen:.2f} times the data"
    )


def say_reach(report: Report, length: int, window: int | None, max_position: int, remedy: str) -> None:
    """Says so if attention will reach further back in decoding than any row of training does."""
    if min(window or max_position, max_position) > length:
        reach = f"attention further back is not trained, contexts may have {max_position}"
        report(f"rows of {length} tokens: {reach}; {remedy}")


def of_writer(report: Report) -> Report:
    """`report`, or in processes that do not write what says nothing."""
    return report if is_writer() else lambda line: None


def placement(mesh: Mesh | None, train: LoopConfig, config: Any) -> tuple[Callable, Callable]:
    """Where the state of `fit` lies on a mesh, and how a batch is split over the axes of rows.

    A process brings the rows that its devices hold.

    Raises:
      ValueError: if a pass has too few rows for the mesh.
    """
    if mesh is None:
        return lambda state: None, lambda batch: batch
    sharding.check_rows(mesh, train.batch // train.num_passes)

    def shardings(state):
        return sharding.weight_shardings(mesh, state, *sharding.heads_of(config))

    def place(batch):
        whole = {name: jax.ShapeDtypeStruct((train.batch, *x.shape[1:]), x.dtype) for name, x in batch.items()}
        places = sharding.row_shardings(mesh, whole, train.batch)
        return {
            name: jax.make_array_from_process_local_data(places[name], x, whole[name].shape)
            for name, x in batch.items()
        }

    return shardings, place
