"""Trains a drafter on its target's own text in one process, within a number of minutes.

    python benchmarks/gpu/train_drafter.py --minutes 9 --kind hidden --out result --work /tmp/work --start DIR

The target writes questions, answers them, writes second questions and answers these (`answers.py`). The library's
trainer then learns from all answers and keeps the weights with the best simulated tau. `--out` gets at most 8 files: a
report and the pieces of the best drafter (`pieces.py`), anew whenever it becomes better. `--work` holds everything
else. The same command goes on with the same `--work` where an earlier one broke off. The README beside this file says
what to carry to a machine without internet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import answers
import jax
import pieces
from answers import Counts, Stage, Words, Writer

import hsd_jax
from hsd_jax.config import ModelConfig
from hsd_jax.drafters import files as drafter_files
from hsd_jax.drafters.method import DraftedFor
from hsd_jax.drafters.table import init_drafter
from hsd_jax.host import compilation
from hsd_jax.host.files import check_new_folder, read_json, write_json
from hsd_jax.models.cache import cache_dtype
from hsd_jax.models.checkpoint import Checkpoint, find
from hsd_jax.models.placement import check_free
from hsd_jax.models.tensor_files import config_file, specs_of, weights_file
from hsd_jax.train import data, manifest
from hsd_jax.train.drafter import TRAINED, DrafterRecipe, drafter_config
from hsd_jax.train.journal import METRICS, read_metrics
from hsd_jax.train.recipe import read_recipe
from hsd_jax.train.response_prompts import Prompt
from hsd_jax.train.run import train
from hsd_jax.train.tasks import JUDGED

SHARES = {"questions": 0.08, "answers": 0.27, "second questions": 0.03, "second answers": 0.08, "training": 0.54}
"""Shares of the time that is left when the target is loaded and its programs are compiled. The rest is for the end."""
LEAST_MINUTES, MOST_MINUTES = 1.0, 1440.0
ROWS, MOST_ROWS = {"cpu": 16}, 1024
"""Rows of a batch by platform, and elsewhere."""
LONGEST = 752
"""Most tokens of a conversation. With the slots that a round may write these are caches of 768 slots."""
MOST_ANSWERS = 200_000
REPORT, STATE = "report.json", "state.json"


def deadlines(shares: dict[str, float], done: Sequence[str], begin: float, seconds: float) -> dict[str, float]:
    """When each stage ends. The time of the stages that are done already is divided among the others."""
    left = {name: share for name, share in shares.items() if name not in done}
    scale = sum(shares.values()) / max(sum(left.values()), 1e-9)
    ends, at = {}, 0.0
    for name, share in left.items():
        at += share * scale
        ends[name] = begin + at * seconds
    return ends


def bytes_of_batch(config: ModelConfig, rows: int, slots: int) -> int:
    """Bytes of the caches of a batch, and of what reading the prompts of a chunk of 256 tokens takes beside them."""
    caches = config.num_layers * 2 * config.num_kv_heads * config.head_dim * slots
    chunk = 256 * (4 * config.hidden_size + 3 * config.intermediate_size) + 256 * config.num_heads * slots
    return rows * (caches * cache_dtype("bfloat16").itemsize + chunk * 4)


class Run:
    """One call of this script: its checks, its stages and what it reports."""

    def __init__(self, args: argparse.Namespace):
        self.begin = time.perf_counter()
        self.args, self.out, self.work = args, args.out, args.work or args.out.with_name(args.out.name + ".work")
        self._check_call()
        self.source = find(args.target)
        self.recipe = self._recipe()
        self.config = self._check_models(self.source)
        self.rows = self._check_memory()
        self.settings = self._settings()
        self.state = self._read_state()
        self.counts = {name: Counts(**self.state["stages"].get(name, {})) for name in SHARES if name != "training"}
        tokenizer, bos, _ = data.read_tokenizer(self.source)
        self.words = Words(tokenizer, bos, data.template_of(self.source))
        self.others = answers.prompts_of_files(args.prompts, self.words, self.max_len, args.seed)
        self._published: Any = None
        self._rehearsal: threading.Thread | None = None

    # --- checks, before anything is written -------------------------------------------------------------------------

    def _check_call(self) -> None:
        args = self.args
        if not LEAST_MINUTES <= args.minutes <= MOST_MINUTES:
            raise ValueError(f"--minutes {args.minutes:g}: allowed are {LEAST_MINUTES:g} to {MOST_MINUTES:g}")
        if args.device == "gpu" and jax.default_backend() != "gpu":
            raise ValueError(f"no GPU: jax runs on {jax.default_backend()!r}; --device any takes what is there")
        for path in args.prompts:
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file of prompts")
        for folder in (self.out, self.work):
            check_new_folder(folder)
        if self.out.resolve() == self.work.resolve():
            raise ValueError(f"--work {self.work}: is --out; what comes back must be alone there")

    def _recipe(self) -> DrafterRecipe:
        values = read_recipe(str(self.args.config), [*self.args.set, f"model.kind={self.args.kind}"])
        recipe = DrafterRecipe.from_dict(values, str(self.args.config))
        return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, seed=self.args.seed))

    def _check_models(self, source: Checkpoint) -> ModelConfig:
        config, recipe = source.config, self.recipe
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"  # as the trainer reads the target
        owner = DraftedFor(config, source.hash(dtype), source.tokenizer)
        self.target_hash = owner.hash
        mine = drafter_config(recipe.model, config, owner.hash, owner.vocabulary_hash)
        recipe.train.check_length(config)
        num = sum(math.prod(spec.shape) for spec in specs_of(init_drafter, mine).values())
        pieces.check_size(
            num * (2 if recipe.model.stored_in == "bfloat16" else 4) + 10**5, "the drafter of this recipe"
        )
        if self.args.start is not None:
            there = drafter_files.read_drafter_config(self.args.start)
            drafter_files.check_drafter(there, owner)
            if there.kind != self.args.kind:
                raise ValueError(
                    f"--start {self.args.start}: holds a {there.kind} drafter, not --kind {self.args.kind}"
                )
        return config

    def _check_memory(self) -> int:
        """The number of rows of a batch: that of --rows, or the largest power of two that fits."""
        wanted = self.args.rows or ROWS.get(jax.default_backend(), MOST_ROWS)
        self.max_len = min(LONGEST, self.config.max_position)
        while True:
            needed = int(1.25 * bytes_of_batch(self.config, wanted, self.max_len + 16))
            try:
                check_free(None, needed, f"batches of {wanted} rows need", "Give fewer --rows, or free memory")
                return wanted
            except ValueError:
                if self.args.rows or wanted <= 8:
                    raise
                wanted //= 2

    def _settings(self) -> dict[str, Any]:
        """All that a run must have in common with the one that it continues."""
        args = self.args
        start = None if args.start is None else manifest.fingerprints([weights_file(args.start, "drafter")])[0]
        return {
            "target": self.target_hash,
            "kind": args.kind,
            "rows": self.rows,
            "seed": args.seed,
            "start": start,
            "prompts": manifest.fingerprints(args.prompts),
            "recipe": dataclasses.asdict(self.recipe),
        }

    def _read_state(self) -> dict[str, Any]:
        path = self.work / STATE
        if not path.is_file():
            if self.work.exists() and any(self.work.iterdir()):
                raise ValueError(
                    f"{self.work}: is not empty and holds no {STATE} of an earlier run; choose another --work"
                )
            return {"settings": _plain(self.settings), "stages": {}, "is_training": False}
        state = read_json(path)
        there, here = (manifest.flattened(x) for x in (state["settings"], _plain(self.settings)))
        for name in here | there:
            if there.get(name) != here.get(name):
                raise ValueError(
                    f"{self.work} holds another run: {name} is {there.get(name)!r} there and {here.get(name)!r} here;"
                    " choose another --work, or the same settings to continue"
                )
        return state

    # --- the stages -------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Runs all stages that are not done, and reports."""
        self.work.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.save()
        if not self.state["is_training"] and not all(counts.is_done for counts in self.counts.values()):
            self._write()
        else:
            self._divide_time()
        drafter = self._train()
        self.publish(drafter)
        self.say(f"done in {time.perf_counter() - self.begin:.0f} s")

    def _divide_time(self) -> None:
        """Sets when each stage ends."""
        done = [name for name, counts in self.counts.items() if counts.is_done]
        if self.state["is_training"]:
            done = list(self.counts)  # the training has begun with the answers that there were
        now = time.perf_counter()
        self.ends = deadlines(SHARES, done, now, self.begin + 60 * self.args.minutes - now)

    def _write(self) -> None:
        checkpoint, seed, work, words = self.source, self.args.seed, self.work, self.words
        dtype = None if jax.default_backend() == "cpu" else "bfloat16"
        # A drafter without weights, because nothing is drafted. None would be the one of a bundled name.
        params = hsd_jax.load(checkpoint, drafter="lookup", dtype=dtype, max_len=self.max_len)
        writer = Writer(params, self.rows)
        self.say("the target is loaded")
        writer.write([words.header()], [1.0], [0], 1, math.inf)
        self.say(f"{self.rows:,} rows at once; programs are compiled")
        self._divide_time()
        asked, answered, again, more = (work / f"{name.replace(' ', '-')}.jsonl" for name in self.counts)

        def stage(name: str, path: Path) -> Stage | None:
            counts = self.counts[name]
            return None if counts.is_done else Stage(name, counts, path, self.ends[name], self.save)

        def answer(name: str, path: Path, own: Path, others: Sequence[Prompt]) -> None:
            if (this := stage(name, path)) is None:
                return
            prompts = answers.prompts_of(own, others, words, self.max_len, seed, self.say)
            if prompts:
                answers.answers(this, writer, words, seed, prompts, self.args.answers)
            self.say(this.counts.describe(name))

        if (this := stage("questions", asked)) is not None:
            answers.questions(this, writer, words, seed, self.args.answers)
            self.say(this.counts.describe("questions"))
        answer("answers", answered, asked, self.others)
        if not answered.is_file() or not answered.stat().st_size:
            raise ValueError(
                f"no answer was written in {60 * self.args.minutes:.0f} s; give more --minutes, or fewer --rows"
            )
        if (this := stage("second questions", again)) is not None and asked.is_file():
            turns = answers.to_follow(asked, answered, words, params.eos, self.max_len)
            if turns:
                answers.questions(this, writer, words, seed, self.args.answers, turns)
            self.say(this.counts.describe("second questions"))
        if again.is_file() and again.stat().st_size:
            answer("second answers", more, again, [])

    def _train(self) -> Path:
        files = [self.work / f"{name}.jsonl" for name in ("answers", "second-answers")]
        if self._rehearsal is not None:
            self._rehearsal.join()
        if not self.state["is_training"]:
            self.state["is_training"] = True
            self.save()
        run = self.work / "run"

        def report(line: str) -> None:
            self.say(line)
            self.publish(run / "drafter")

        written = [path for path in files if path.is_file() and path.stat().st_size]
        return self._trained(written, run, self.ends["training"], report)

    def _trained(self, files: Sequence[Path], run: Path, stop_at: float, report: Callable[[str], None]) -> Path:
        start = {"start_dir": self.args.start, "stop_at": stop_at}
        return train(self.source, files, run, self.recipe, report=report, **start)

    def _rehearse(self) -> None:
        """Trains one step with the first answers, so that the training's programs are compiled meanwhile.

        The step itself is compiled once more then, and found in jax's cache on disk.
        """
        files, run = [self.work / "rehearsal.jsonl"], self.work / "rehearsal"
        try:
            self._trained(files, run, time.perf_counter(), lambda line: None)
            self.say("the programs of the training are compiled")
        except Exception as error:  # the training itself may still succeed, or will say why not
            self.say(f"the rehearsal of the training failed: {type(error).__name__}: {error}")
        shutil.rmtree(run, ignore_errors=True)

    def _may_rehearse(self) -> None:
        """Starts the rehearsal as soon as there are enough answers."""
        loop, answered = self.recipe.train, self.work / "answers.jsonl"
        needed = 1.5 * (loop.batch + self.recipe.eval.prompts + 2) * loop.length
        if self._rehearsal is None and not self.state["is_training"] and self.counts["answers"].tokens > needed:
            shutil.rmtree(self.work / "rehearsal", ignore_errors=True)  # of a killed run
            shutil.copyfile(answered, self.work / "rehearsal.jsonl")
            self._rehearsal = threading.Thread(target=self._rehearse, daemon=True)
            self._rehearsal.start()

    # --- what it says -----------------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        print(f"{time.perf_counter() - self.begin:6.1f} s  {line}", flush=True)

    def save(self) -> None:
        """Stores the state for a later run, and the report."""
        self.state["stages"] = {name: dataclasses.asdict(counts) for name, counts in self.counts.items()}
        write_json(self.work / STATE, self.state)
        write_json(self.out / REPORT, self.report())
        self._may_rehearse()

    def report(self) -> dict[str, Any]:
        device = jax.devices()[0]
        about: dict[str, Any] = {
            "device": getattr(device, "device_kind", device.platform),
            "jax": jax.__version__,
            "seconds": time.perf_counter() - self.begin,
            "settings": self.state["settings"],
        }
        for name, counts in self.counts.items():
            about[name] = dataclasses.asdict(counts) | {"tokens_per_s": counts.speed}
        run = self.work / "run"
        if (run / METRICS).is_file():
            records = read_metrics(run)
            steps = [r for r in records if "eval" not in r]
            speeds = [r["tokens_per_s"] for r in steps[1:]]  # the first one compiles
            about["training"] = {
                "steps": steps[-1]["step"] if steps else 0,
                "tokens": steps[-1]["tokens"] if steps else 0,
                "tokens_per_s": statistics.median(speeds) if speeds else None,
                "evaluations": [r for r in records if "eval" in r],
            }
        return about

    def publish(self, drafter: Path) -> None:
        """Brings the pieces and the report up to date, if the best drafter is another one than before."""
        if not config_file(drafter, "drafter").is_file():
            return
        now = weights_file(drafter, "drafter").stat().st_mtime_ns, (drafter / JUDGED).is_file()
        if now != self._published:
            pieces.split(drafter, self.out)
            self._published = now
        write_json(self.out / REPORT, self.report())


