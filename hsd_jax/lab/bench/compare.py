"""Any drafters, trees, rules, temperatures, batch sizes and tasks, side by side in one process.

Every method decodes the same prompts as plain decoding does, interleaved with it. Methods are described in a YAML
file; the rest is the product of the lists on the command line. Read first: `measure.py`; next:
`compare_report.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from hsd_jax.drafters.table import method_of
from hsd_jax.host import lock
from hsd_jax.host.files import read_yaml, write_json
from hsd_jax.lab.bench import gap, prompts
from hsd_jax.lab.bench.hierarchy import stacked
from hsd_jax.lab.bench.identity import first_difference
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.lab.bench.quality import held_out_bits_per_byte, model_record, pooled_repeated_ngram_share, task_score
from hsd_jax.lab.bench.tables import say
from hsd_jax.params import ALPHA, Params, default_tree, rescore
from hsd_jax.planning.ahead import pearl
from hsd_jax.planning.measure import Mode, Runs, call_record, mode_record, parse_tree, speedup, time_modes

PLAIN = "plain"
KEYS = {"drafter": str, "tree": str, "accept": str, "draw": str, "reuse": str, "lossy": str}
KEYS |= {"rescore": str, "alpha": float, "stack": str, "pearl": int, "adaptive": bool}
KEYS |= {"token_info": bool, "reference": bool}
"""What a method may say, and the type of its value."""
CHOSEN = "chosen"
"""As a tree: left to `decode`, plain decoding included, as by default."""
ALL = "all"
"""The task that holds all others."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where the methods are compared."""

    task: str
    temperature: float
    batch: int


@contextlib.contextmanager
def alone_in(out: Path, **settings: Sequence[Any]) -> Iterator[None]:
    """Keeps the folder of --out for this run, after a look at lists of settings that must name each value once.

    Raises:
      ValueError, OSError: if it cannot be made, another process writes to it, or a value is there twice.
    """
    for name, values in settings.items():
        if len(set(values)) < len(values):
            raise ValueError(f"--{name} {' '.join(map(str, values))}: each once")
    with lock.held(lock.of_folder(out)):
        yield


def status(record: dict[str, Any]) -> int:
    """1 if a text differs from plain decoding where none may: under match, in exact precision."""
    wrong = [row for row in record["rows"] if row.get("accept") == "match" and row["differing_prompts"]]
    return 1 if wrong and record["precision"] == "exact" else 0


def read_methods(path: str | Path) -> dict[str, dict[str, Any]]:
    """What each method of a YAML file changes.

    Raises:
      FileNotFoundError, ValueError: naming the method and the key.
    """
    found = read_yaml(path)
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path}: expected NAME: {{KEY: VALUE, ...}}, a line a method; keys are {', '.join(KEYS)}")
    methods = {str(name): about or {} for name, about in found.items()}
    for name, about in methods.items():
        if name == PLAIN:
            raise ValueError(f"{path}: {PLAIN!r} is always measured; give the method another name")
        if not isinstance(about, dict) or (wrong := [key for key in about if key not in KEYS]):
            shown = wrong[0] if isinstance(about, dict) else about
            raise ValueError(f"{path}: method {name!r}: {shown!r} is none of {', '.join(KEYS)}")
        for key, value in about.items():
            if type(value) is not KEYS[key]:
                wanted = {bool: "true or false", float: "a number like 0.5", int: "a whole number"}.get(
                    KEYS[key], "a text, in quotes"
                )
                raise ValueError(f"{path}: method {name!r}: {key}: {value!r}: expected {wanted}")
    if sum(bool(about.get("reference")) for about in methods.values()) > 1:
        raise ValueError(f"{path}: at most one method may say reference: true")
    return methods


