"""`hsd bench compare`: any drafters, trees, rules, temperatures, batch sizes and tasks, side by side in one process.

Every method decodes the same prompts as plain decoding does, interleaved with it. What a method is stands in a YAML
file; the rest is the product of the lists on the command line. Read first: `hsd_jax/measure.py`; next:
`compare_report.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hsd_jax import lock
from hsd_jax.cli import options, prompts
from hsd_jax.cli.quality import held_out_bits_per_byte, model_record, repeated_4gram_share
from hsd_jax.files import read_yaml, write_json
from hsd_jax.machine import hardware
from hsd_jax.measure import Mode, Runs, mode_record, speedup, time_modes

PLAIN = "plain"
KEYS = {"drafter": str, "tree": str, "accept": str, "draw": str, "reuse": str, "token_info": bool, "reference": bool}
"""What a method may say, and the type of its value."""
ALL = "all"
"""The task that holds all others."""
DEFAULT_LIMIT = 20


def add_parser(commands) -> None:
    """Declares `hsd bench compare`."""
    parser = options.add_command(
        commands,
        "compare",
        run,
        "compare drafters, trees and rules on several tasks",
        "Decode the prompts of every task by every method, interleaved in one process with plain decoding, for every\n"
        "temperature and batch size. Prefill is excluded, end tokens are honoured; speeds are medians over the\n"
        "repeats, ratios carry a 95 % interval over prompts (paired bootstrap).",
        """
hsd bench compare --demo --out runs/compare
hsd bench compare --demo --methods methods.yaml --prompts dialogue=dev.jsonl maths=test.jsonl --out runs/compare
hsd bench compare --target DIR --methods methods.yaml --temperatures 0 0.8 1 --batch 1 4 --out runs/compare

methods.yaml, a line a method; what is left out is the drafter of the command line, its own tree, match:
  hidden: {tree: 8x5x2}
  standard: {drafter: runs/small-lm, tree: 5x4x1, accept: recursive, reference: true}
  copied: {drafter: lookup, tree: 8x7x1}
