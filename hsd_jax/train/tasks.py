"""The tasks of a training run: one class for each kind of recipe, with all that differs between kinds of models.

`train` (`run.py`) makes the same steps for every task. Before `begin` no file is written but a new target's tokenizer,
so that a refused run leaves none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hsd_jax.config import TrunkConfig, model_of
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.method import DraftedFor
from hsd_jax.drafters.table import init_drafter, load_foreign
from hsd_jax.host.distributed import fetch, wait_for_all
from hsd_jax.host.files import is_writer, read_json, replace_folder, write_json
from hsd_jax.host.sharding import rows_here
from hsd_jax.measure import simulate
from hsd_jax.measure import texts as texts_lib
from hsd_jax.models import convert, draft_vocab
from hsd_jax.models.checkpoint import Checkpoint, Source, find
from hsd_jax.models.hf_config import format_config
from hsd_jax.models.placement import Placement
from hsd_jax.models.target import init_target
from hsd_jax.models.tensor_files import weights_file
from hsd_jax.pair import Params, check_loads
from hsd_jax.tokenizer import OLDER_FILES, TOKENIZER_FILES
from hsd_jax.train import data, distill, drafter, frequent_tokens, manifest, pretrain
from hsd_jax.train import features as features_lib
from hsd_jax.train.journal import Report, line_of
from hsd_jax.train.loop import Model
from hsd_jax.train.own_text import MixedBatches
from hsd_jax.train.tokenizer import train_tokenizer
from hsd_jax.train.trained import begun_with_target, started_from
from hsd_jax.types import Weights

BEFORE, JUDGED = "before.json", "judged.json"
Evaluate = Callable[[Weights], dict[str, Any]]


@dataclasses.dataclass
class Task:
    """A run as its kind of model sees it. Each kind is a subclass, which also has:

    kind: the kind of the run, in `recipe.json`;
    reads: the configuration of the model whose vocabulary limits the rows;
    folder: the folder of the result;
    read_words(files, skip): the checkpoint whose tokenizer encodes the rows;
    open(): reads the models. Returns what identifies this run besides recipe and data;
    begin(rows): returns the `loop.Model` that `fit` trains;
    scores(prompts): returns the function that evaluates weights;
    save(params, evaluation): replaces the result and, if there is an evaluation, its scores.
    """

    recipe: Any
    out: Path
    source: Source | None
    start_dir: str | Path | None
    mesh: Mesh | None
    report: Report

    def __post_init__(self):
        """Sets what is known before files are read, and raises errors that can be found then."""

    def undo(self) -> None:
        """Removes what a run wrote that is refused before it begins."""

    def batches(self, rows: data.Rows, features: Any = None) -> data.Batches:
        """The part of the run's batches that is on the devices of this process."""
        train, part = self.recipe.train, rows_here(self.mesh)
        return data.Batches(rows, train.batch, self.recipe.data.seed_of(train.seed), part, features)

    def close(self) -> None:
        """Raises an error if the result cannot be used, and reports final figures."""


class TargetTask(Task):
    """Trains a target, from scratch or grown from the model in `start_dir`."""

    kind = "target"

    def __post_init__(self):
        self.folder, self.reads, self.has_trained = self.out, self.recipe.model, False

    def undo(self) -> None:
        if self.has_trained:
            for name in TOKENIZER_FILES[:2]:
                (self.out / name).unlink(missing_ok=True)

    def read_words(self, files: Sequence[str | Path], skip: Report | None) -> Checkpoint:
        """The tokenizer is that of `source`, else of `start_dir`, else of `out`. If `out` has none, it is trained."""
        vocab_size, source = self.recipe.vocab_size, self.start_dir if self.source is None else self.source
        if source is None:
            source = self.out
            if is_writer() and not (self.out / TOKENIZER_FILES[0]).is_file():
                self.report(f"training a tokenizer of {vocab_size} tokens")
                self.has_trained = True
                train_tokenizer(files, vocab_size, self.out, skip)
            wait_for_all("the tokenizer is there")
        self.words = find(source, weights=False)
        tokenizer, self.bos, self.eos = data.read_tokenizer(self.words)
        if (size := tokenizer.get_vocab_size()) > vocab_size:
            raise ValueError(f"vocab_size={vocab_size}: the tokenizer in {self.words} has {size} tokens")
        self.report(f"tokenizer of {size} tokens in {self.words}")
        return self.words

    def open(self) -> dict[str, Any]:
        path = self.words.path
        names = [name for name in (TOKENIZER_FILES[0], *OLDER_FILES) if (path / name).is_file()]
        files = [path / names[0] if path.is_dir() else path]
        about: dict[str, Any] = {"tokenizer": manifest.fingerprints(files)}
        self.start = None if self.start_dir is None else pretrain.grown_from(find(self.start_dir), self.reads)
        return about if self.start is None else about | {"start": convert.weights_hash(self.start)}

    def begin(self, rows: data.Rows) -> Model:
        train, config = self.recipe.train, self.reads
        params = init_target(jax.random.key(train.seed), config) if self.start is None else self.start
        return Model(config, params, [(train.steps, pretrain.make_loss(config, train.remat))])

    def save(self, params: Weights, evaluation: dict[str, Any] | None = None) -> None:
        """Writes a Hugging Face folder with its tokenizer, beside the checkpoints."""
        params, bos, eos = jax.tree.map(fetch, params), self.bos, self.eos
        if is_writer():
            self.words.save_tokenizer(self.out)
            convert.save_target(self.out, self.reads, params, bos=bos, eos=(eos,))
            write_json(self.out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})


