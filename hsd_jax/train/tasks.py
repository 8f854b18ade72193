"""The tasks of a training run: one class for each kind of recipe, with all that differs between kinds of models.

`train` (`run.py`) makes the same steps for every task. Before `initialize` no file is written, so that a refused run
leaves none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hsd_jax.config import TrunkConfig, model_of
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.drafted_for import DraftedFor
from hsd_jax.drafters.table import init_drafter, load_foreign
from hsd_jax.host.distributed import fetch, wait_for_all
from hsd_jax.host.files import is_writer, read_json, replace_folder, write_json
from hsd_jax.measure import simulate
from hsd_jax.measure import texts as texts_lib
from hsd_jax.models import convert, draft_vocab
from hsd_jax.models.checkpoint import Checkpoint, Source, find
from hsd_jax.models.hf_config import format_config
from hsd_jax.models.placement import Placement
from hsd_jax.models.target import init_target
from hsd_jax.models.tensor_files import weights_file
from hsd_jax.params import Params, check_loads
from hsd_jax.tokenizer import TOKENIZER_FILES
from hsd_jax.train import data, distill, drafter, features, frequent_tokens, manifest, pretrain
from hsd_jax.train.journal import Report, line_of
from hsd_jax.train.loop import Loss
from hsd_jax.train.own_text import MixedBatches
from hsd_jax.train.tokenizer import train_tokenizer
from hsd_jax.train.trained import begun_with_target, started_from
from hsd_jax.types import Weights

BEFORE, JUDGED = "before.json", "judged.json"
Evaluate = Callable[[Weights], dict[str, Any]]


@dataclasses.dataclass
class Task:
    """The arguments of `train`. Each kind of model is a subclass, which also has:

    kind: the kind of the run, in `recipe.json`;
    reads: the configuration of the model whose vocabulary and length limit the rows;
    words: the checkpoint whose tokenizer encodes the rows;
    folder: the folder of the result;
    open(): reads the models. Returns what identifies this run besides recipe and data;
    initialize(rows): returns the first weights. Sets `loss` and `stages`, as `loop.fit` takes them;
    scores(prompts): returns the function that evaluates weights;
    batches(rows): returns what `fit` reads;
    save(params, evaluation): replaces the result and, if there is an evaluation, its scores;
    close(): raises an error if the result cannot be used, and reports final figures.
    """

    source: Source | None
    files: Sequence[str | Path]
    out: Path
    recipe: Any
    mesh: Mesh | None
    report: Report
    force: bool
    start_dir: str | Path | None
    skip_bad_lines: bool

    config: Any = dataclasses.field(init=False)
    """The configuration of the model that is trained. `open` sets it."""
    frozen: Any = dataclasses.field(init=False, default=None)
    """Weights that the loss reads and the run does not change. `open` sets them."""
    stages: Sequence[tuple[int, Loss]] = dataclasses.field(init=False, default=())

    def __post_init__(self):
        """Sets what is known before files are read, and raises errors that can be found then."""

    def batches(self, rows: data.Rows) -> Any:
        return data.batches_of(rows, self.recipe.train, self.recipe.data, self.mesh)

    def close(self) -> None:
        pass


class TargetTask(Task):
    """Trains a target, from scratch or grown from the model in `start_dir`.

    The tokenizer is that of `source`. If `source` is None, it is that of `start_dir` or else that of `out`. If `out`
    has none, a new one is trained on the data.
    """

    kind = "target"

    def __post_init__(self):
        self.folder, self.config = self.out, self.recipe.model
        self.reads = self.config
        format_config(self.config)  # what cannot be written must not be trained

    @functools.cached_property
    def words(self) -> Checkpoint:
        vocab_size, source = self.recipe.vocab_size, self.start_dir if self.source is None else self.source
        if source is None:
            source = self.out
            if is_writer() and not all((self.out / name).is_file() for name in TOKENIZER_FILES[:2]):
                self.report(f"training a tokenizer of {vocab_size} tokens")
                train_tokenizer([str(f) for f in self.files], vocab_size, self.out, self.skip_bad_lines, self.report)
            wait_for_all("the tokenizer is there")
        words = find(source)
        tokenizer, self.bos, self.eos = data.read_tokenizer(words)
        if (size := tokenizer.get_vocab_size()) > vocab_size:
            raise ValueError(f"vocab_size={vocab_size}: the tokenizer in {words} has {size} tokens")
        return words

    def open(self) -> dict[str, Any]:
        path = self.words.path
        files = [path / TOKENIZER_FILES[0] if path.is_dir() else path]
        about: dict[str, Any] = {"tokenizer": manifest.fingerprints(files)}
        self.start = None if self.start_dir is None else pretrain.grown_from(find(self.start_dir), self.config)
        return about if self.start is None else about | {"start": convert.weights_hash(self.start)}

    def initialize(self, rows: data.Rows) -> Weights:
        self.loss = pretrain.make_loss(self.config, self.recipe.train.remat)
        return init_target(jax.random.key(self.recipe.train.seed), self.config) if self.start is None else self.start

    def save(self, params: Weights, evaluation: dict[str, Any] | None = None) -> None:
        """Writes a Hugging Face folder with its tokenizer, beside the checkpoints."""
        params, bos, eos = jax.tree.map(fetch, params), self.bos, self.eos
        if is_writer():
            self.words.save_tokenizer(self.out)
            convert.save_target(self.out, self.config, params, bos=bos, eos=(eos,))
            write_json(self.out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})


class TaughtTask(Task):
    """Trains a drafter on the frozen target of `source`."""

    kind = "drafter"

    def __post_init__(self):
        assert self.source is not None, "a drafter has a target"
        self.words, self.folder = find(self.source), self.out / "drafter"
        self.reads, self.kept = self.words.config, {}  # `kept`: weights of the drafter that are not trained

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

    def batches(self, rows: data.Rows, likeliest: int = 0) -> Any:
        """Batches with the target's states from a cache, if the recipe names one; it is built first."""
        train, asked, models = self.recipe.train, self.recipe.features, (self.teacher.target, self.reads)
        pass_rows, layers = train.batch // train.num_passes, self.config.feature_layers
        rest = self.owner.hash, pass_rows, self.report
        cached = features.open_features(asked, rows, *models, *rest, layers=layers, likeliest=likeliest)
        return data.batches_of(rows, train, self.recipe.data, self.mesh, cached)

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
        self.frozen = self.teacher.target
        self.config = config = drafter.drafter_config(model, self.reads, owner.hash, owner.vocabulary_hash)
        if train.length <= config.num_steps:
            raise ValueError(f"train.length={train.length}: must be greater than model.num_steps={config.num_steps}")
        about: dict[str, Any] = {"target": owner.hash}
        self.start = None
        if self.start_dir is not None:
            self.start_dir = find(self.start_dir).path
            self.start = drafter_files.read_drafter(self.start_dir, target=owner)
            about["start"] = manifest.fingerprints([weights_file(self.start_dir, drafter_files.DRAFTER)])
        return about

    def initialize(self, rows: data.Rows) -> Weights:
        config, train, report, frozen = self.config, self.recipe.train, self.report, self.frozen
        params = init_drafter(jax.random.key(train.seed), config, frozen["embedding"])
        if self.recipe.model.trunk_begins == drafter.LAST_LAYER:
            begun = begun_with_target(params, config, frozen, self.reads, jnp.asarray(rows.tokens[:1, :-1]))
            params = begun.weights
            report(f"the trunk starts as the target's last layer; fresh weights: {', '.join(begun.fresh) or 'nothing'}")
        if isinstance(config, TrunkConfig):  # other drafters have no attention
            most = config.max_position
            if min(config.window or most, most) > train.length:
                reach = f"attention further back is not trained, and contexts may have {most} (see model.window)"
                report(f"rows of {train.length} tokens: {reach}")
        labels, self.hot = rows.tokens[rows.mask], None
        if config.reduced_vocab_size is not None:
            known = None if self.start is None else self.start[1].get("draft_to_target")
            is_begun = manifest.has_checkpoints(self.out)
            self.hot = frequent_tokens.of_run(self.out, is_begun, labels, config, self.words.eos, report, known)
        if self.start is not None:
            begun = started_from(params, self.start[1], self.hot)
            params = begun.weights
            dropped, fresh = (", ".join(names) or "nothing" for names in (begun.dropped, begun.fresh))
            report(f"starting from {self.start_dir}; dropped: {dropped}; fresh: {fresh}")
        frequency = draft_vocab.draft_columns(self.hot, frequent_tokens.smoothed(labels, self.reads.vocab_size))
        of_loss = self.reads, config, self.recipe.loss, self.hot, train.remat, frequency
        self.loss, self.stages = drafter.make_loss(*of_loss), drafter.make_stages(*of_loss)
        return params

    def batches(self, rows: data.Rows, likeliest: int = 0) -> Any:
        loss = self.recipe.loss
        return super().batches(rows, 0 if loss.sample is None else loss.likeliest)

    def scores(self, prompts: list[np.ndarray]) -> Evaluate:
        """Returns a function that simulates tau on greedy and on sampled texts."""
        texts, tree = {}, self.recipe.eval.tree(self.config.num_steps)
        for name, temperature in (("greedy", 0.0), ("sampled", self.recipe.eval.temperature)):
            texts[name] = text, _ = self.texts(name, prompts, temperature), temperature
            if self.hot is not None:
                self.report(frequent_tokens.describe(self.hot, text.written, f"tokens of the held-out {name} texts"))

        def evaluate(params: Weights) -> dict[str, Any]:
            values, models = {}, (self.frozen, self.reads)
            whole = draft_vocab.attach(params, self.hot, *models)
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
        self.config = model.how.config_of(own, self.reads, owner.hash, model.steering_layers, model.steps)
        fresh = model.how.added(jax.random.key(self.recipe.train.seed), self.config)
        self.added, weights = tuple(fresh), fresh | weights  # names of the parts that a plain language model lacks
        self.learned = {name: weights[name] for name in self.added} if model.frozen else weights
        self.kept = {name: part for name, part in weights.items() if name not in self.learned}
        self.frozen = {"target": self.teacher.target, "drafter": self.kept}
        return {"target": owner.hash, "start": start.hash("float32")}

    def initialize(self, rows: data.Rows) -> Weights:
        num = self.recipe.model.num_layers
        part = "" if num is None else f"the first {num} of {self.start.config.num_layers} layers of "
        self.report(f"starting from {part}{self.start}")
        self.loss = distill.make_loss(self.reads, self.config, self.recipe.loss, self.recipe.train.remat)
        return self.learned

    def batches(self, rows: data.Rows, likeliest: int = 0) -> Any:
        train, asked = self.recipe.train, self.recipe.on_policy
        if not asked.num_rows(train):
            return super().batches(rows)
        seed = self.recipe.data.seed_of(train.seed)
        return MixedBatches(rows, train, seed, asked, self.config, self.words.eos, self.out)

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
        self.recipe.model.how.save_added(new, self.config, params)
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
