"""`hsd bench`: compares ways to decode. The work is done in `lab/bench/experiment.py`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses

from hsd_jax.cli import options
from hsd_jax.cli.options import add_value
from hsd_jax.lab.bench.presets import PRESETS
from hsd_jax.lab.bench.prompts import RunOptions


def add_parser(commands) -> None:
    """Declares `hsd bench`."""
    parser = options.add_command(
        commands,
        "bench",
        run,
        "compare the speed of speculative and plain decoding",
        "Decode the prompts of every task by every method, for every temperature and batch size. The methods and\n"
        "plain decoding take turns on every prompt, in one process. Times plain and tokens/s exclude prefill. End\n"
        "tokens are honoured without --contexts. Speeds are medians over the repeats. Ratios have a 95 % interval\n"
        "over batches of prompts, from 8 batches on (paired bootstrap). The exit status is 1 if a text differs from\n"
        "that of plain decoding where it must not.",
        """
hsd bench --demo
hsd bench --target smollm2 --spec-bench question.jsonl --limit 80 --repeats 1 --temperatures 0 0.8 --out runs/tasks
hsd bench --target DIR --drafter DIR --methods trees --prompts chat=dev.jsonl maths=test.jsonl --out runs/trees
hsd bench --demo --methods batches
hsd bench --demo --trees 4x3x1,8x5x2 --stages

A file of methods has one line per method; defaults: the drafter of the command line, its own tree, match:
  hidden: {tree: 8x5x2}
  standard: {drafter: runs/small-lm, tree: 5x4x1, accept: recursive, reference: true}
  copied: {drafter: lookup, tree: 8x7x1}
`reference: true` fills a column with the ratios to that method. docs/cli.md, "A file of methods", has all keys.
""",
    )
    options.add_model_arguments(parser)
    what = f"YAML, or one of {', '.join(PRESETS)}"
    add_value(parser, "--methods FILE", str, what, without="what `decode` does by itself")
    add_value(parser, "--trees NxDxW,...", str, "also these trees of the drafter, for example 4x3x2,3.2.1")
    group = parser.add_argument_group("prompts and passes")
    prompts = {"metavar": "TASK=FILE", "help": "one task per file (default: the dozen prompts of the demo)"}
    options.add_record(group, RunOptions, prompts=prompts, command_line=None)
    group.add_argument("--stages", action="store_true", help="also time the stages of a round of every requested tree")
    what = "gets bench.json with every figure, bench.md and, with matplotlib, bench.png"
    add_value(group, "--out FOLDER", options.NEW_FOLDER, what)


def run(args: argparse.Namespace) -> int:
    """Measures the methods in turns with plain decoding."""
    from hsd_jax.host import lock
    from hsd_jax.lab.bench import experiment, methods, prompts, report
    from hsd_jax.measure.speeds import parse_trees

    if hasattr(args, "spec_bench"):
        what = "--spec-bench, whose tasks are read whole and through the chat template"
        options.refuse(args, what, "half", "skip_bad_lines")
    named, work = methods.read_methods(args.methods or "default")
    work = dataclasses.replace(work, **options.given(args, RunOptions))
    for tree in parse_trees(args.trees) if args.trees else ():
        named[f"tree {tree.name}"] = methods.MethodOptions(tree=tree.name)
    with contextlib.nullcontext() if args.out is None else lock.held(args.out):
        params = options.load_params(args)
        tasks = prompts.read_tasks(work, params)
        modes = methods.make_modes(params, named, options.other_drafters(args, params))
        if work.contexts:
            modes = [dataclasses.replace(mode, text={**mode.text, "eos": ()}) for mode in modes]
            tasks = prompts.at_contexts(params, tasks, work.contexts, work.max_new_tokens)
        path = None if args.out is None else args.out / "bench.json"
        record = experiment.run_experiment(work, modes, tasks, named, args.stages, path)
        tables, foot = report.tables_of(record), report.footer(record)
        report.show(tables, foot, args.out and args.out / "bench.md")
        if args.out is not None:
            report.plot(record, args.out / "bench.png")
    return experiment.status(record)