class TaughtTask(Task):
    """Trains a drafter on the frozen target of `source`. `open` sets `config`, the drafter's configuration."""

    kind = "drafter"
    config: Any

    def __post_init__(self):
        assert self.source is not None, "a drafter has a target"
        self.words, self.folder = find(self.source), self.out / "drafter"
        self.reads, self.kept = self.words.config, {}  # `kept`: weights of the drafter that are not trained
        self.recipe.train.check_length(self.reads)
        asked, most = self.recipe.eval, self.reads.max_position
        if asked.every and asked.prompt_tokens + asked.max_new_tokens > most:
            what = f"with eval.prompt_tokens={asked.prompt_tokens} more than the target's {most} positions"
            raise ValueError(f"eval.max_new_tokens={asked.max_new_tokens}: {what}")

    def read_words(self, files: Sequence[str | Path], skip: Report | None) -> Checkpoint:
        """The target."""
        return self.words

    def read_target(self) -> DraftedFor:
        """Reads the target and sets `teacher`. Its weights are in float32 on CPU, else in bfloat16."""
        dtype, words = "float32" if jax.default_backend() == "cpu" else "bfloat16", self.words
        weights, rest = words.weights(dtype, Placement(self.mesh)), {"eos": words.eos, "mesh": self.mesh}
        self.teacher = Params(weights, None, self.reads, max_len=self.reads.max_position, **rest)
        self.owner = DraftedFor(self.reads, words.hash(dtype), words.tokenizer)
        return self.owner

    def texts(self, name: str, prompts: list[np.ndarray], temperature: float) -> texts_lib.Texts:
        """The target's texts after the prompts. They are written once per run."""
        settings = prompts, self.recipe.eval.max_new_tokens, temperature, self.report
        return texts_lib.stored_texts(self.out, f"held-out-{name}", self.teacher, self.owner.hash, *settings)

    def batches(self, rows: data.Rows, features: Any = None) -> data.Batches:
        """Batches with the target's states from a cache, if the recipe names one; it is built first."""
        recipe, config, loss = self.recipe, self.config, self.recipe.loss
        likeliest = loss.likeliest if getattr(loss, "sample", None) else 0
        how = self.owner.hash, recipe.train.batch // recipe.train.num_passes, self.report
        cache = features_lib.open_features(recipe.features, rows, self.teacher, *how, config.feature_layers, likeliest)
        return super().batches(rows, cache)

    def save(self, params: Weights, evaluation: dict[str, Any] | None = None) -> None:
        """Replaces the folder of the result by one with the weights and the scores of `evaluation`."""
        params = jax.tree.map(fetch, self.kept | params)

        def write(new: Path) -> None:
            self.write(new, params, evaluation or {})
            if evaluation is not None:
                write_json(new / JUDGED, evaluation)

        replace_folder(self.folder, write)

    def write(self, new: Path, params: Weights, evaluation: dict[str, Any]) -> None:
        """Writes the files of the result into a new folder."""
        raise NotImplementedError

    def close(self) -> None:
        """Loads the drafter as `hsd_jax.load` does."""
        if is_writer():
            check_loads(self.folder, self.teacher, self.owner)


