"""`hsd bench budget`: trees at equal numbers of draft tokens. The work is done in `lab/bench/budget.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import compare as compare_cli
from hsd_jax.cli import options
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
    compare_cli.add_measure_arguments(parser)
    compare_cli.add_out_argument(parser, "budget")


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes the folder."""
    from hsd_jax.lab.bench import budget, budget_report, compare, prompts
    from hsd_jax.lab.viz import plots

    with compare.alone_in(args.out, temperatures=args.temperatures):
        params = options.load_params(args)
        options.need_drafter(params, "bench budget")
        protocol = budget.make_protocol(args.budgets, args.lengths, params.drafter_config)
        record = budget.measure(prompts.Workload.of(vars(args)), protocol, params, args.temperatures, args.out)
        budget_report.write(record, args.out)
        plots.plot_budget(record, args.out / "budget.png")
    return compare.status(record)
