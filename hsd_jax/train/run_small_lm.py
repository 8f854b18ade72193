"""A whole run that distils a small language model towards its target, steered by it or not. What `hsd train drafter
--kind small_lm` and `--kind steered` call.

The folder is that of any run (`run.py`), with the drafter's own texts in `on_policy/` and the figures before step 1 in
`before.json`. The result in `drafter/` is a Hugging Face folder, as the one it started from, with two files more if it
is steered. Read first: `distill.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from hsd_jax.config import ModelConfig, model_of
from hsd_jax.drafters.small_lm import load_model
from hsd_jax.drafters.small_lm.config import SmallLMConfig
from hsd_jax.drafters.steered.config import SteeredConfig
from hsd_jax.drafters.steered.files import read_steering, read_stored, save_steering
from hsd_jax.drafters.steered.steering import STEERING, init_steering
from hsd_jax.host import lock
from hsd_jax.host.distributed import check_same, fetch, wait_for_all
from hsd_jax.host.files import is_writer, read_json, replace_folder, write_json
from hsd_jax.models import convert
from hsd_jax.models.checkpoint import Checkpoint, Source, find
from hsd_jax.models.hf_config import format_config
from hsd_jax.models.placement import Placement
from hsd_jax.params import Params
from hsd_jax.planning import simulate
from hsd_jax.train import data, distill, manifest, run
from hsd_jax.train.loop import Judge, LoopConfig, fit
from hsd_jax.train.own_text import MixedBatches
from hsd_jax.types import Weights

BEFORE = "before.json"


@manifest.alone(lock.of_folder)
def train_small_lm(
    source: Source,
    data_files: Sequence[str | Path],
    out: str | Path,
    recipe: distill.DistillRecipe,
    mesh: Mesh | None = None,
    report: run.Report = print,
    force: bool = False,
    start_dir: str | Path | None = None,
) -> Path:
    """Distils the model in `start_dir` towards the target and writes the best so far to `out/drafter`.

    Args:
      source: the target (`models/checkpoint.py`).
      start_dir: a language model of the target's vocabulary, named as a target is. A run that is continued needs it,
        too.
      force: continue a run that was begun with another recipe.
    Returns:
      The folder of the drafter, which `--drafter` takes.
    Raises:
      FileNotFoundError: if one of the models, the tokenizer or a data file is missing.
      ValueError: before step 1: without `start_dir`, for a start of another vocabulary or too few positions, on-policy
        text on a mesh, a temperature or share outside its bounds, and as `run.train_drafter`.
      FloatingPointError, OSError: see `loop.fit`.
    """
    out, checkpoint, report, kind = Path(out), find(source), run.of_writer(report), recipe.model.kind
    if start_dir is None:
        raise ValueError(f"--kind {kind}: needs --start, the pretrained model to distil")
    recipe = dataclasses.replace(recipe, train=recipe.train.on_platform())
    train = recipe.train
    if recipe.on_policy.share and (mesh is not None or jax.process_count() > 1):
        raise ValueError(
            f"on_policy.share={recipe.on_policy.share:g}: the drafter writes its text on one device; leave out --mesh"
        )
    target_config, start = checkpoint.config, find(start_dir)
    config, weights = load_model(start, target_config, checkpoint.tokenizer, "float32", Placement(mesh))
    format_config(config)  # what cannot be written must not be trained
    run.check_length(train, config)
    rows = run.read_rows(data_files, checkpoint, train, recipe.data, target_config)
    about_rows = rows.describe()
    rows, prompts = run.hold_out(rows, recipe.eval, train)
    taught, target_hash = run.read_frozen(checkpoint, mesh)
    config = recipe.model.config_of(config, target_config, target_hash)
    params, kept = to_learn(recipe, config, weights, start.path)
    frozen = {"target": taught, "drafter": kept}
    about = {"target": target_hash, "start": start.hash("float32")}
    about |= {"files": manifest.fingerprints(data_files)}
    if manifest.has_checkpoints(out) and force:
        was_frozen = manifest.claimed(out).get("model", {}).get("frozen", recipe.model.frozen)
        if was_frozen != recipe.model.frozen:
            raise ValueError(
                f"{out} holds a run with model.frozen={was_frozen}, whose checkpoints have other weights than one with"
                f" {recipe.model.frozen}: choose another folder"
            )
    claims = manifest.check(out, force, recipe, kind=kind, **about)
    check_same("recipe, target and data of the run", repr(claims))
    report(about_rows)
    run.describe(report, f"{kind} from {start}", params, rows, train)
    shardings, place = run.placement(mesh, train, config)
    eos, folder = checkpoint.eos, out / "drafter"

    def keep(learned: Weights, judged: dict[str, Any] | None = None) -> None:
        _save(folder, start if start.tokenizer else checkpoint, config, kept | learned, judged)

    judge = None
    if recipe.eval.every:
        target = Params(taught, None, target_config, eos=eos, max_len=target_config.max_position, mesh=mesh)
        judged = _judged(recipe, out, target, target_hash, config, kept, prompts, report)
        judge = Judge(recipe.eval.every, judged, keep)
        if not manifest.has_checkpoints(out):
            before = judged(params)
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / BEFORE, before)
            report(f"before: {_line(before)}")
    loss = distill.make_loss(target_config, config, recipe.loss, train.remat)
    note, begin = manifest.note(claims, rows.fingerprint), functools.partial(manifest.write, out, claims)
    with _batches(rows, recipe, mesh, config, eos, out) as (batches, refresh), run.journal_of(out, train, report) as j:
        params = fit(loss, params, frozen, batches, train, out, j, shardings, place, judge, note, begin, refresh)
    if judge is None:
        keep(params)
    elif is_writer():
        report(f"before: {_line(read_json(out / BEFORE))}")
        report(f"after:  {_line(read_json(folder / 'judged.json'))}")
    wait_for_all(f"{folder} is written")
    report(f"wrote {folder}")
    return folder


def to_learn(
    recipe: distill.DistillRecipe, config: ModelConfig, model: Weights, start: Path
) -> tuple[Weights, Weights]:
    """The weights that the run changes, and those that it does not, both the drafter's.

    Raises:
      ValueError: if the model in `start` is steered already, and not as it is to be.
    """
    stored = read_stored(start)
    if not isinstance(config, SteeredConfig):
        if stored is not None:
            raise ValueError(f"--start {start}: is steered; give --kind steered, or the model that it was trained from")
        return model, {}
    if stored is None:
        fresh = {STEERING: init_steering(jax.random.key(recipe.train.seed), config)}
    else:
        for name in ("target_hash", "steering_layers"):
            if getattr(stored, name) != getattr(config, name):
                raise ValueError(
                    f"--start {start}: steered with {name}={getattr(stored, name)!r}; this run has"
                    f" {getattr(config, name)!r}"
                )
        fresh = {STEERING: read_steering(start, config)}
    return (fresh, model) if recipe.model.frozen else (model | fresh, {})


@contextlib.contextmanager
def _batches(
    rows: data.Rows, recipe: distill.DistillRecipe, mesh: Mesh | None, config: ModelConfig, eos: Any, out: Path
):
    """The stream of batches, and what is to be called before each step."""
    train: LoopConfig = recipe.train
    if not recipe.on_policy.num_rows(train):
        with run.batches_of(rows, train, recipe.data, mesh) as batches:
            yield batches, lambda step, weights: None
        return
    seed = train.seed if recipe.data.seed is None else recipe.data.seed
    with contextlib.closing(MixedBatches(rows, train, seed, recipe.on_policy, config, eos, out)) as batches:
        yield batches, batches.refresh


def _judged(
    recipe: distill.DistillRecipe,
    out: Path,
    target: Params,
    target_hash: str,
    config: ModelConfig,
    kept: Weights,
    prompts: Sequence[Any],
    report: run.Report,
) -> Callable[[Weights], dict[str, Any]]:
    """Held-out divergences on texts the target writes once, and real decodes of the same prompts."""
    asked = recipe.eval
    texts = simulate.stored_texts(
        out, "held-out-sampled", target, target_hash, prompts, asked.max_new_tokens, asked.temperature, report
    )
    measure = distill.held_out(target.target_config, config, recipe.loss, texts, asked.temperature)
    own = config if isinstance(config, SteeredConfig) else SmallLMConfig(**vars(config))

    def judged(learned: Weights) -> dict[str, Any]:
        weights = kept | learned
        pair = dataclasses.replace(target, drafter=weights, drafter_config=own)
        return distill.decoded(pair, prompts, asked) | measure(weights, target.target)

    return judged


def _save(
    folder: Path, words: Checkpoint, config: ModelConfig, params: Any, judged: dict[str, Any] | None = None
) -> None:
    """Puts the model, the tokenizer of `words` and its figures, if there are any, in the place of those in `folder`."""
    params = jax.tree.map(fetch, params)

    def write(new: Path) -> None:
        weights = {name: part for name, part in params.items() if name != STEERING}
        if isinstance(config, SteeredConfig):
            save_steering(new, config, params[STEERING])
        convert.save_target(new, model_of(config), weights, bos=words.bos, eos=words.named_eos)
        words.save_tokenizer(new)
        if judged is not None:
            write_json(new / "judged.json", judged)

    replace_folder(folder, write)


def _line(values: dict[str, Any]) -> str:
    """Figures in a line; acceptance by depth as a list."""
    return ", ".join(
        f"{name} {' '.join(f'{x:.2f}' for x in value)}" if isinstance(value, list) else f"{name} {value:.3f}"
        for name, value in values.items()
    )
