"""`hsd bench` and its commands. Most of them run an `Experiment` (`lab/bench/experiment.py`)."""

from __future__ import annotations

import argparse
from typing import Any

from hsd_jax.cli import options, scored
from hsd_jax.cli.options import COUNT, TEMPERATURE, add_value


def add_parser(commands) -> None:
    """Declares `hsd bench` and its commands."""
    parser = options.add_command(
        commands,
        "bench",
        run,
        "compare the speed of speculative and plain decoding",
        "Measure tau, speed and the stages of a round at batch 1. End tokens are honoured, and prefill is\n"
        "excluded. Plain and speculative runs are interleaved in one process. Speeds are medians over the repeats,\n"
        "with ranges.",
        """
hsd bench --demo
hsd bench --demo --prompts dev.jsonl --half report --limit 40 --plain-variants --json OUT.json --plot OUT.png
hsd bench --demo --temperature 1 --accept match recursive
hsd bench --demo --reuse none sum skip:3
hsd bench --demo --prompts dev.jsonl --half report --batches 1,2,4,8 --contexts 64,1024 --repeats 5
hsd bench --target DIR --drafter DIR --prompts questions.jsonl --trees 4x3x2,8x5x3,16x6x4 --repeats 5
""",
    )
    options.add_model_arguments(parser, is_required=False)
    options.add_prompt_arguments(parser)
    options.add_length_arguments(parser, 128)
    add_value(parser, "--temperature T", TEMPERATURE, "0 is greedy", 0.0)
    add_value(parser, "--repeats R", COUNT, "timed passes", 3)
    tree = options.add_tree_arguments(parser)
    tree.add_argument("--trees", metavar="NxDxW,...", help="several trees in one run, for example 4x3x2,3.2.1")
    options.add_rule_arguments(tree, nargs="+")
    options.add_tuned_argument(tree)
    what = "also time plain decoding in float32 and bfloat16, with 1 row and padded to 4; compare with the fastest"
    parser.add_argument("--plain-variants", action="store_true", help=what)
    grid = parser.add_argument_group("the defaults, or the given trees, beside plain decoding for each setting")
    counts, temperatures = options.numbers(COUNT), options.numbers(TEMPERATURE)
    add_value(grid, "--batches N,...", counts, "rows decoded at once, for example 1,2,4,8,16,32")
    add_value(grid, "--contexts N,...", counts, "tokens of a prompt, for example 64,256,1024,1800")
    add_value(grid, "--temperatures T,...", temperatures, "0 is greedy", without="0,0.8")
    parser.add_argument("--no-stages", action="store_true", help="do not time the stages of a round")
    options.add_json_argument(parser)
    options.add_plot_argument(parser)
    more = parser.add_subparsers(title="more", metavar="COMMAND", action=options.OwnOptions)
    for add in (_add_tasks, _add_compare, _add_ablate, _add_budget, scored.add_rescore, scored.add_recall):
        add(more)