class DrafterTask(TaughtTask):
    """Trains a drafter that reads the target's states. `start_dir` holds a drafter of the same target to start from."""

    def open(self) -> dict[str, Any]:
        train, owner, model = self.recipe.train, self.read_target(), self.recipe.model
        self.config = config = drafter.drafter_config(model, self.reads, owner.hash, owner.vocabulary_hash)
        if train.length <= config.num_steps:
            raise ValueError(f"train.length={train.length}: must be greater than model.num_steps={config.num_steps}")
        drafter.check_loss(self.reads, config, self.recipe.loss)
        if isinstance(config, TrunkConfig):  # other drafters have no attention
            most = config.max_position
            if min(config.window or most, most) > train.length:
                reach = f"attention further back is not trained, and contexts may have {most} (see model.window)"
                self.report(f"rows of {train.length} tokens: {reach}")
        about: dict[str, Any] = {"target": owner.hash}
        self.start = None
        if self.start_dir is not None:
            self.start_dir = find(self.start_dir).path
            self.start = drafter_files.read_drafter(self.start_dir, target=owner)[1]
            about["start"] = manifest.fingerprints([weights_file(self.start_dir, drafter_files.DRAFTER)])
        return about

    def begin(self, rows: data.Rows) -> Model:
        train, labels, target = self.recipe.train, rows.tokens[rows.mask], self.teacher.target
        self.hot = self._hot_tokens(labels)
        frequency = draft_vocab.draft_columns(self.hot, frequent_tokens.smoothed(labels, self.reads.vocab_size))
        of_loss = self.reads, self.config, self.recipe.loss, self.hot, train.remat, frequency
        losses = [*drafter.make_stages(*of_loss), (train.steps, drafter.make_loss(*of_loss))]
        weights = self._first_weights(rows)
        if self.hot is not None and not manifest.has_checkpoints(self.out):
            frequent_tokens.keep(self.out, self.hot)  # after all that may refuse the run
        return Model(self.config, weights, losses, target)

    def _hot_tokens(self, labels: np.ndarray) -> jax.Array | None:
        if self.config.reduced_vocab_size is None:
            return None
        known = None if self.start is None else self.start.get("draft_to_target")
        is_begun = manifest.has_checkpoints(self.out)
        return frequent_tokens.of_run(self.out, is_begun, labels, self.config, self.words.eos, self.report, known)

    def _first_weights(self, rows: data.Rows) -> Weights:
        """Random weights, in part replaced by those of the target's last layers or of the drafter to start from."""
        config, target = self.config, self.teacher.target
        params = init_drafter(jax.random.key(self.recipe.train.seed), config, target["embedding"])
        named = lambda names: ", ".join(names) or "nothing"  # noqa: E731
        if self.recipe.model.trunk_begins == drafter.LAST_LAYER:
            begun = begun_with_target(params, config, target, self.reads, jnp.asarray(rows.tokens[:1, :-1]))
            params = begun.weights
            self.report(f"the trunk starts as the target's last layer; fresh weights: {named(begun.fresh)}")
        if self.start is not None:
            begun = started_from(params, self.start, self.hot)
            params, changes = begun.weights, f"dropped: {named(begun.dropped)}; fresh: {named(begun.fresh)}"
            self.report(f"starting from {self.start_dir}; {changes}")
        return params

    def scores(self, prompts: list[np.ndarray]) -> Evaluate:
        """Returns a function that simulates tau on greedy and on sampled texts."""
        texts, tree = {}, self.recipe.eval.tree(self.config.num_steps)
        for name, temperature in (("greedy", 0.0), ("sampled", self.recipe.eval.temperature)):
            texts[name] = text, _ = self.texts(name, prompts, temperature), temperature
            if self.hot is not None:
                self.report(frequent_tokens.describe(self.hot, text.written, f"tokens of the held-out {name} texts"))

        def evaluate(params: Weights) -> dict[str, Any]:
            values, whole = {}, draft_vocab.attach(params, self.hot, self.teacher.target, self.reads)
            for name, (text, temperature) in texts.items():
                pair = dataclasses.replace(self.teacher, drafter=whole, drafter_config=self.config)
                found = simulate.simulate(pair, text, tree, temperature)
                values |= found if name == "greedy" else {f"sampled_{k}": v for k, v in found.items()}
            return values

        return evaluate

    def write(self, new: Path, params: Weights, evaluation: dict[str, Any]) -> None:
        """Writes the drafter, with its acceptance by depth of a chain, which `planning/plan.py` reads."""
        names = {"profile": "chain_acceptance", "sampled_profile": "sampled_chain_acceptance"}
        profiles = {
            name: tuple(round(float(x), 3) for x in evaluation[key]) for name, key in names.items() if key in evaluation
        }
        weights = params if self.hot is None else {**params, "draft_to_target": self.hot}
        config = dataclasses.replace(self.config, **profiles)
        drafter_files.save_drafter(new, config, weights, self.recipe.model.stored_in)