With `reference: true` a second column gives the ratio to that method; `reuse: FORM` and `token_info: false` change the
hidden-state drafter.
""",
    )
    options.add_model_arguments(parser)
    parser.add_argument("--methods", metavar="FILE", help="YAML (default: the loaded drafter, its own tree, match)")
    add_measure_arguments(parser)
    parser.add_argument(
        "--batch", type=options.COUNT, nargs="+", default=[1], metavar="B", help="rows decoded at once (default: 1)"
    )
    parser.add_argument(
        "--out",
        type=options.NEW_FOLDER,
        required=True,
        metavar="FOLDER",
        help="gets compare.json, .csv, .md and, with matplotlib, .png",
    )


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares tasks and temperatures, what `measure` reads but for the batch sizes."""
    parser.add_argument(
        "--prompts", nargs="+", metavar="TASK=FILE", help="one task a file (default: the dozen prompts of the demo)"
    )
    parser.add_argument(
        "--limit",
        type=options.COUNT,
        default=DEFAULT_LIMIT,
        metavar="N",
        help=f"prompts of each task (default: {DEFAULT_LIMIT})",
    )
    parser.add_argument("--half", choices=prompts.HALVES, help="crc32(id) %% 2: 0 is tune, 1 is report (default: both)")
    parser.add_argument(
        "--max-new-tokens", type=options.COUNT, default=128, metavar="N", help="per prompt (default: 128)"
    )
    parser.add_argument(
        "--temperatures", type=options.TEMPERATURE, nargs="+", default=[0.0], metavar="T", help="(default: 0)"
    )
    parser.add_argument("--seed", type=options.SEED, default=0, help="of prompt i: seed + i (default: 0)")
    parser.add_argument("--repeats", type=options.COUNT, default=3, metavar="R", help="timed passes (default: 3)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where the methods are compared."""

    task: str
    temperature: float
    batch: int


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes the folder."""
    from hsd_jax.cli import compare_report

    with folder_of(args) as out:
        about = read_methods(args.methods) if args.methods else {"drafter": {}}
        params = options.load_params(args)
        modes = make_modes(args, params, about)
        tasks = read_tasks(args, params)
        reference = next((name for name, method in about.items() if method.get("reference")), None)
        references = {} if reference is None else {name: reference for name in about if name != reference}
        record = measure(args, modes, about, references, tasks, args.batch, out / "compare.json")
        compare_report.write(record, out, "compare")
        compare_report.plot(record, out / "compare.png")
    return status(record)


@contextlib.contextmanager
def folder_of(args: argparse.Namespace) -> Iterator[Path]:
    """The folder of --out, for this run alone, after the settings that can be wrong before anything is loaded.

    Raises:
      ValueError, OSError: if it cannot be made, another process writes to it, or a setting is given twice.
    """
    for name in ("temperatures", "batch"):
        values = getattr(args, name, [])
        if len(set(values)) < len(values):
            raise ValueError(f"--{name} {' '.join(map(str, values))}: each once")
    with lock.held(lock.of_folder(args.out)):
        yield args.out


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
                wanted = "true or false" if KEYS[key] is bool else "a text"
                raise ValueError(f"{path}: method {name!r}: {key}: {value!r}: expected {wanted}")
    if sum(bool(about.get("reference")) for about in methods.values()) > 1:
        raise ValueError(f"{path}: at most one method may say reference: true")
    return methods


def make_modes(args: argparse.Namespace, params, about: dict[str, dict[str, Any]]) -> list[Mode]:
    """Plain first, then the methods; all share one target."""
    from hsd_jax.params import default_tree

    loaded, modes = {None: params}, [Mode(PLAIN, params)]
    for name, method in about.items():
        where = method.get("drafter")
        if where not in loaded:
            own = options.load_params(argparse.Namespace(**{**vars(args), "drafter": where}))
            loaded[where] = dataclasses.replace(own, target=params.target)
        found = loaded[where]
        if found.drafter_config is None:
            raise ValueError(f"method {name!r} has no drafter: name one in --methods, or give --drafter DIR")
        try:
            own = found.tree or default_tree(found.drafter_config)
            tree = options.parse_tree(method["tree"]) if "tree" in method else own
            if not method.get("token_info", True):
                found = without_token_info(found)
            how = {key: method[key] for key in ("accept", "draw", "reuse") if key in method}
            modes.append(Mode(name, found, tree, **how))
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
    import jax.numpy as jnp

    from hsd_jax.drafters.table import method_of

    if "injector" not in params.drafter:
        config = params.drafter_config
        can_have = method_of(config).token_information is not None
        has_none = "was trained without (rank 0)" if can_have else f"is of kind {config.kind}"
        raise ValueError(f"token_info: false takes token information from a hidden-state drafter; this one {has_none}")
    injector = params.drafter["injector"]
    drafter = params.drafter | {"injector": injector | {"bias": jnp.zeros_like(injector["bias"])}}
    return dataclasses.replace(params, drafter=drafter)


def read_tasks(args: argparse.Namespace, params) -> dict[str, list[prompts.BenchPrompt]]:
    """The prompts of every task, short enough for `max_len`."""

    def read(files: list[str] | None) -> list[prompts.BenchPrompt]:
        return prompts.for_checkpoint(params, files, args.half, args.limit, args.max_new_tokens)

    if not args.prompts:
        return {"demo": read(None)}
    tasks = {}
    for named in args.prompts:
        task, _, file = named.rpartition("=")
        task = task or Path(file).stem
        if task in tasks or task == ALL:
            raise ValueError(f"--prompts {named}: there is a task {task!r} already; write NAME={file}")
        tasks[task] = read([file])
    return tasks


def measure(
    args: argparse.Namespace,
    modes: Sequence[Mode],
    about: dict[str, dict[str, Any]],
    references: dict[str, str],
    tasks: dict[str, list[prompts.BenchPrompt]],
    batches: Sequence[int],
    path: Path,
) -> dict[str, Any]:
    """Runs every setting and returns the whole record; `rows` are its figures, one a setting and method.

    Args:
      references: the method that others are also divided by.
      path: gets the record after each setting, so that a run that breaks off leaves what it has measured.
    Raises:
      ValueError: if a batch is larger than a task.
    """
    fewest = min(map(len, tasks.values()))
    if max(batches) > fewest:
        raise ValueError(f"--batch {max(batches)}: a task has {fewest} prompts; allowed are batches that these fill")
    params = modes[0].params
    record = {
        "command": args.command_line,
        "hardware": hardware(),
        "target": model_record(params.target),
        "drafters": {mode.name: model_record(mode.params.drafter) for mode in modes[1:]},
        "bits_per_byte": {task: held_out_bits_per_byte(params, found) for task, found in tasks.items()},
        "repeated_4gram_share": {},
        "dtype": modes[0].dtype,
        "precision": params.precision,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "num_prompts": {task: len(found) for task, found in tasks.items()},
        "half": args.half,
        "references": references,
        "methods": about,
        "kind_of_figures": "measured; prefill excluded; end tokens honoured",
        "rows": [],
    }
    settings = [Setting(task, t, b) for t in args.temperatures for b in batches for task in tasks]
    rows, runs = record["rows"], {}
    for number, setting in enumerate(settings, 1):
        full = len(tasks[setting.task]) // setting.batch * setting.batch
        options.say(
            f"setting {number} of {len(settings)}: {setting.task}, temperature {setting.temperature:g}, batch"
            f" {setting.batch}, {full} of {len(tasks[setting.task])} prompts in full batches"
        )
        runs[setting] = time_modes(
            modes,
            [prompt.text for prompt in tasks[setting.task][:full]],
            batch=setting.batch,
            max_new_tokens=args.max_new_tokens,
            temperature=setting.temperature,
            seed=args.seed,
            repeats=args.repeats,
            progress=_progress,
        )
        rows += _rows(setting, modes, runs[setting], references)
        if setting.temperature == 0:
            record["repeated_4gram_share"][setting.task] = repeated_4gram_share(runs[setting].texts(PLAIN))
        write_json(path, record)
    if len(tasks) > 1:
        for t in args.temperatures:
            for b in batches:
                pooled = _pooled([runs[Setting(task, t, b)] for task in tasks])
                rows += _rows(Setting(ALL, t, b), modes, pooled, references)
        write_json(path, record)
    return record


def _progress(what: str, done: int, num: int) -> None:
    if done % 10 == 0:
        options.say(f"  {what}: {done + 1} of {num}")


def _pooled(runs: Sequence[Runs]) -> Runs:
    """The batches of all tasks, as if they were one."""
    names = runs[0].results
    repeats = range(len(next(iter(runs[0].seconds.values()))))
    return Runs(
        {name: [result for one in runs for result in one.results[name]] for name in names},
        {name: [[s for one in runs for s in one.seconds[name][r]] for r in repeats] for name in names},
    )


def _rows(setting: Setting, modes: Sequence[Mode], runs: Runs, references: dict[str, str]) -> list[dict[str, Any]]:
    rows = []
    for mode in modes:
        row = {"method": mode.name, **dataclasses.asdict(setting), **mode_record(mode, runs, PLAIN)}
        row["num_texts"] = len(runs.texts(PLAIN))
        row["over_plain"] = None if mode.name == PLAIN else speedup(mode.name, PLAIN, runs)
        reference = references.get(mode.name)
        row["over_reference"] = None if reference is None else speedup(mode.name, reference, runs)
        rows.append(row)
    return rows
