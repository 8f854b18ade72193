"""`hsd bench compare`: methods side by side. The work is done in `lab/bench/compare.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, SEED, TEMPERATURE, add_value


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
hidden-state drafter; `lossy: "linear:0.5"` goes with `accept: recursive` and brings a task score of every method.
""",
    )
    options.add_model_arguments(parser)
    parser.add_argument("--methods", metavar="FILE", help="YAML (default: the loaded drafter, its own tree, match)")
    add_measure_arguments(parser)
    add_value(parser, "--batch B", COUNT, "rows decoded at once", [1], "1", nargs="+")
    add_out_argument(parser, "compare")


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares tasks and temperatures, what `lab/bench/compare.py` reads but for the batch sizes."""
    otherwise = "the dozen prompts of the demo"
    add_value(parser, "--prompts TASK=FILE", str, "one task a file", without=otherwise, nargs="+")
    add_value(parser, "--limit N", COUNT, "prompts of each task", 20)
    options.add_half_argument(parser, "both")
    options.add_chat_argument(parser)
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 128)
    add_value(parser, "--temperatures T", TEMPERATURE, "", [0.0], "0", nargs="+")
    add_value(parser, "--seed", SEED, "of prompt i: seed + i", 0)
    add_value(parser, "--repeats R", COUNT, "timed passes", 3)


def add_out_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Declares --out, the folder of the result."""
    files = f"gets {name}.json, .csv, .md and, with matplotlib, .png"
    parser.add_argument("--out", type=options.NEW_FOLDER, required=True, metavar="FOLDER", help=files)


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes the folder."""
    from hsd_jax.lab.bench import compare, compare_report, prompts
    from hsd_jax.lab.viz import plots

    out, work = args.out, prompts.Workload.of(vars(args))
    with compare.alone_in(out, temperatures=args.temperatures, batch=args.batch):
        about = compare.read_methods(args.methods) if args.methods else {"drafter": {}}
        params = options.load_params(args)
        modes = compare.make_modes(params, about, options.other_drafters(args, params))
        tasks = compare.read_tasks(work, params)
        reference = next((name for name, method in about.items() if method.get("reference")), None)
        rivals = {} if reference is None else {name: reference for name in about if name != reference}
        record = compare.measure(work, modes, about, rivals, tasks, args.temperatures, args.batch, out / "compare.json")
        compare_report.write(record, out, "compare")
        plots.plot_compare(record, out / "compare.png")
    return compare.status(record)
