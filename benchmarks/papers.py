"""Trains the arms of a comparison at equal tokens and compares them on the same held-out texts.

    python benchmarks/papers.py benchmarks/papers/lyanna.yaml --data own=own.jsonl --prompts dialogue=dev.jsonl \
        maths=test.jsonl --half report --limit 24 --out runs/lyanna

An arm is one training, or a drafter that exists. Every arm is trained with every seed. A seed decides the first weights
and the anchors, and the order of the text unless the file fixes data.seed. tau is simulated on texts that
the target wrote, greedy and at temperature 1 with coupled drafts (`measure/simulate.py`), so a busy machine does not
change it. `--speed` then decodes by the first seed of each arm in turns with plain decoding.
A complete training is not repeated: the same command continues, and arms can be added to the file. `--small` trains for
the few steps that the file names. Choose recipes on the `tune` half; the `report` half is for what was chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hsd_jax import TreeConfig, validation
from hsd_jax.cli import options
from hsd_jax.host.files import read_json, read_yaml, write_json
from hsd_jax.lab.bench import report
from hsd_jax.lab.bench.experiment import run_experiment
from hsd_jax.lab.bench.methods import MethodOptions, make_modes
from hsd_jax.lab.bench.prompts import RunOptions, Workload, read_tasks
from hsd_jax.lab.bench.tables import Table
from hsd_jax.measure import simulate
from hsd_jax.measure.speeds import bootstrap_ratio
from hsd_jax.measure.texts import Texts, stored_texts
from hsd_jax.models.checkpoint import Checkpoint, find
from hsd_jax.pair import Params, load, with_drafter
from hsd_jax.train import run
from hsd_jax.train.recipe import read_recipe
from hsd_jax.validation import Count, Flag, Seed

TEMPERATURES = {"greedy": 0.0, "T = 1": 1.0}
TARGET = "target"
"""The `start` of an arm that begins as the target, or as the target's first layers."""


@validation.dataclass
class Arm:
    """One line of `arms` in the file."""

    recipe: str | None = None
    """A file such as those in configs/; None: the built-in recipe."""
    trains: str = "drafter"
    """drafter or target: the kind of training, as in `hsd train`."""
    set: tuple[str, ...] = ()
    """Changes to the recipe, after those of the file for all arms. `{out}` in a change is the folder --out and
    `{data}` the name of the text, so that arms can share a cache of the target's states."""
    data: str = "own"
    """The NAME of --data."""
    start: str | None = None
    """The arm from which this one starts, or TARGET: the target itself."""
    drafter: str | None = None
    """The folder of an existing drafter, or a name that `load` takes as its drafter; nothing is trained."""
    depth: Count | None = None
    """The depth of the chain; None: that of the file."""
    accept: str = "match"
    """The rule by which --speed decodes."""
    once: Flag = False
    """Whether the arm is only a base to start from: trained with the first seed, without `set` of the file, and not
    compared."""


@validation.dataclass
class Comparison:
    """The contents of a file of arms."""

    claim: str
    """What the paper claims, as its readable text says it."""
    arms: dict[str, Any]
    depth: Count
    target: str = "hsd_jax/assets/demo/target"
    set: tuple[str, ...] = ()
    """Changes to the recipes of all arms that are compared. Those of the arm follow, then `small`, then the seed."""
    small: tuple[str, ...] = ()
    """Further changes with --small."""
    seeds: tuple[Seed, ...] = (0,)


def read_comparison(path: Path) -> tuple[Comparison, dict[str, Arm]]:
    """The comparison of a file, and its arms.

    Raises:
      FileNotFoundError, ValueError: naming the file, the arm and the wrong key or value.
    """
    found = validation.read(Comparison, read_yaml(path), str(path))
    arms = {name: validation.read(Arm, line or {}, str(path), name) for name, line in found.arms.items()}
    if TARGET in arms:
        raise ValueError(f"{path}: arm {TARGET!r}: as a start this name means the target; name the arm otherwise")
    before: list[str] = []
    for name, arm in arms.items():
        if arm.drafter is not None and arm != Arm(drafter=arm.drafter, depth=arm.depth, accept=arm.accept):
            raise ValueError(f"{path}: arm {name!r}: drafter names one that exists; it takes only depth and accept")
        if arm.start is not None and arm.start not in [TARGET, *before]:
            allowed = f"allowed are {TARGET} and arms above: {before}"
            raise ValueError(f"{path}: arm {name!r}: start: {arm.start!r}: {allowed}")
        before.append(name)
    return found, arms


