"""A training run, from data files to the folder of a model. `hsd train` calls it for every kind of model.

The folder of a run holds `recipe.json`, `metrics.jsonl`, `checkpoints/`, the held-out texts and, with a reduced draft
vocabulary, `draft_to_target.json`. Distillation adds `before.json` and `on_policy/`. The same call continues an
interrupted run. It refuses to continue with another recipe. A target is written into the folder itself, a drafter into
`drafter/` below it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hsd_jax import validation
from hsd_jax.host import lock, sharding
from hsd_jax.host.distributed import check_mesh, check_same, of_first, wait_for_all
from hsd_jax.host.files import is_writer
from hsd_jax.host.jax_settings import check_jax_settings
from hsd_jax.models.checkpoint import Source
from hsd_jax.train import data, manifest
from hsd_jax.train.distill import DISTILLED, DistillRecipe
from hsd_jax.train.drafter import TRAINED, DrafterRecipe
from hsd_jax.train.journal import Journal, Report
from hsd_jax.train.loop import Evaluator, LoopConfig, fit
from hsd_jax.train.pretrain import TargetRecipe
from hsd_jax.train.recipe import HeldOut
from hsd_jax.train.rows import beginnings
from hsd_jax.train.tasks import TASKS

AnyRecipe = TargetRecipe | DrafterRecipe | DistillRecipe
DRAFTERS = (*TRAINED, *DISTILLED)
"""The kinds of drafters that are trained."""


def train(
    source: Source | None,
    data_files: Sequence[str | Path],
    out: str | Path,
    recipe: AnyRecipe,
    mesh: Mesh | None = None,
    report: Report = print,
    force: bool = False,
    start_dir: str | Path | None = None,
    skip_bad_lines: bool = False,
    stop_at: float | None = None,
) -> Path:
    """Trains what the recipe describes. If weights are evaluated during the training, the best ones are kept.

    At the end a drafter is loaded as `hsd_jax.load` does it, so that the run cannot end with one that does not load.

    Args:
      source: for a drafter its target; for a target the checkpoint with its tokenizer (None: see `tasks.TargetTask`).
      force: continue a run that was started with another recipe.
      start_dir: the model to start from, see the tasks. A continued run needs it, too.
      skip_bad_lines: leave out and report records that cannot be used. A continued run needs it, too.
      stop_at: a time of `time.perf_counter` at which the run ends, if its steps have not ended before (`loop.fit`).
    Returns:
      The folder of the result: `out` for a target, `out/drafter` for a drafter.
    Raises:
      FileNotFoundError: if a model, a tokenizer or a data file is missing.
      ValueError: if data cannot be read, if the recipe does not fit data or models, if the start has another shape or
        vocabulary, or if `out` holds checkpoints of another recipe or another process is writing it. A refused run
        leaves no files.
      FloatingPointError, OSError: see `loop.fit`.
    """
    check_jax_settings()
    check_mesh(mesh)
    if stop_at is not None and jax.process_count() > 1:
        raise ValueError("stop_at: the clocks of several processes differ; end the run by train.steps")
    out, report = Path(out), report if is_writer() else lambda line: None
    skip = report if skip_bad_lines else None
    recipe = dataclasses.replace(recipe, train=recipe.train.on_platform())
    loop = recipe.train
    if mesh is not None:
        sharding.check_rows(mesh, loop.batch // loop.num_passes)
    asked: HeldOut | None = getattr(recipe, "eval", None)  # a target is evaluated by its loss only
    with lock.held(out) if is_writer() else contextlib.nullcontext(), contextlib.ExitStack() as unless_begun:
        task = TASKS[type(recipe)](recipe, out, source, start_dir, mesh, report)
        unless_begun.callback(task.undo)
        check_result(out, task.folder, start_dir)
        words = task.read_words(data_files, skip)
        found = data.read_rows(data_files, words, loop.length, loop.seed, task.reads.vocab_size, recipe.data, skip)
        rows, prompts = hold_out(found, asked, loop)
        about = {"kind": task.kind, **task.open(), "files": manifest.fingerprints(data_files)}
        claims = manifest.check(out, force, recipe, **about)
        check_same("recipe, models and data of the run", repr((claims, rows.fingerprint)))
        report(found.describe())
        model = task.begin(rows)
        size, seen = sum(p.size for p in jax.tree.leaves(model.params)) / 1e6, loop.steps * loop.batch
        what = f"{task.kind} of {size:.2f}M parameters, {loop.steps} steps of {loop.batch} rows"
        report(f"{what}: {seen / len(rows.tokens):.2f} times the data")
        evaluator = None
        if asked is not None and asked.every:
            evaluator = Evaluator(asked.every, task.scores(prompts), task.save)
        journal = Journal(out, loop.steps, loop.batch * loop.length, report, claims)
        unless_begun.pop_all()
        params = fit(model, task.batches(rows), loop, journal, evaluator, mesh, stop_at)
        if evaluator is None or not of_first(task.folder.exists()):
            task.save(params)
        wait_for_all(f"{task.folder} is written")
        task.close()
        report(f"wrote {task.folder}")
        return task.folder


def check_result(out: Path, folder: Path, start_dir: str | Path | None) -> None:
    """Raises a ValueError if the run would replace what no run in `out` has written, or the model that it starts
    from."""
    there = out / "config.json" if folder == out else folder
    if there.exists() and not (out / manifest.RECIPE).is_file():
        raise ValueError(f"{there}: exists, and no run in {out} has written it; choose another folder for the run")
    is_start = start_dir is not None and Path(start_dir).resolve() == folder.resolve()
    if is_start and not manifest.has_checkpoints(out):
        raise ValueError(f"{start_dir}: the run would replace the model that it starts from; choose another folder")


def recipe_of(kind: str, model_kind: Any = None) -> type[AnyRecipe]:
    """The recipe class of `hsd train target` or `hsd train drafter`, given `model.kind`."""
    if kind == "target":
        return TargetRecipe
    if isinstance(model_kind, str) and model_kind not in DRAFTERS:
        raise ValueError(f"model.kind={validation.shown(model_kind)}: allowed are {', '.join(DRAFTERS)}")
    return DistillRecipe if model_kind in DISTILLED else DrafterRecipe


def hold_out(rows: data.Rows, config: HeldOut | None, train: LoopConfig) -> tuple[data.Rows, list[np.ndarray]]:
    """The rows to train on, and the beginnings of the held-out last rows, which are the prompts of the evaluation."""
    count = config.prompts if config is not None and config.every else 0
    if len(rows.tokens) < train.batch + (count and count + 1):
        held_out = f" and {count} held-out rows (eval.prompts)" if count else ""
        raise ValueError(f"{len(rows.tokens)} rows of text: fewer than one batch of {train.batch}{held_out}")
    if config is None or not count:
        return rows, []
    most = min(config.prompt_tokens, train.length)
    found = beginnings(rows.take(slice(-count, None)), most)
    # A shorter one is a whole document, whose last token ends it: the target continues its first half.
    prompts = [prompt if len(prompt) == most else prompt[: max(len(prompt) // 2, 2)] for prompt in found]
    used = rows.take(slice(None, -count - 1))  # a document may end in the first held-out row
    return dataclasses.replace(rows, **used), prompts
