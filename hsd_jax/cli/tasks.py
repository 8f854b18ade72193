"""`hsd bench tasks`: Spec-Bench, HumanEval and GSM8K by a preset of methods. See `lab/bench/tasks.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import compare, options
from hsd_jax.cli.options import COUNT, SEED, TEMPERATURE, add_value


def add_parser(commands) -> None:
    """Declares `hsd bench tasks`."""
    parser = options.add_command(
        commands,
        "tasks",
        run,
        "Spec-Bench, HumanEval and GSM8K, a table of all tasks and methods",
        "Ask the first turns of Spec-Bench, the functions of HumanEval and the problems of GSM8K's test file through\n"
        "the target's chat template, one prompt at a time, by plain decoding and, in turns with it, by the default,\n"
        "chains of 4 and 8 nodes, trees of 8 and 16, and lookup. The text must be that of plain decoding.",
        """
hsd bench tasks --target smollm2 --spec-bench question.jsonl --out runs/tasks
hsd bench tasks --target DIR --drafter DIR --spec-bench question.jsonl --per-task 80 --out runs/tasks
hsd bench tasks --target DIR --drafter DIR --humaneval HumanEval.jsonl.gz --gsm8k test.jsonl --out runs/tasks
hsd bench tasks --target DIR --drafter DIR --drafters eagle=DIR --spec-bench question.jsonl --out runs/tasks
""",
    )
    options.add_model_arguments(parser)
    options.add_task_arguments(parser)
    what = "more columns: other drafters, by default as the first"
    add_value(parser, "--drafters NAME=DIR", str, what, [], nargs="+")
    parser.add_argument("--methods", metavar="FILE", help="YAML as of `hsd bench compare`, in place of the preset")
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 128)
    add_value(parser, "--temperatures T", TEMPERATURE, "", [0.0, 0.8], "0 0.8", nargs="+")
    add_value(parser, "--seed", SEED, "of prompt i: seed + i", 0)
    what = "timed passes; before the first one prompt of each size is decoded, which compiles"
    add_value(parser, "--repeats R", COUNT, what, 1)
    compare.add_out_argument(parser, "tasks")


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes the folder."""
    from hsd_jax.lab.bench import compare as compare_lib
    from hsd_jax.lab.bench import prompts, tasks
    from hsd_jax.lab.bench.ablate import parse_named
    from hsd_jax.lab.viz import plots

    given = {name: getattr(args, name) for name in tasks.READERS}
    files = [path for path in given.values() if path is not None]
    work = prompts.Workload(files, None, args.per_task, args.max_new_tokens, args.seed, args.repeats, args.command_line)
    drafters = parse_named(args.drafters)
    with compare_lib.alone_in(args.out, temperatures=args.temperatures):
        checkpoint = options.source_of(args)
        about = compare_lib.read_methods(args.methods) if args.methods else None
        room = (args.max_len or checkpoint.config.max_position) - args.max_new_tokens
        found = tasks.read(given, args.per_task, checkpoint.tokenizer, room)
        params = options.load_params(args)
        if params.drafter_config is None:
            options.say("no drafter: lookup drafts; give --drafter DIR for another")
            params = options.other_drafters(args, params)("lookup")
        about = tasks.make_methods(params.drafter_config) if about is None else about
        about = tasks.with_drafters(about, drafters)
        modes = compare_lib.make_modes(params, about, options.other_drafters(args, params))
        path = args.out / "tasks.json"
        record = compare_lib.measure(work, modes, about, {}, found, args.temperatures, [1], path, warms_all=False)
        tasks.write(record, args.out)
        plots.plot_tasks(record, args.out / "tasks.png")
    return compare_lib.status(record)
