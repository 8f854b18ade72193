"""An experiment: methods decode the same prompts in turns with plain decoding, in every setting.

Most commands of `hsd bench` run an experiment. They differ in methods, prompts and printed columns. Speeds are medians
over the repeats. The interval of a ratio is over batches of prompts. With few batches it is the range over the repeats;
the range of five repeats holds the median with probability 94 %. Read first: `methods.py`; next: `report.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsd_jax.config import NO_REUSE_FORM, TreeConfig
from hsd_jax.host import lock
from hsd_jax.host.files import write_json
from hsd_jax.lab.bench import gap
from hsd_jax.lab.bench.identity import first_difference, is_promised
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.methods import DEFAULT, PLAIN, MethodOptions
from hsd_jax.lab.bench.profile import profile_mode
from hsd_jax.lab.bench.prompts import BenchPrompt, Workload, joined_contexts
from hsd_jax.lab.bench.quality import held_out_bits_per_byte, model_record, pooled_repeated_ngram_share, task_score
from hsd_jax.lab.bench.tables import is_plain_text, say
from hsd_jax.params import Params
from hsd_jax.planning.measure import Mode, Runs, call_record, fastest, mode_record, speedup, time_modes
from hsd_jax.request import Speculation

FEWEST_ROWS = 6
"""Prompts of each setting of `over_contexts`, in batches; a larger batch is decoded once."""
ALL = "all"
"""The name of the task that pools all others."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting in which the methods are compared."""

    task: str
    temperature: float
    batch: int

    @property
    def title(self) -> str:
        """The setting in words."""
        return f"{self.task}, temperature {self.temperature:g}, batch {self.batch}"


@contextlib.contextmanager
def alone_in(out: Path, **settings: Sequence[Any]) -> Iterator[None]:
    """Locks the folder of --out for this run, after a check that no list of `settings` has a value twice.

    Raises:
      ValueError, OSError: if the folder cannot be made, if another process writes to it, or if a value occurs twice.
    """
    for name, values in settings.items():
        if len(set(values)) < len(values):
            raise ValueError(f"--{name} {' '.join(map(str, values))}: each once")
    with lock.held(lock.of_folder(out)):
        yield


def status(record: dict[str, Any]) -> int:
    """The exit status: 1 if a text differs from that of plain decoding although the same text is promised."""
    speculative = [row for row in record["rows"] if "accept" in row]
    differs = any(row["differing_prompts"] and is_plain_text(row, row["temperature"]) for row in speculative)
    return 1 if differs and record["is_promised"] else 0


