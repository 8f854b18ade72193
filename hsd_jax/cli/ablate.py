"""`hsd bench ablate`: one change at a time around a drafter's default. The work is done in `lab/bench/ablate.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import compare, options
from hsd_jax.cli.options import add_value


def add_parser(commands) -> None:
    """Declares `hsd bench ablate`."""
    parser = options.add_command(
        commands,
        "ablate",
        run,
        "change one thing at a time around the default",
        "Decode by the drafter as it is, without its token information, with every form of reuse it allows, and by\n"
        "other drafters, all at equal numbers of nodes, interleaved on the same prompts. Ratios to the default carry\n"
        "a 95 % interval over prompts (paired bootstrap).",
        """
hsd bench ablate --demo --nodes 8,16 --out runs/ablate
hsd bench ablate --target DIR --drafter DIR --drafters medusa=DIR eagle=DIR --prompts chat=dev.jsonl --out runs/ablate
""",
    )
    options.add_model_arguments(parser)
    add_value(parser, "--nodes N,N,...", str, "nodes of a tree, the root included", "8,16", "8,16")
    what = "more runs, each by another drafter: trained without token information, with a reduced draft vocabulary, ..."
    add_value(parser, "--drafters NAME=DIR", str, what, [], nargs="+")
    compare.add_measure_arguments(parser)
    compare.add_out_argument(parser, "ablate")


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes the folder."""
    from hsd_jax.drafters.table import method_of
    from hsd_jax.lab.bench import ablate, compare_report, prompts
    from hsd_jax.lab.bench import compare as compare_lib
    from hsd_jax.lab.viz import plots

    sizes, drafters = ablate.parse_sizes(args.nodes), ablate.parse_named(args.drafters, "--drafters")
    out, work = args.out, prompts.Workload.of(vars(args))
    with compare_lib.alone_in(out, temperatures=args.temperatures):
        params = options.load_params(args)
        options.need_drafter(params, "bench ablate")
        if method_of(params.drafter_config).token_information is None:
            raise ValueError(f"a {params.drafter_config.kind} drafter: ablations are of hidden-state drafters")
        about, references = ablate.make_methods(params.drafter_config, sizes, drafters)
        modes = compare_lib.make_modes(params, about, options.other_drafters(args, params))
        tasks = compare_lib.read_tasks(work, params)
        record = compare_lib.measure(work, modes, about, references, tasks, args.temperatures, [1], out / "ablate.json")
        compare_report.write(record, out, "ablate")
        plots.plot_ablate(record, out / "ablate.png")
    return compare_lib.status(record)
