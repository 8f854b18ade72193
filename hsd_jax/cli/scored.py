"""`hsd bench rescore` and `hsd bench recall`: they count drafts on the target's own text and decode nothing with them.

The work is done in `lab/bench/rescore.py` and `lab/bench/recall.py`.
"""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, TEMPERATURE, add_value


def add_rescore(commands) -> None:
    """Declares `hsd bench rescore`."""
    parser = options.add_command(
        commands,
        "rescore",
        run_rescore,
        "rescore the drafts of Medusa heads and hidden-state drafters by n-grams and other scorers",
        "Measure tokens per pass of Medusa heads, or of a hidden-state drafter with and without its token\n"
        "information. Their drafts are taken alone and rescored, at equal numbers of nodes. The passes are\n"
        "simulated on text that the target writes. alpha is chosen on the tuning half of the prompts, and the\n"
        "table shows the other half.",
        """
hsd bench rescore --demo --drafter runs/medusa/drafter --scorers 4-gram=runs/ngram --prompts dev.jsonl --limit 12
hsd bench rescore --demo --scorers 2-gram=runs/two lm=runs/small-lm --trees 8x6x2,16x6x4 --prompts dev.jsonl
""",
    )
    options.add_model_arguments(parser)
    what = "folders: of `hsd train ngram`, a hidden-state drafter (for its token information) or a small model"
    add_value(parser, "--scorers NAME=DIR", str, what, [], nargs="+")
    add_value(parser, "--trees NxDxW,...", str, "nodes x depth x width", "16x6x4", "16x6x4")
    add_value(parser, "--prompts FILE", str, "as for hsd bench", nargs="+", required=True)
    add_value(parser, "--limit N", COUNT, "prompts of each file and half", 12)
    options.add_chat_argument(parser)
    options.add_skip_argument(parser)
    options.add_length_arguments(parser, 96)
    add_value(parser, "--temperature T", TEMPERATURE, "0 is greedy", 0.0)
    options.add_json_argument(parser)
    parser.set_defaults(half=None, repeats=1)


def add_recall(commands) -> None:
    """Declares `hsd bench recall`."""
    parser = options.add_command(
        commands,
        "recall",
        run_recall,
        "count how often the next token is among a drafter's likeliest tokens",
        "Measure the recall of the target's token in the logits of each state, without and with token information,\n"
        "by depth; and tau if an oracle chose among the likeliest tokens. The figures show whether the states are\n"
        "weak or the choice among their tokens.",
        """
hsd bench recall --demo --prompts dev.jsonl --half report --limit 20
hsd bench recall --demo --drafter runs/medusa/drafter --temperatures 0 --prompts dev.jsonl --json recall.json
""",
    )
    options.add_model_arguments(parser, is_required=False)
    options.add_prompt_arguments(parser)
    options.add_length_arguments(parser, 96)
    add_value(parser, "--temperatures T,...", options.numbers(TEMPERATURE), "of the text", [0.0, 1.0], "0,1")
    options.add_json_argument(parser)
    parser.set_defaults(repeats=1)


def run_rescore(args: argparse.Namespace) -> int:
    """Measures how many more tokens per pass each scorer gives."""
    from hsd_jax.lab.bench import prompts, rescore
    from hsd_jax.planning.measure import parse_trees

    scorers, trees = options.named_folders(args.scorers, "--scorers"), parse_trees(args.trees)
    params, work = options.load_pair(args, "bench rescore"), prompts.Workload.of(vars(args))
    record = rescore.worth_of_scorers(params, work, scorers, trees, args.temperature)
    rescore.print_record(record)
    options.write_record(args.json, record)
    return 0


def run_recall(args: argparse.Namespace) -> int:
    """Counts recall by depth."""
    from hsd_jax.lab.bench import prompts, recall

    params = options.load_pair(args, "bench recall")
    record = recall.recall_by_depth(params, prompts.Workload.of(vars(args)), args.temperatures)
    recall.print_record(record)
    options.write_record(args.json, record)
    return 0