def folder_of(name: str) -> str:
    """The name of an arm as the name of a folder that a shell need not quote."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name.replace("'", "")).strip("-")


@dataclasses.dataclass
class Trainer:
    """Trains the arms of a comparison into the folder `out`, a folder for each arm and seed."""

    comparison: Comparison
    arms: dict[str, Arm]
    data: dict[str, list[str]]
    out: Path
    small: bool

    def drafter(self, name: str, seed: int) -> Path:
        """The folder of the arm's drafter. Trains it first, unless that has been done."""
        arm = self.arms[name]
        if arm.drafter is not None:
            return Path(arm.drafter)
        seed = self.comparison.seeds[0] if arm.once else seed
        folder = self.out / f"{folder_of(name)}-{seed}"
        if arm.data not in self.data:
            raise ValueError(f"arm {name!r} reads {arm.data!r}: give --data {arm.data}=FILE")
        start: str | Path | None = arm.start
        if start is not None:
            start = self.comparison.target if start == TARGET else self.drafter(start, seed)
        small = self.comparison.small if self.small else ()
        shared = () if arm.once else self.comparison.set
        changes = [change.replace("{out}", str(self.out)) for change in (*shared, *arm.set, *small)]
        changes = [change.replace("{data}", arm.data) for change in changes]
        values = read_recipe(arm.recipe, [*changes, f"train.seed={seed}"])
        about = {"recipe": values, "data": self.data[arm.data], "start": None if start is None else str(start)}
        done, result = folder / "done.json", folder / "drafter" if arm.trains == "drafter" else folder
        if done.is_file():
            if read_json(done)["about"] != about:
                raise ValueError(f"{folder}: holds arm {name!r} with another recipe or data; give another --out")
            return result
        recipe = run.recipe_of(arm.trains, values.get("model", {}).get("kind")).from_dict(values, name)
        options.say(f"arm {name}, seed {seed}")
        begun = time.perf_counter()
        run.train(self.comparison.target, self.data[arm.data], folder, recipe, report=options.say, start_dir=start)
        write_json(done, {"seconds": time.perf_counter() - begun, "about": about})
        return result


def held_out_texts(checkpoint: Checkpoint, params: Params, args: argparse.Namespace) -> dict[tuple[str, str], Texts]:
    """What the target writes after the prompts of each task, by task and kind of text. Stored in the folder --out."""
    texts, target_hash = {}, checkpoint.hash("float32")
    for task, prompts in read_tasks(options.record_of(args, Workload), params).items():
        tokens = [np.asarray(prompt.tokens(params.tokenizer)) for prompt in prompts]
        for kind, temperature in TEMPERATURES.items():
            how = args.max_new_tokens, temperature, options.say
            texts[task, kind] = stored_texts(args.out, f"{task}-{kind}", params, target_hash, tokens, *how)
    return texts


@dataclasses.dataclass
class Score:
    """What a chain of one arm would accept, of every seed."""

    tokens: np.ndarray
    """[texts], tokens of each text."""
    passes: np.ndarray
    """[seeds, texts], target passes for each text."""
    acceptance: np.ndarray
    """[seeds, D], by depth."""
    overlap: float | None

    @property
    def tau(self) -> float:
        return float(len(self.passes) * self.tokens.sum() / self.passes.sum())

    @property
    def by_seed(self) -> list[float]:
        return [float(self.tokens.sum() / passes.sum()) for passes in self.passes]

    def over(self, other: Score) -> tuple[float, float, float]:
        """The ratio of both taus and its 95 % interval over prompts."""
        tokens = np.stack([len(self.passes) * self.tokens, len(other.passes) * other.tokens]).astype(float)
        return self.tau / other.tau, *bootstrap_ratio(tokens, np.stack([self.passes.sum(0), other.passes.sum(0)]))


def score(drafters: list[Params], texts: Texts, depth: int, temperature: float) -> Score:
    """Simulates the drafters of an arm, one for each seed, by a chain of `depth` drafts."""
    passes, acceptance, overlaps = [], [], []
    for one in drafters:
        (found,), overlap = simulate.accepted_lengths(one, texts, [TreeConfig.chain(depth)], temperature)
        passes.append(list(found.rounds))
        acceptance.append(found.acceptance)
        overlaps.append(overlap)
    mean = None if None in overlaps else float(np.mean(overlaps))
    return Score(texts.length - texts.prompt_length, np.array(passes), np.array(acceptance), mean)


def table_of(kind: str, scores: dict[str, dict[str, Score]], reference: str) -> Table:
    """The table of one temperature: tau of each task over all seeds, and the ratio to the first arm over all tasks."""
    tasks = list(scores[reference])
    heads = ["arm", *(f"tau, {task}" for task in tasks), f"over {reference} [95 %]", "by seed", "acceptance by depth"]
    rows = []
    for name, by_task in scores.items():
        whole, base = pooled(by_task), pooled(scores[reference])
        ratio, low, high = whole.over(base)
        depths = np.nanmean(whole.acceptance, 0)
        rows.append(
            [
                name,
                *(f"{by_task[task].tau:.2f}" for task in tasks),
                f"{ratio:.2f} [{low:.2f}, {high:.2f}]",
                ", ".join(f"{tau:.2f}" for tau in whole.by_seed),
                " ".join(f"{a:.2f}".lstrip("0") for a in depths),
                *([] if whole.overlap is None else [f"{whole.overlap:.3f}"]),
            ]
        )
    if all(len(row) > len(heads) for row in rows):
        heads.append("overlap at depth 1")
    return Table(f"{kind}, chains", heads, [row[: len(heads)] for row in rows], [], left=1)