def read_tasks(work: Workload, params) -> dict[str, list[BenchPrompt]]:
    """The prompts of every task, each given as TASK=FILE, that are short enough for `max_len`."""
    if not work.prompts:
        return {"demo": work.read(params, None)}
    tasks = {}
    for named in work.prompts:
        task, _, file = named.rpartition("=")
        task = task or Path(file).stem
        if task in tasks or task == ALL:
            raise ValueError(f"--prompts {named}: there is a task {task!r} already; write NAME={file}")
        tasks[task] = work.read(params, [file])
    return tasks


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The methods, prompts and settings to measure. Settings are the product of tasks, temperatures and batches."""

    work: Workload
    modes: Sequence[Mode]
    """The first is plain decoding, PLAIN. Other plain loops may follow."""
    tasks: Mapping[str, Sequence[BenchPrompt]]
    temperatures: Sequence[float]
    batches: Sequence[int] = (1,)
    methods: Mapping[str, MethodOptions] = dataclasses.field(default_factory=dict)
    """The methods of which the modes were made, for the record."""
    references: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For each method, the other method by which its speed is also divided."""
    most_prompts: int | None = None
    """Most prompts of a task that are decoded, but at least one batch; None: all full batches."""
    warms_all: bool = True
    """As in `time_modes`."""
    with_stages: bool = False
    """Whether the stages of a round are also timed."""

    @property
    def settings(self) -> list[Setting]:
        """All settings, in the order in which they are measured."""
        return [Setting(task, t, b) for t in self.temperatures for b in self.batches for task in self.tasks]

    def prompts(self, setting: Setting) -> Sequence[BenchPrompt]:
        """The prompts of the setting's task that fill batches."""
        found = self.tasks[setting.task]
        num = len(found) if self.most_prompts is None else min(len(found), max(setting.batch, self.most_prompts))
        return found[: num // setting.batch * setting.batch]

    def run(self, path: Path | None = None) -> dict[str, Any]:
        """Measures every setting and returns the record. Its `rows` have one row of figures per setting and method.

        Args:
          path: the record is written there after each setting, so that an interrupted run keeps its figures.
        Raises:
          ValueError: if a batch is larger than a task.
        """
        fewest = min(map(len, self.tasks.values()))
        if max(self.batches) > fewest:
            raise ValueError(f"--batch {max(self.batches)}: a task has {fewest} prompts, which must fill a batch")
        record, runs, settings = self._head(), {}, self.settings
        passes = self.work.repeats + self.warms_all
        left = _Left(sum(len(self.prompts(s)) // s.batch * passes for s in settings), self.warms_all)
        for number, setting in enumerate(settings, 1):
            full, of = len(self.prompts(setting)), len(self.tasks[setting.task])
            say(f"setting {number} of {len(settings)}: {setting.title}, {full} of {of} prompts in full batches")
            runs[setting] = self._time(setting, left)
            found = self._rows(setting, runs[setting])
            record["rows"] += found
            if setting.temperature == min(self.temperatures):
                repeated = pooled_repeated_ngram_share(runs[setting].texts(PLAIN))
                record["repeated_4gram_share"][setting.task] = repeated
            _write(path, record)
            say("  " + ", ".join(_in_short(row) for row in found))
        if len(self.tasks) > 1 and self.most_prompts is None:
            for t in self.temperatures:
                for b in self.batches:
                    whole = pooled([runs[Setting(task, t, b)] for task in self.tasks])
                    record["rows"] += result_rows(Setting(ALL, t, b), self.modes, whole, self.references)
            _write(path, record)
        return record

    def _head(self) -> dict[str, Any]:
        """The record before the first setting is measured."""
        params, work = self.modes[0].params, self.work
        lengths = {task: sorted(len(p.tokens(params.tokenizer)) for p in found) for task, found in self.tasks.items()}
        return {
            "command": work.command_line,
            "hardware": hardware(),
            "target": model_record(params.target),
            "drafters": {mode.name: model_record(mode.params.drafter) for mode in self.modes if not mode.is_plain},
            "bits_per_byte": {task: held_out_bits_per_byte(params, found) for task, found in self.tasks.items()},
            "repeated_4gram_share": {},
            "dtype": self.modes[0].dtype,
            "precision": params.precision,
            "is_promised": is_promised(params),
            "arithmetic": params.arithmetic,
            "max_new_tokens": work.max_new_tokens,
            "repeats": work.repeats,
            "seed": work.seed,
            "num_prompts": {task: len(found) for task, found in self.tasks.items()},
            "prompt_tokens": {
                task: {"min": found[0], "median": statistics.median(found), "max": found[-1]}
                for task, found in lengths.items()
            },
            "prompt_files": work.prompt_files,
            "half": work.half,
            "references": dict(self.references),
            "methods": {name: method.changes for name, method in self.methods.items()},
            "kind_of_figures": "measured; prefill excluded, except from figures of whole calls; end tokens "
            + ("honoured" if self.modes[0].eos is None else "ignored"),
            "rows": [],
        }

    def _time(self, setting: Setting, left: _Left) -> Runs:
        return time_modes(
            self.modes,
            [prompt.tokens(self.modes[0].params.tokenizer) for prompt in self.prompts(setting)],
            batch=setting.batch,
            max_new_tokens=self.work.max_new_tokens,
            temperature=setting.temperature,
            seed=self.work.seed,
            repeats=self.work.repeats,
            progress=left.progress,
            warms_all=self.warms_all,
        )

    def _rows(self, setting: Setting, runs: Runs) -> list[dict[str, Any]]:
        """The rows of a setting, with the figures of each prompt and the figures that are measured separately."""
        params, prompts, work = self.modes[0].params, self.prompts(setting), self.work
        rows = result_rows(setting, self.modes, runs, self.references)
        given = [prompt.tokens(params.tokenizer) for prompt in self.tasks[setting.task]]
        for mode, row in zip(self.modes, rows, strict=True):
            if setting.batch == 1:
                row["prompts"] = [{"name": p.name} | call_record(mode.name, i, runs) for i, p in enumerate(prompts)]
            row["differences"] = differences(mode.name, runs, prompts)
            if gap.has_gap(mode, setting.temperature):
                row["gap"] = gap.gap_by_depth(mode, given, work.seed, work.max_new_tokens, setting.temperature)
            # With reuse a round may run no trunk, so stages timed one by one would not add up to it.
            how = mode.how
            if self.with_stages and how.tree is not None and how.reuse == NO_REUSE_FORM and how.lossy is None:
                say(f"timing the stages of tree {how.tree.name}")
                row["stages"] = profile_mode(mode, given[0], work.max_new_tokens, setting.temperature).record()
        if any(mode.how.lossy for mode in self.modes):  # a lossy text may be worse, so its speed alone is not enough
            for row in rows:
                row["task_score"] = task_score(params, prompts, runs.texts(row["method"]))
        return rows


def over_contexts(
    work: Workload,
    params: Params,
    found: Sequence[BenchPrompt],
    trees: Sequence[TreeConfig | None],
    tuned: Any,
    batches: Sequence[int],
    contexts: Sequence[int],
    temperatures: Sequence[float],
) -> Experiment:
    """The experiment of trees, or of what `decode` chooses, over batches, lengths of prompts and temperatures.

    End tokens are ignored, so all texts of a batch end together.

    Args:
      found: the prompts that are joined or cut to these lengths.
      trees: every round verifies all nodes of its tree; None: `decode` chooses.
      tuned: as `decode` takes it.
      contexts: lengths of prompts in tokens.
    Raises:
      ValueError: if prompt and answer together exceed `max_len`.
    """
    if max(contexts) + work.max_new_tokens > params.max_len:
        raise ValueError(
            f"--contexts {max(contexts)} and --max-new-tokens {work.max_new_tokens}: together more than"
            f" max_len={params.max_len}"
        )
    modes = [Mode(PLAIN, params, eos=())]
    for tree in trees:
        how = Speculation(tuned=tuned) if tree is None else Speculation(tree)
        modes.append(Mode(DEFAULT if tree is None else f"tree {tree.name}", params, how, eos=()))
    tasks = {}
    for context in contexts:
        rows = joined_contexts(params, found, context, max(FEWEST_ROWS, *batches))
        tasks[f"context {context}"] = [BenchPrompt(str(i), "", ids=tuple(ids)) for i, ids in enumerate(rows)]
    return Experiment(work, modes, tasks, temperatures, batches, most_prompts=FEWEST_ROWS)


class _Left:
    """Reports the progress of a run over many settings, and about how long the rest will take.

    Args:
      num: batches of prompts, including those of the warm-up if all prompts warm up.
      warms_all: whether all prompts warm up. If only some do, their batches are not counted.
    """

    def __init__(self, num: int, warms_all: bool) -> None:
        self.num, self.done, self.start = num, 0, time.perf_counter()
        self.warms_all = warms_all

    def progress(self, what: str, done: int, num: int) -> None:
        """Prints a line every ten batches."""
        if done % 10 == 0:
            seconds = (time.perf_counter() - self.start) * (self.num - self.done) / max(self.done, 1)
            left = f", about {max(seconds, 60) / 60:.0f} min left" if self.done >= 10 else ""
            say(f"  {what}: {done + 1} of {num}{left}")
        if self.warms_all or not what.startswith("warming"):
            self.done = min(self.done + 1, self.num)


def result_rows(
    setting: Setting, modes: Sequence[Mode], runs: Runs, references: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The figures of every mode in a setting.

    `over_plain` is the ratio to the fastest plain loop of the same dtype. `over_plain_whole` is the same ratio with
    prefill. `over_fastest_plain` is the ratio to the fastest plain loop of any dtype, if several are timed.
    """
    plain, rows = [mode for mode in modes if mode.is_plain], []
    for mode in modes:
        own = None if mode.is_plain else fastest([m.name for m in plain if m.dtype == mode.dtype], runs)
        rival = None if mode.is_plain or len(plain) < 2 else fastest([m.name for m in plain], runs)

        def over(name: str | None, whole: bool = False, mode: Mode = mode) -> dict[str, Any] | None:
            return None if name is None else speedup(mode.name, name, runs, whole=whole)

        row = {"method": mode.name, **dataclasses.asdict(setting), **mode_record(mode, runs, PLAIN)}
        row |= {"num_texts": len(runs.texts(PLAIN)), "over_plain": over(own), "over_fastest_plain": over(rival)}
        row["over_plain_whole"] = over(own, whole=True) if runs.whole_seconds else None
        rows.append(row | {"over_reference": over(references.get(mode.name))})
    return rows


def differences(name: str, runs: Runs, prompts: Sequence[BenchPrompt]) -> list[dict[str, Any]]:
    """The prompts whose text differs from plain decoding, and the first token that differs."""
    parted = zip(prompts, map(first_difference, runs.texts(name), runs.texts(PLAIN)), strict=True)
    return [{"name": prompt.name, "index": index} for prompt, index in parted if index is not None]


def pooled(runs: Sequence[Runs]) -> Runs:
    """The runs of all tasks, pooled into one."""
    names = runs[0].results
    repeats = range(len(next(iter(runs[0].seconds.values()))))

    def joined(clock: str) -> dict[str, list[list[float]]]:
        found = [getattr(one, clock) for one in runs]
        return {name: [[s for one in found for s in one[name][r]] for r in repeats] for name in names if found[0]}

    results = {name: [result for one in runs for result in one.results[name]] for name in names}
    return Runs(results, joined("seconds"), joined("whole_seconds"))


def _write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, record)


def _in_short(row: dict[str, Any]) -> str:
    ratio = row["over_plain"]
    if ratio is None:
        return f"{row['method']} {row['tokens_per_second']['median']:.0f} tokens/s"
    differing = len(row["differing_prompts"]) if is_plain_text(row, row["temperature"]) else 0
    return f"{row['method']} {ratio['value']:.2f}" + (f" ({differing} texts differ)" if differing else "")
