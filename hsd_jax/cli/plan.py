"""`hsd plan`: finds which models should draft for which. The work is done in `measure/stack.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.settings import LoadSettings


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
    options.add_target_arguments(parser)
    what = "folders of smaller models and of drafters of any model; or lookup"
    add_value(parser, "--models NAME", str, what, nargs="+", required=True)
    options.add_record(parser, LoadSettings, "dtype", "quantize")
    options.add_prompt_arguments(parser, "max_new_tokens", "seed", "repeats", limit=8, max_new_tokens=96)
    options.add_text_settings(parser, "temperature", temperature=0.0)
    add_value(parser, "--max-length T", COUNT, "most tokens that a level collects", 6)
    options.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the result, and writes the record of --json."""
    from hsd_jax.lab.bench.facts import hardware
    from hsd_jax.lab.bench.tables import print_stacks
    from hsd_jax.measure.stack import measure_stacks

    load = lambda drafter: options.load_params(args, drafter=drafter)  # noqa: E731
    params = load(None)
    ids = [prompt.tokens(params.tokenizer) for prompt in options.prompts_of(args, params)]
    work = options.record_of(args, Workload)
    call = {"max_new_tokens": work.max_new_tokens, "temperature": args.temperature, "seed": work.seed}
    record = {"command": args.command_line, "hardware": hardware()}
    record |= measure_stacks(params, args.models, load, ids, call, args.max_length, work.repeats, options.say)
    print_stacks(record)
    options.write_record(args.json, record)
    return 0
