"""`hsd identity`: checks that speculation changes no token. The work is done in `lab/bench/identity.py`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.settings import Speculation


def add_parser(commands) -> None:
    """Declares `hsd identity`."""
    parser = options.add_command(
        commands,
        "identity",
        run,
        "check that speculation changes no token",
        "Compare speculative with plain text, token for token: greedy, sampled and filtered. The report lists the\n"
        "first difference of every row with the gap between the two best perturbed logits. With the CPU kernels the\n"
        "exit status is 1 if there is any difference. docs/cli.md says which differences are excused elsewhere. Rules\n"
        "other than match draw other sampled text of the same distribution, which a chi-square test checks.",
        """
hsd identity --demo --prompts dev.jsonl --half report --precision exact
hsd identity --target DIR --drafter DIR --prompts texts.jsonl --limit 50 --dtype bfloat16
hsd identity --demo --prompts dev.jsonl --half report --limit 800 --accept recursive
hsd identity --demo --levels --precision exact
""",
    )
    options.add_model_arguments(parser)
    options.add_prompt_arguments(parser, "max_new_tokens", "seed", limit=200)
    add_value(parser, "--batch B", COUNT, "rows at a time", 8)
    options.add_speculation(parser)
    parser.add_argument(
        "--levels",
        action="store_true",
        help="also count the rows whose plain text differs between the levels of the CPU kernels (HSD_NATIVE_ISA)",
    )
    options.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Compares, prints the report, and returns 1 if the check failed."""
    from hsd_jax.lab.bench import identity
    from hsd_jax.lab.bench.facts import hardware

    params = options.load_pair(args, "identity")
    work = options.record_of(args, Workload)
    how = options.record_of(args, Speculation, tree=options.tree_asked(args, params))
    texts = [(p.name, p.tokens(params.tokenizer)) for p in work.read(params, work.prompts)]
    size = work.max_new_tokens, args.batch, work.seed
    levels = identity.compare_isas(params, texts, *size) if args.levels else None
    record = identity.compare(params, texts, how, *size)
    record |= {"command": args.command_line, "hardware": hardware()}
    identity.print_identity(record)
    if levels is not None:
        record["levels"] = levels
        identity.print_isas(levels)
    options.write_record(args.json, record)
    return 0 if record["ok"] else 1