def run(args: argparse.Namespace) -> int:
    """Measures plain decoding and the trees, rules and forms of reuse that the command line gives."""
    from hsd_jax.lab.bench import experiment, methods, report
    from hsd_jax.lab.bench.prompts import Workload
    from hsd_jax.lab.viz import plots
    from hsd_jax.planning.measure import parse_trees

    params = options.load_pair(args, "bench")
    tuned = options.tuned_of(args, params)
    work = Workload.of(vars(args))
    found = work.read(params, args.prompts)
    trees = parse_trees(args.trees) if args.trees else None
    columns, has_details = report.CHOICES, False
    if args.batches or args.contexts:
        given = "--batches or --contexts, which measure only the rule match"
        options.refuse(args, given, "accept", "draw", "reuse", "lossy", "plot", "plain_variants")
        sizes = args.batches or [1], args.contexts or [64], args.temperatures or [0.0, 0.8]
        trees = trees or [options.tree_asked(args, params)]
        made = experiment.over_contexts(work, params, found, trees, tuned, *sizes)
    else:
        if args.temperatures:
            raise ValueError("--temperatures goes with --batches or --contexts; give --temperature T without them")
        named = {}
        if isinstance(tuned, bool):
            shapes = trees or [options.tree_of(args, params)]
            named = methods.of_options(shapes, args.accept, args.draw, args.reuse or ["none"], args.lossy)
        modes = methods.make_modes(params, named, options.other_drafters(args, params))
        modes += [] if named else methods.tuned_modes(params, tuned, args.temperature, args.tuned)
        if args.plain_variants:
            modes += methods.plain_variants(
                params, lambda dtype: options.load_params(args, dtype=dtype, quantize=None, drafter=None)
            )
        columns, has_details = [name for name in report.BENCHED if args.plain_variants or "fastest" not in name], True
        more = {"methods": named, "with_stages": not args.no_stages}
        made = experiment.Experiment(work, modes, {"prompts": found}, [args.temperature], **more)
    options.say(f"{len(found)} prompts, {', '.join(mode.name for mode in made.modes)}")
    record = made.run()
    report.show(report.tables_by_setting(record, columns, has_details), report.footer(record, report.NOTE))
    options.write_record(args.json, record)
    if args.plot:
        plots.plot_methods(record, args.plot)
    return experiment.status(record)


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options that `lab/bench/experiment.read_tasks` reads, and temperatures."""
    otherwise = "the dozen prompts of the demo"
    add_value(parser, "--prompts TASK=FILE", str, "one task per file", without=otherwise, nargs="+")
    add_value(parser, "--limit N", COUNT, "prompts of each task", 20)
    options.add_half_argument(parser, "both")
    options.add_chat_argument(parser)
    options.add_skip_argument(parser)
    options.add_length_arguments(parser, 128)
    add_value(parser, "--temperatures T", TEMPERATURE, "0 is greedy", [0.0], "0", nargs="+")
    add_value(parser, "--repeats R", COUNT, "timed passes", 3)


def _add_out_argument(
    parser: argparse.ArgumentParser, name: str, others: str = ", .csv, .md and, with matplotlib, .png"
) -> None:
    """Declares --out, the folder of the results: `name`.json, and the same name with the `others`."""
    add_value(parser, "--out FOLDER", options.NEW_FOLDER, f"gets {name}.json{others}", required=True)


def _finish(
    args: argparse.Namespace, name: str, record: dict[str, Any], tables: Any, plot: Any, *notes: str, foot: Any = ()
) -> int:
    """Prints the tables, writes the results into the folder, and returns the exit status of the command.

    Args:
      notes: as in `report.footer`; `foot`: lines before it.
    """
    from hsd_jax.lab.bench import experiment, report

    report.write(record, tables, [*foot, *report.footer(record, *notes)], args.out, name)
    plot(record, args.out / f"{name}.png")
    return experiment.status(record)


def _add_compare(commands) -> None:
    parser = options.add_command(
        commands,
        "compare",
        run_compare,
        "compare drafters, trees and rules on several tasks",
        "Decode the prompts of every task by every method, for every temperature and batch size. The methods and\n"
        "plain decoding are interleaved in one process. Prefill is excluded, and end tokens are honoured. Speeds\n"
        "are medians over the repeats. Ratios have a 95 % interval over prompts (paired bootstrap).",
        """
hsd bench compare --demo --out runs/compare
hsd bench compare --demo --methods methods.yaml --prompts dialogue=dev.jsonl maths=test.jsonl --out runs/compare
hsd bench compare --target DIR --methods methods.yaml --temperatures 0 0.8 1 --batch 1 4 --out runs/compare

methods.yaml, one line per method; defaults: the drafter of the command line, its own tree, match:
  hidden: {tree: 8x5x2}
  standard: {drafter: runs/small-lm, tree: 5x4x1, accept: recursive, reference: true}
  copied: {drafter: lookup, tree: 8x7x1}
