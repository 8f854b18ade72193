"""`hsd bench rescore`: what transition scorers are worth. The work is done in `lab/bench/rescore.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, SEED, TEMPERATURE, add_value


def add_parser(commands) -> None:
    """Declares `hsd bench rescore`."""
    parser = options.add_command(
        commands,
        "rescore",
        run,
        "rescore token-free drafts by n-grams and other scorers",
        "Tokens a pass of Medusa heads, or of a hidden-state drafter with and without its token information, alone\n"
        "and rescored, at equal nodes: simulated on text the target writes. alpha is chosen on the tuning half of the\n"
        "prompts, the table is of the other half.",
        """
hsd bench rescore --demo --drafter runs/medusa/drafter --scorers 4-gram=runs/ngram --prompts dev.jsonl --limit 12
hsd bench rescore --demo --scorers 2-gram=runs/two lm=runs/small-lm --trees 8x6x2,16x6x4 --prompts dev.jsonl
""",
    )
    options.add_model_arguments(parser)
    what = "folders of `hsd train ngram`, of a hidden-state drafter (its token information), of a small model"
    add_value(parser, "--scorers NAME=DIR", str, what, [], nargs="+")
    add_value(parser, "--trees NxDxW,...", str, "nodes x depth x width", "16x6x4", "16x6x4")
    add_value(parser, "--prompts FILE", str, "as of hsd bench", nargs="+", required=True)
    add_value(parser, "--limit N", COUNT, "prompts of each file and half", 12)
    options.add_chat_argument(parser)
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 96)
    add_value(parser, "--temperature T", TEMPERATURE, "0 is greedy", 0.0)
    add_value(parser, "--seed", SEED, "of prompt i: seed + i", 0)
    parser.add_argument("--json", type=options.NEW_FILE, metavar="OUT", help="write every figure to this file")
    parser.set_defaults(half=None, repeats=1)


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes what was asked for."""
    from hsd_jax.lab.bench import ablate, prompts, rescore
    from hsd_jax.planning.measure import parse_trees

    scorers, trees = ablate.parse_named(args.scorers, "--scorers"), parse_trees(args.trees)
    params = options.load_params(args)
    options.need_drafter(params, "bench rescore")
    record = rescore.measure(params, prompts.Workload.of(vars(args)), scorers, trees, args.temperature)
    rescore.print_record(record)
    options.write_record(args.json, record)
    return 0
