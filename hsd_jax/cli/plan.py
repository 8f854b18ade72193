"""`hsd plan`: finds which models should draft for which. The work is done in `measure/stack.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, TEMPERATURE, add_value


def add_parser(commands) -> None:
    """Declares `hsd plan`."""
    parser = options.add_command(
        commands,
        "plan",
        run,
        "plan a stack of drafters from measured costs",
        "Time passes of every model on this machine, measure how often each model accepts the tokens of a smaller\n"
        "one, and find the stack of drafters that takes the least time per token: which model drafts for which,\n"
        "and how many tokens each level passes up. The best stack, the best single drafter and plain decoding then\n"
        "decode the prompts in turns, and the table shows the measured beside the predicted time.",
        """
hsd plan --target DIR --models SMALL TINY --prompts dev.jsonl --half tune --limit 8
hsd plan --demo --models runs/small-lm lookup --temperature 0.8 --json plan.json
""",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--demo", action="store_true", help="the bundled target, as --target demo")
    options.add_target_arguments(parser, which)
    what = "folders of smaller models and of drafters of any model; or lookup"
    add_value(parser, "--models NAME", str, what, nargs="+", required=True)
    options.add_dtype_argument(parser)
    options.add_prompt_arguments(parser, 8)
    options.add_length_arguments(parser, 96)
    add_value(parser, "--max-length T", COUNT, "most tokens that a level collects", 6)
    add_value(parser, "--temperature T", TEMPERATURE, "0 is greedy", 0.0)
    add_value(parser, "--repeats R", COUNT, "timed passes", 3)
    options.add_json_argument(parser)
    without = dict.fromkeys(("drafter", "rescore", "alpha", "stack", "pearl", "devices", "max_len", "mesh"))
    parser.set_defaults(precision="fast", strict=False, **without)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the result, and writes the record of --json."""
    from hsd_jax.lab.bench.facts import hardware
    from hsd_jax.lab.bench.tables import print_stacks
    from hsd_jax.measure.stack import measure_stacks

    load = lambda drafter: options.load_params(args, drafter=drafter)  # noqa: E731
    params = load(None)
    ids = [prompt.tokens(params.tokenizer) for prompt in options.prompts_of(args, params)]
    names = "max_new_tokens", "temperature", "max_length", "seed", "repeats"
    how = {name: getattr(args, name) for name in names}
    record = {"command": args.command_line, "hardware": hardware()}
    record |= measure_stacks(params, args.models, load, ids, **how, report=options.say)
    print_stacks(record)
    options.write_record(args.json, record)
    return 0