`reference: true` fills the column with the ratios to that method. Other keys: draw, reuse, lossy, rescore, alpha,
stack, pearl, devices, adaptive, token_info. docs/cli.md, "A file of methods", says what each means.
""",
    )
    options.add_model_arguments(parser)
    add_value(parser, "--methods FILE", str, "YAML", without="the loaded drafter, its own tree, match")
    _add_task_arguments(parser)
    add_value(parser, "--batch B", COUNT, "rows decoded at once", [1], "1", nargs="+")
    _add_out_argument(parser, "compare")


def run_compare(args: argparse.Namespace) -> int:
    """Measures the methods of --methods."""
    from hsd_jax.lab.bench import experiment, methods, report
    from hsd_jax.lab.viz import plots

    with experiment.alone_in(args.out, temperatures=args.temperatures, batch=args.batch):
        found = methods.read_methods(args.methods) if args.methods else {"drafter": methods.MethodOptions()}
        params = options.load_params(args)
        reference = next((name for name, method in found.items() if method.reference), None)
        rivals = {} if reference is None else {name: reference for name in found if name != reference}
        record = _experiment(args, params, found, references=rivals, batches=args.batch).run(args.out / "compare.json")
        tables = report.tables_by_setting(record, report.COMPARED)
        return _finish(args, "compare", record, tables, plots.plot_methods, report.NOTE)


def _experiment(args: argparse.Namespace, params: Any, named: Any, **more: Any) -> Any:
    """An `Experiment` of the methods `named` on the tasks of the command line."""
    from hsd_jax.lab.bench import experiment, methods
    from hsd_jax.lab.bench.prompts import Workload

    work, modes = Workload.of(vars(args)), methods.make_modes(params, named, options.other_drafters(args, params))
    tasks = experiment.read_tasks(work, params)
    return experiment.Experiment(work, modes, tasks, args.temperatures, methods=named, **more)


def _add_ablate(commands) -> None:
    parser = options.add_command(
        commands,
        "ablate",
        run_ablate,
        "change one thing at a time around the default",
        "Decode by the drafter as it is, without its token information, with every form of reuse that it allows,\n"
        "and by other drafters. All trees have equal numbers of nodes, and all methods are interleaved on the same\n"
        "prompts. Ratios to the default have a 95 % interval over prompts (paired bootstrap).",
        """
hsd bench ablate --demo --nodes 8,16 --out runs/ablate
hsd bench ablate --target DIR --drafter DIR --drafters medusa=DIR eagle=DIR --prompts chat=dev.jsonl --out runs/ablate
""",
    )
    options.add_model_arguments(parser)
    add_value(parser, "--nodes N,N,...", str, "nodes of a tree, the root included", "8,16", "8,16")
    what = "other drafters to measure: trained without token information, with a reduced draft vocabulary, ..."
    add_value(parser, "--drafters NAME=DIR", str, what, [], nargs="+")
    _add_task_arguments(parser)
    _add_out_argument(parser, "ablate")


def parse_sizes(text: str) -> list[int]:
    """Reads numbers of nodes from a text such as "8,16,32". Raises a ValueError for others."""
    sizes = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    if min(sizes) < 3 or len(set(sizes)) < len(sizes):
        raise ValueError(f"--nodes {text!r}: allowed are different numbers of at least 3, for example 8,16,32")
    return sizes


def run_ablate(args: argparse.Namespace) -> int:
    """Measures one change at a time."""
    from hsd_jax.drafters.table import kinds_with, method_of
    from hsd_jax.lab.bench import experiment, methods, report
    from hsd_jax.lab.viz import plots

    sizes, drafters = parse_sizes(args.nodes), options.named_folders(args.drafters, "--drafters")
    with experiment.alone_in(args.out, temperatures=args.temperatures):
        params = options.load_pair(args, "bench ablate")
        if method_of(params.drafter_config).token_information is None:
            kinds = " or ".join(kinds_with(lambda method: method.token_information is not None))
            raise ValueError(f"a {params.drafter_config.kind} drafter: hsd bench ablate needs one of kind {kinds}")
        found, references = methods.ablations(params.drafter_config, sizes, drafters)
        record = _experiment(args, params, found, references=references).run(args.out / "ablate.json")
        tables = report.tables_by_setting(record, report.COMPARED)
        return _finish(args, "ablate", record, tables, plots.plot_ablate, report.NOTE)


def _add_budget(commands) -> None:
    parser = options.add_command(
        commands,
        "budget",
        run_budget,
        "compare schemes and rules at equal numbers of draft tokens",
        "Decode by SD, SpecTr, SpecInfer, RSD-C, RSD-S, top-k and coupled trees, with equal numbers of draft tokens\n"
        "per round and with equal lengths of the longest path, interleaved with plain decoding. Then count how often\n"
        "the siblings of each rank were accepted.",
        """
