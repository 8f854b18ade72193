"""`hsd bench budget`: trees at equal numbers of draft tokens. The work is done in `bench/budget.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import compare, options
from hsd_jax.cli.options import COUNT, add_value


def add_parser(commands) -> None:
    """Declares `hsd bench budget`."""
    parser = options.add_command(
        commands,
        "budget",
        run,
        "compare ways to draw and judge trees at equal draft tokens",
        "Decode by SD, SpecInfer, RSD-C, RSD-S, top-k and coupled trees of as many draft tokens a round, and of as\n"
        "long paths, interleaved with plain decoding; then count which siblings were accepted.",
        """
hsd bench budget --demo --temperatures 0.8 1 --out runs/budget
hsd bench budget --demo --budgets 6,14 --lengths 3 --prompts chat=dev.jsonl --half report --out runs/budget
""",
    )
    options.add_model_arguments(parser)
    add_value(parser, "--budgets N,...", options.numbers(COUNT), "draft tokens a round", without="6,10,14,21,30")
    add_value(parser, "--lengths L,...", options.numbers(COUNT), "tokens of the longest path", without="2,3,4,5")
    compare.add_measure_arguments(parser)
    compare.add_out_argument(parser, "budget")


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes the folder; of --budgets and --lengths what is given, or both."""
    from hsd_jax.bench import budget, budget_report, measure
    from hsd_jax.bench import compare as compare_lib

    out, work, is_whole = args.out, measure.Workload.of(vars(args)), not (args.budgets or args.lengths)
    budgets = args.budgets or (budget.BUDGETS if is_whole else ())
    lengths = args.lengths or (budget.LENGTHS if is_whole else ())
    with compare_lib.alone_in(out, temperatures=args.temperatures, budgets=budgets, lengths=lengths):
        params = options.load_params(args)
        options.need_drafter(params, "bench budget")
        protocol = budget.make_protocol(budgets, lengths, budget.deepest(params.drafter_config))
        modes = compare_lib.make_modes(params, protocol.about, lambda drafter: params)
        tasks = compare_lib.read_tasks(work, params)
        record = budget.measure(work, protocol, modes, tasks, args.temperatures, out / "budget.json")
        budget_report.write(record, out)
    return compare_lib.status(record)