def pooled(by_task: dict[str, Score]) -> Score:
    """The score over the texts of all tasks. Acceptance and overlap are means over tasks."""
    found = list(by_task.values())
    overlaps = [score.overlap for score in found]
    mean = None if None in overlaps else float(np.mean([o for o in overlaps if o is not None]))
    tokens = np.concatenate([score.tokens for score in found])
    passes = np.concatenate([score.passes for score in found], axis=1)
    return Score(tokens, passes, np.nanmean([score.acceptance for score in found], 0), mean)


def speeds(
    drafters: dict[str, Path], arms: dict[str, Arm], comparison: Comparison, args: argparse.Namespace
) -> dict[str, Any]:
    """Decodes by the given drafters in turns with plain decoding. The record of the experiment is also speed.json."""
    params, methods = load(comparison.target), {}
    for name, folder in drafters.items():
        tree = TreeConfig.chain(arms[name].depth or comparison.depth).name
        methods[name] = MethodOptions(drafter=str(folder), tree=tree, accept=arms[name].accept)
    modes = make_modes(params, methods, lambda folder: with_drafter(params, folder))
    work = options.record_of(args, RunOptions, temperatures=tuple(TEMPERATURES.values()))
    return run_experiment(work, modes, read_tasks(work, params), methods, True, args.out / "speed.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=FILE", help="training text; a name may repeat")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="TASK=FILE")
    parser.add_argument("--half", choices=("tune", "report"))
    parser.add_argument("--limit", type=int, default=24, help="prompts of each task (default: 24)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seeds", type=int, help="use only the first seeds of the file")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="only these arms")
    parser.add_argument("--small", action="store_true", help="train for the few steps that the file names")
    parser.add_argument("--speed", action="store_true", help="also measure speed; leave the machine alone meanwhile")
    parser.add_argument("--repeats", type=int, default=2, help="with --speed: timed passes (default: 2)")
    parser.set_defaults(seed=0, chat_template=True, command_line=shlex.join(sys.argv))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    comparison, arms = read_comparison(args.file)
    data: dict[str, list[str]] = {}
    for named in args.data:
        name, _, file = named.partition("=")
        data.setdefault(name, []).append(file)
    unknown = sorted(set(args.only or ()) - set(arms))
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: arms are {', '.join(arms)}")
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(comparison, arms, data, args.out, args.small)
    compared = {name: arm for name, arm in arms.items() if not arm.once and (not args.only or name in args.only)}
    seeds = comparison.seeds[: args.seeds]
    for seed in seeds:  # all arms of a seed first, so that an interrupted run has whole comparisons
        for name in compared:
            trainer.drafter(name, seed)
    found = {name: [trainer.drafter(name, seed) for seed in seeds] for name in compared}
    depths = {name: arm.depth or comparison.depth for name, arm in compared.items()}
    target = dataclasses.replace(load(comparison.target, dtype="float32"), drafter=None, drafter_config=None)
    texts = held_out_texts(find(comparison.target), target, args)
    drafters = {name: [with_drafter(target, folder) for folder in folders] for name, folders in found.items()}
    tasks = list(dict.fromkeys(task for task, _ in texts))
    tables, record = [], {}
    for kind, temperature in TEMPERATURES.items():
        scores = {
            name: {task: score(some, texts[task, kind], depths[name], temperature) for task in tasks}
            for name, some in drafters.items()
        }
        tables.append(table_of(kind, scores, next(iter(scores))))
        record[kind] = {
            name: {task: {"tau": s.tau, "by_seed": s.by_seed, "tokens": s.tokens.tolist(), "passes": s.passes.tolist(),
                          "acceptance": s.acceptance.tolist(), "overlap": s.overlap} for task, s in by_task.items()}
            for name, by_task in scores.items()
        }  # fmt: skip
    foot = [f"claim: {comparison.claim}", f"{args.limit} prompts a task, {args.max_new_tokens} tokens, seeds {seeds}"]
    write_json(args.out / "table.json", record)
    if args.speed:
        measured = speeds({name: folders[0] for name, folders in found.items()}, arms, comparison, args)
        tables += report.tables_of(measured)
        foot += report.footer(measured)
    report.show(tables, foot, args.out / "table.md")


if __name__ == "__main__":
    main()