hsd bench budget --demo --temperatures 0.8 1 --out runs/budget
hsd bench budget --demo --budgets 6,14 --lengths 3 --prompts chat=dev.jsonl --half report --out runs/budget
""",
    )
    options.add_model_arguments(parser)
    add_value(parser, "--budgets N,...", options.numbers(COUNT), "draft tokens per round", without="6,10,14,21,30")
    add_value(parser, "--lengths L,...", options.numbers(COUNT), "tokens of the longest path", without="2,3,4,5")
    _add_task_arguments(parser)
    _add_out_argument(parser, "budget")


def run_budget(args: argparse.Namespace) -> int:
    """Measures the protocol of RSD."""
    from hsd_jax.lab.bench import budget, experiment, report
    from hsd_jax.lab.viz import plots

    with experiment.alone_in(args.out, temperatures=args.temperatures):
        params = options.load_pair(args, "bench budget")
        protocol = budget.make_protocol(args.budgets, args.lengths, params.drafter_config)
        made = _experiment(args, params, protocol.methods)
        record = budget.run(made, protocol.groups, args.out / "budget.json")
        tables = report.tables_by_group(record, report.BUDGETED)
        return _finish(args, "budget", record, tables, plots.plot_budget, budget.NOTE, report.NOTE)


def _add_tasks(commands) -> None:
    parser = options.add_command(
        commands,
        "tasks",
        run_tasks,
        "measure all methods on Spec-Bench, HumanEval and GSM8K",
        "Decode the first turns of Spec-Bench, the functions of HumanEval and the problems of GSM8K's test file,\n"
        "each through the target's chat template and one prompt at a time. The methods are plain decoding and, in\n"
        "turns with it, the default, chains of 4 and 8 nodes, trees of 8 and 16 nodes, and lookup. The command\n"
        "checks that every text is that of plain decoding.",
        """
hsd bench tasks --target smollm2 --spec-bench question.jsonl --out runs/tasks
hsd bench tasks --target DIR --drafter DIR --spec-bench question.jsonl --per-task 80 --out runs/tasks
hsd bench tasks --target DIR --drafter DIR --humaneval HumanEval.jsonl.gz --gsm8k test.jsonl --out runs/tasks
hsd bench tasks --target DIR --drafter DIR --drafters eagle=DIR --spec-bench question.jsonl --out runs/tasks
""",
    )
    options.add_model_arguments(parser)
    options.add_task_arguments(parser)
    what = "more columns: other drafters, each with its default tree"
    add_value(parser, "--drafters NAME=DIR", str, what, [], nargs="+")
    add_value(parser, "--methods FILE", str, "YAML as for `hsd bench compare`, in place of the preset")
    options.add_length_arguments(parser, 128)
    add_value(parser, "--temperatures T", TEMPERATURE, "0 is greedy", [0.0, 0.8], "0 0.8", nargs="+")
    what = "timed passes; before the first pass, one prompt of each size is decoded to compile"
    add_value(parser, "--repeats R", COUNT, what, 1)
    _add_out_argument(parser, "tasks")


def run_tasks(args: argparse.Namespace) -> int:
    """Measures the preset of methods, or the methods of --methods, on the published tasks."""
    from hsd_jax.lab.bench import experiment, methods, prompts, tasks
    from hsd_jax.lab.viz import plots

    given = {name: getattr(args, name) for name in tasks.READERS}
    files = [path for path in given.values() if path is not None]
    work = prompts.Workload(files, None, args.per_task, args.max_new_tokens, args.seed, args.repeats, args.command_line)
    drafters = options.named_folders(args.drafters, "--drafters")
    with experiment.alone_in(args.out, temperatures=args.temperatures):
        checkpoint = options.source_of(args)
        named = methods.read_methods(args.methods) if args.methods else None
        room = (args.max_len or checkpoint.config.max_position) - args.max_new_tokens
        found = tasks.read(given, args.per_task, checkpoint.tokenizer, room)
        params = options.load_params(args)
        if params.drafter_config is None:
            options.say("no --drafter given: drafting by lookup")
            params = options.other_drafters(args, params)("lookup")
        named = methods.preset_of_tasks(params.drafter_config) if named is None else named
        named = methods.with_drafters(named, drafters)
        modes = methods.make_modes(params, named, options.other_drafters(args, params))
        made = experiment.Experiment(work, modes, found, args.temperatures, methods=named, warms_all=False)
        record = made.run(args.out / "tasks.json")
        tables, foot = list(tasks.tables_of(record)), tasks.texts_of(record)
        return _finish(args, "tasks", record, tables, plots.plot_tasks, tasks.NOTE, foot=foot)