class DistillTask(TaughtTask):
    """Distils the language model in `start_dir`, or its first layers, or trains its steering.

    The run's folder also holds the drafter's own texts in `on_policy/`, and the figures before step 1. The result is a
    Hugging Face folder like `start_dir`; for a steered model it also holds the steering.
    """

    @property
    def kind(self) -> str:
        return self.recipe.model.kind

    def __post_init__(self):
        super().__post_init__()
        share = self.recipe.on_policy.share
        if self.start_dir is None:
            raise ValueError(f"--kind {self.kind}: needs --start, the pretrained model to train")
        if share and (self.mesh is not None or jax.process_count() > 1):
            raise ValueError(f"on_policy.share={share:g}: the drafter writes its text on one device, without --mesh")
        self.start, num = find(self.start_dir), self.recipe.model.num_layers
        config = self.start.config if num is None else pretrain.cut_config(self.start.config, num)
        format_config(config)  # what cannot be written must not be trained
        self.recipe.train.check_length(config)

    def open(self) -> dict[str, Any]:
        model, owner, start = self.recipe.model, self.read_target(), self.start
        own, weights = load_foreign(start, owner, "float32", Placement(self.mesh), True)
        if own.kind not in (self.kind, distill.PLAIN) or (own.kind != distill.PLAIN and model.num_layers is not None):
            raise ValueError(
                f"--start {start}: is of kind {own.kind}, whose layers cannot be cut; give --kind {own.kind}"
            )
        if model.num_layers is not None:
            own, weights = pretrain.cut_config(own, model.num_layers), pretrain.cut(weights, model.num_layers)
        self.config = distill.how(self.kind).config_of(own, self.reads, owner.hash, model.steering_layers, model.steps)
        fresh = distill.how(self.kind).added(jax.random.key(self.recipe.train.seed), self.config)
        self.added, weights = tuple(fresh), fresh | weights  # names of the parts that a plain language model lacks
        self.learned = {name: weights[name] for name in self.added} if model.frozen else weights
        self.kept = {name: part for name, part in weights.items() if name not in self.learned}
        return {"target": owner.hash, "start": start.hash("float32")}

    def begin(self, rows: data.Rows) -> Model:
        num, train = self.recipe.model.num_layers, self.recipe.train
        part = "" if num is None else f"the first {num} of {self.start.config.num_layers} layers of "
        self.report(f"starting from {part}{self.start}")
        loss = distill.make_loss(self.reads, self.config, self.recipe.loss, train.remat)
        frozen = {"target": self.teacher.target, "drafter": self.kept}
        return Model(self.config, self.learned, [(train.steps, loss)], frozen)

    def batches(self, rows: data.Rows, features: Any = None) -> data.Batches:
        train, asked = self.recipe.train, self.recipe.on_policy
        if not asked.num_rows(train):
            return super().batches(rows)
        seed, most = self.recipe.data.seed_of(train.seed), self.config.max_position
        writer = Params({}, None, self.config, eos=self.words.eos, max_len=most)
        return MixedBatches(rows, train, seed, asked, writer, self.out)

    def scores(self, prompts: list[np.ndarray]) -> Evaluate:
        """Returns a function that measures held-out divergences and decodes the prompts. Stores the first weights'
        figures."""
        asked, config = self.recipe.eval, self.config
        texts = self.texts("sampled", prompts, asked.temperature)
        divergences = distill.held_out_divergences(self.reads, config, self.recipe.loss, texts, asked.temperature)

        def evaluate(learned: Weights) -> dict[str, Any]:
            weights = self.kept | learned
            pair = dataclasses.replace(self.teacher, drafter=weights, drafter_config=config)
            return distill.decoded(pair, prompts, asked) | divergences(weights, self.teacher.target)

        if not manifest.has_checkpoints(self.out):
            before = evaluate(self.learned)
            write_json(self.out / BEFORE, before)
            self.report(f"before: {line_of(before)}")
        return evaluate

    def write(self, new: Path, params: Weights, evaluation: dict[str, Any]) -> None:
        """Writes a Hugging Face folder. Rows that only fill the vocabulary up to the target's are left out."""
        num = self.config.num_tokens
        words = self.start if self.start.tokenizer else self.words
        distill.how(self.kind).save_added(new, self.config, params)
        model = {name: part for name, part in params.items() if name not in self.added}
        model |= {name: model[name][:num] for name in ("embedding", "head") if name in model}
        config = dataclasses.replace(model_of(self.config), vocab_size=num)
        convert.save_target(new, config, model, bos=words.bos, eos=words.named_eos)
        words.save_tokenizer(new)

    def close(self) -> None:
        super().close()
        if self.recipe.eval.every and is_writer():
            for name, path in (("before: ", self.out / BEFORE), ("after:  ", self.folder / JUDGED)):
                self.report(name + line_of(read_json(path)))


TASKS = {pretrain.TargetRecipe: TargetTask, drafter.DrafterRecipe: DrafterTask, distill.DistillRecipe: DistillTask}
"""The task of each recipe."""