def make_modes(params, about: dict[str, dict[str, Any]], load: Callable[[str], Any]) -> list[Mode]:
    """Plain first, then the methods; all share one target.

    Args:
      load: the models with the drafter of a folder.
    Raises:
      ValueError: naming the method.
    """
    modes = [Mode(PLAIN, params)]
    loaded: dict[str | None, Params] = {None: params}
    for name, method in about.items():
        where = method.get("drafter")
        if where is not None and where not in loaded:
            loaded[where] = dataclasses.replace(load(where), target=params.target)
        found = loaded[where]
        if found.drafter_config is None:
            raise ValueError(f"method {name!r} has no drafter: name one in --methods, or give --drafter DIR")
        try:
            if not method.get("token_info", True):
                found = without_token_info(found)
            if "rescore" in method:
                found = rescore(found, method["rescore"], method.get("alpha", ALPHA))
            if "stack" in method:
                found = stacked(found, method["stack"].split(","))
            if "pearl" in method:
                found = pearl(found, method["pearl"])
            asked = method.get("tree") or (found.tree or default_tree(found.drafter_config)).name
            how = {key: method[key] for key in ("accept", "draw", "reuse", "lossy", "adaptive") if key in method}
            if asked == CHOSEN:
                if how:
                    raise ValueError(f"tree: {CHOSEN}: leaves everything to `decode`; leave out {', '.join(how)}")
                modes.append(Mode(name, found, is_chosen=True))
            else:
                modes.append(Mode(name, found, parse_tree(asked), **how))
            modes[-1].check()
        except ValueError as error:
            raise ValueError(f"method {name!r}: {error}") from error
    return modes


def without_token_info(params):
    """The same models with a bias of zero: every node is drafted from the base logits of its depth.

    The product with the bias still runs, so tau is that of a drafter without token information, the speed is not.

    Raises:
      ValueError: if the drafter has no token information.
    """
    if "injector" not in params.drafter:
        config = params.drafter_config
        can_have = method_of(config).token_information is not None
        has_none = "was trained without (rank 0)" if can_have else f"is of kind {config.kind}"
        raise ValueError(f"token_info: false takes token information from a hidden-state drafter; this one {has_none}")
    injector = params.drafter["injector"]
    drafter = params.drafter | {"injector": injector | {"bias": jnp.zeros_like(injector["bias"])}}
    return dataclasses.replace(params, drafter=drafter)


def read_tasks(work: Workload, params) -> dict[str, list[prompts.BenchPrompt]]:
    """The prompts of every task, short enough for `max_len`."""
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


