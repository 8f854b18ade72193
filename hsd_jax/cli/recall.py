"""`hsd bench recall`: how often the next token is among a drafter's best. The work is done in `lab/bench/recall.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, SEED, TEMPERATURE, add_value


def add_parser(commands) -> None:
    """Declares `hsd bench recall`."""
    parser = options.add_command(
        commands,
        "recall",
        run,
        "how often the next token is among a drafter's best",
        "Recall of the target's token in the logits of each token-free state, alone and with token information, by\n"
        "depth, and tau if an oracle chose among the best tokens: is it the states that are weak, or the choice?",
        """
hsd bench recall --demo --prompts dev.jsonl --half report --limit 20
hsd bench recall --demo --drafter runs/medusa/drafter --temperatures 0 --prompts dev.jsonl --json recall.json
""",
    )
    options.add_model_arguments(parser, is_required=False)
    options.add_prompt_arguments(parser)
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 96)
    add_value(parser, "--temperatures T,...", options.numbers(TEMPERATURE), "of the text", [0.0, 1.0], "0,1")
    add_value(parser, "--seed", SEED, "of prompt i: seed + i", 0)
    parser.add_argument("--json", type=options.NEW_FILE, metavar="OUT", help="write every figure to this file")
    parser.set_defaults(repeats=1)


def run(args: argparse.Namespace) -> int:
    """Counts, prints, and writes what was asked for."""
    from hsd_jax.lab.bench import prompts, recall

    params = options.load_params(args)
    options.need_drafter(params, "bench recall")
    record = recall.measure(params, prompts.Workload.of(vars(args)), args.temperatures)
    recall.print_record(record)
    options.write_record(args.json, record)
    return 0