def _plain(values: Any) -> Any:
    """The values as they come back from a JSON file."""
    return json.loads(json.dumps(values))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, required=True, metavar="M", help=f"at least {LEAST_MINUTES:g}")
    add("--kind", choices=TRAINED, default="hidden", help="kind of drafter (default: hidden)")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the report and the pieces of the drafter")
    add("--work", type=Path, metavar="DIR", help="folder for all other files (default: OUT.work)")
    add("--target", default="smollm2", metavar="NAME", help="as for hsd train (default: smollm2)")
    add("--start", type=Path, metavar="DIR", help="a drafter to start from (default: random weights)")
    add("--prompts", type=Path, nargs="+", default=[], metavar="FILE", help="prompts beside the target's own questions")
    add("--config", type=Path, default=Path(__file__).with_name("recipe.yaml"), metavar="YAML", help="recipe")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change one value of the recipe")
    add("--rows", type=int, metavar="N", help=f"rows of a batch (default: what fits, up to {MOST_ROWS:,})")
    add("--answers", type=int, default=MOST_ANSWERS, metavar="N", help=f"most answers (default: {MOST_ANSWERS:,})")
    add("--device", choices=("gpu", "any"), default="gpu", help="any: run on what jax finds (default: gpu)")
    add("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    for name in ("rows", "answers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: expected at least 1")
    if args.seed < 0:
        parser.error(f"--seed {args.seed}: expected at least 0")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        compilation.use_setting()
        Run(args).go()
    except (ValueError, OSError, FloatingPointError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