def measure(
    work: Workload,
    modes: Sequence[Mode],
    about: dict[str, dict[str, Any]],
    references: dict[str, str],
    tasks: dict[str, list[prompts.BenchPrompt]],
    temperatures: Sequence[float],
    batches: Sequence[int],
    path: Path,
    warms_all: bool = True,
) -> dict[str, Any]:
    """Runs every setting and returns the whole record; `rows` are its figures, one a setting and method.

    Args:
      references: the method that others are also divided by.
      warms_all: as in `time_modes`.
      path: gets the record after each setting, so that a run that breaks off leaves what it has measured.
    Raises:
      ValueError: if a batch is larger than a task.
    """
    fewest = min(map(len, tasks.values()))
    if max(batches) > fewest:
        raise ValueError(f"--batch {max(batches)}: a task has {fewest} prompts; allowed are batches that these fill")
    params = modes[0].params
    record = {
        "command": work.command_line,
        "hardware": hardware(),
        "target": model_record(params.target),
        "drafters": {mode.name: model_record(mode.params.drafter) for mode in modes[1:]},
        "bits_per_byte": {task: held_out_bits_per_byte(params, found) for task, found in tasks.items()},
        "repeated_4gram_share": {},
        "dtype": modes[0].dtype,
        "precision": params.precision,
        "max_new_tokens": work.max_new_tokens,
        "repeats": work.repeats,
        "num_prompts": {task: len(found) for task, found in tasks.items()},
        "half": work.half,
        "references": references,
        "methods": about,
        "kind_of_figures": "measured; prefill excluded unless whole calls are named; end tokens honoured",
        "rows": [],
    }
    settings = [Setting(task, t, b) for t in temperatures for b in batches for task in tasks]
    rows, runs = record["rows"], {}
    left = _Left(sum(len(tasks[s.task]) // s.batch * (work.repeats + warms_all) for s in settings), warms_all)
    for number, setting in enumerate(settings, 1):
        full = len(tasks[setting.task]) // setting.batch * setting.batch
        say(
            f"setting {number} of {len(settings)}: {setting.task}, temperature {setting.temperature:g}, batch"
            f" {setting.batch}, {full} of {len(tasks[setting.task])} prompts in full batches"
        )
        runs[setting] = time_modes(
            modes,
            [prompt.tokens(params.tokenizer) for prompt in tasks[setting.task][:full]],
            batch=setting.batch,
            max_new_tokens=work.max_new_tokens,
            temperature=setting.temperature,
            seed=work.seed,
            repeats=work.repeats,
            progress=left.progress,
            warms_all=warms_all,
        )
        found = _rows(setting, modes, runs[setting], references)
        for mode, row in zip(modes, found, strict=True):
            if setting.batch == 1:
                named = zip(range(full), tasks[setting.task], strict=True)
                row["prompts"] = [{"name": p.name} | call_record(mode.name, i, runs[setting]) for i, p in named]
            row["differences"] = _differences(mode.name, runs[setting], tasks[setting.task])
            if gap.has_gap(mode, setting.temperature):
                given = [prompt.tokens(params.tokenizer) for prompt in tasks[setting.task]]
                row["gap"] = gap.measure(mode, given, work.seed, work.max_new_tokens, setting.temperature)
        if any(mode.lossy for mode in modes):  # speed alone says nothing of texts that are not the target's
            for row in found:
                row["task_score"] = task_score(params, tasks[setting.task][:full], runs[setting].texts(row["method"]))
        rows += found
        if setting.temperature == 0:
            record["repeated_4gram_share"][setting.task] = pooled_repeated_ngram_share(runs[setting].texts(PLAIN))
        write_json(path, record)
        say("  " + ", ".join(_in_short(row) for row in found))
    if len(tasks) > 1:
        for t in temperatures:
            for b in batches:
                pooled = _pooled([runs[Setting(task, t, b)] for task in tasks])
                rows += _rows(Setting(ALL, t, b), modes, pooled, references)
        write_json(path, record)
    return record


class _Left:
    """Says how far a run of many settings is, and about how long the rest will take.

    Args:
      num: batches of prompts, those that warm up too where all do.
      warms_all: whether all do; what few warm up for does not count.
    """

    def __init__(self, num: int, warms_all: bool) -> None:
        self.num, self.done, self.start = num, 0, time.perf_counter()
        self.warms_all = warms_all

    def progress(self, what: str, done: int, num: int) -> None:
        """A line every ten batches."""
        if done % 10 == 0:
            seconds = (time.perf_counter() - self.start) * (self.num - self.done) / max(self.done, 1)
            left = f", about {max(seconds, 60) / 60:.0f} min left" if self.done >= 10 else ""
            say(f"  {what}: {done + 1} of {num}{left}")
        if self.warms_all or not what.startswith("warming"):
            self.done = min(self.done + 1, self.num)


def _differences(name: str, runs: Runs, found: Sequence[prompts.BenchPrompt]) -> list[dict[str, Any]]:
    """The prompts whose text parts from plain decoding, and at which token."""
    parted = zip(found, map(first_difference, runs.texts(name), runs.texts(PLAIN)), strict=False)
    return [{"name": prompt.name, "index": index} for prompt, index in parted if index is not None]


def _in_short(row: dict[str, Any]) -> str:
    ratio = row["over_plain"]
    if ratio is None:
        return f"{row['method']} {row['tokens_per_second']['median']:.0f} tokens/s"
    differing = len(row["differing_prompts"])
    return f"{row['method']} {ratio['value']:.2f}" + (f" ({differing} texts differ)" if differing else "")


def _pooled(runs: Sequence[Runs]) -> Runs:
    """The batches of all tasks, as if they were one."""
    names = runs[0].results
    repeats = range(len(next(iter(runs[0].seconds.values()))))

    def joined(clock: str) -> dict[str, list[list[float]]]:
        found = [getattr(one, clock) for one in runs]
        return {name: [[s for one in found for s in one[name][r]] for r in repeats] for name in names if found[0]}

    return Runs(
        {name: [result for one in runs for result in one.results[name]] for name in names},
        joined("seconds"),
        joined("whole_seconds"),
    )


def _rows(setting: Setting, modes: Sequence[Mode], runs: Runs, references: dict[str, str]) -> list[dict[str, Any]]:
    rows = []
    for mode in modes:
        row = {"method": mode.name, **dataclasses.asdict(setting), **mode_record(mode, runs, PLAIN)}
        row["num_texts"] = len(runs.texts(PLAIN))
        row["over_plain"] = None if mode.name == PLAIN else speedup(mode.name, PLAIN, runs)
        is_known = mode.name != PLAIN and runs.whole_seconds
        row["over_plain_whole"] = speedup(mode.name, PLAIN, runs, whole=True) if is_known else None
        reference = references.get(mode.name)
        row["over_reference"] = None if reference is None else speedup(mode.name, reference, runs)
        rows.append(row)
    return rows
