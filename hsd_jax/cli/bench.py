"""`hsd bench`: speculative against plain decoding, honestly. The work is done in `lab/bench/against_plain.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import ablate, budget, compare, options, recall, rescore, tasks
from hsd_jax.cli.options import COUNT, SEED, TEMPERATURE, add_value


def add_parser(commands) -> None:
    """Declares `hsd bench`."""
    parser = options.add_command(
        commands,
        "bench",
        run,
        "measure speculative against plain decoding",
        "Measure tau, speed and the stages of a round, batch 1, with the end token honoured and prefill excluded.\n"
        "Plain and speculative runs are interleaved in one process; speeds are medians over the repeats, with ranges.",
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
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 128)
    add_value(parser, "--temperature T", TEMPERATURE, "0 is greedy", 0.0)
    add_value(parser, "--seed", SEED, "of prompt i: seed + i", 0)
    add_value(parser, "--repeats R", COUNT, "timed passes", 3)
    tree = options.add_tree_arguments(parser)
    tree.add_argument("--trees", metavar="NxDxW,...", help="several trees in one run, for example 4x3x2,3.2.1")
    options.add_rule_arguments(tree, nargs="+")
    options.add_tuned_argument(tree)
    what = "also time plain decoding in float32 and bfloat16, with 1 row and padded to 4: the fastest is the rival"
    parser.add_argument("--plain-variants", action="store_true", help=what)
    grid = parser.add_argument_group("the defaults, or the trees named, against plain decoding, cell by cell")
    counts, temperatures = options.numbers(COUNT), options.numbers(TEMPERATURE)
    add_value(grid, "--batches N,...", counts, "rows decoded at once, for example 1,2,4,8,16,32")
    add_value(grid, "--contexts N,...", counts, "tokens of a prompt, for example 64,256,1024,1800")
    add_value(grid, "--temperatures T,...", temperatures, "of each cell", [0.0, 0.8], "0,0.8")
    parser.add_argument("--no-stages", action="store_true", help="do not time the stages of a round")
    parser.add_argument("--json", type=options.NEW_FILE, metavar="OUT", help="write every figure to this file")
    options.add_plot_argument(parser)
    more = parser.add_subparsers(title="more", metavar="COMMAND", action=options.OwnOptions)
    for module in (tasks, compare, ablate, budget, rescore, recall):
        module.add_parser(more)


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes what was asked for."""
    from hsd_jax.lab.bench import against_plain, grid, tables
    from hsd_jax.lab.bench.prompts import Workload
    from hsd_jax.planning.measure import Mode, parse_trees

    params = options.load_params(args)
    options.need_drafter(params, "bench")
    tuned = options.tuned_of(args, params)
    work = Workload.of(vars(args))
    found = work.read(params, args.prompts)
    if args.batches or args.contexts:
        given = "--batches or --contexts: they measure the rule match alone"
        options.refuse(args, given, "accept", "draw", "reuse", "lossy", "plot", "plain_variants")
        trees = parse_trees(args.trees) if args.trees else [options.tree_asked(args, params)]
        sizes = args.batches or [1], args.contexts or [64], args.temperatures
        record = grid.measure(work, params, found, tuned, *sizes, trees)
        for cell in record["cells"]:
            print(grid.line_of(grid.Cell(**cell)))
        options.write_record(args.json, record)
        return 0
    if isinstance(tuned, bool):
        trees = parse_trees(args.trees) if args.trees else [options.tree_of(args, params)]
        ways = against_plain.make_modes(params, trees, args.accept, args.draw, args.reuse or ["none"], args.lossy)
    else:
        ways = against_plain.tuned_modes(params, tuned, args.temperature, args.tuned)
    if args.plain_variants:
        ways += against_plain.plain_variants(
            params, lambda dtype: options.load_params(args, dtype=dtype, quantize=None, drafter=None)
        )
    modes = [Mode(f"plain {params.dtype}", params), *ways]
    options.say(f"{len(found)} prompts, {', '.join(m.name for m in modes)}")
    record = against_plain.measure(work, args.temperature, modes, found, not args.no_stages)
    tables.print_bench(record)
    options.write_record(args.json, record)
    if args.plot:
        from hsd_jax.lab.viz import plots

        plots.plot_bench(record, args.plot)
    return 0
