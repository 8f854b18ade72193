"""`hsd tune`: measures which way to decode is the fastest on this machine, and stores the result for `decode`."""

from __future__ import annotations

import argparse
from typing import Annotated

from pydantic import Field

from hsd_jax.cli import options
from hsd_jax.cli.options import add_value
from hsd_jax.lab.bench.prompts import RunOptions
from hsd_jax.settings import Count, dataclass


def add_parser(commands) -> None:
    """Declares `hsd tune`."""
    parser = options.add_command(
        commands,
        "tune",
        run,
        "find the fastest way to decode on this machine",
        "Find which tree and which form of reuse decode the fastest, or whether plain decoding does. The answer\n"
        "depends on the pair of models, the machine, the batch size, the lengths and the temperature, so it is\n"
        "measured on prompts like those to come.\n"
        "The target writes a text for each prompt. The command simulates which drafts of every candidate would be\n"
        "accepted there, and estimates the time of the rounds from three trees that it times. The best candidates\n"
        "then run in turns with plain decoding, and the fastest is chosen.\n"
        "The result is kept for this pair and machine. From then on `decode` and the commands follow it in calls\n"
        "of such a size. The choice does not change the text.",
        """
hsd tune --demo
hsd tune --target DIR --drafter DIR --prompts dev.jsonl --batches 1,4 --contexts 64,1024 --temperatures 0,0.8
hsd tune --target DIR --drafter DIR --prompts dev.jsonl --no-keep --out tuned.json
hsd generate --target DIR --drafter DIR --tuned tuned.json "Once upon a time,"
""",
    )
    options.add_model_arguments(parser)
    names = "max_new_tokens", "seed", "repeats"
    options.add_prompt_arguments(parser, *names, limit=8, max_new_tokens=64)
    options.add_record(parser.add_argument_group("sizes"), RunOptions, "temperatures", "contexts")
    options.add_record(parser.add_argument_group("candidates"), Tuning)
    add_value(parser, "--out FILE", options.NEW_FILE, "write the record as JSON, for --tuned of generate")


@dataclass
class Tuning:
    """What is measured, and what becomes of it."""

    batches: tuple[Count, ...] = (1,)
    """Rows decoded at once."""
    trees: Annotated[str, Field(title="NxDxW,...")] | None = None
    """For example 6x5x1,8x5x2,3.2.1 (default: chains, and trees of 8, 12 and 16 nodes, as the drafter allows)."""
    reuse: tuple[Annotated[str, Field(title="FORM")], ...] | None = None
    """Forms of reuse (default: all that the drafter allows)."""
    finalists: Count = 3
    """Trees to measure: those with the best estimates."""
    keep: bool = True
    """Do not keep the record where decode() finds it."""


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table and the choice, and writes the record."""
    from hsd_jax.lab.bench import prompts, tables
    from hsd_jax.measure.speeds import parse_trees
    from hsd_jax.measure.tune import tune

    asked, work = options.record_of(args, Tuning), options.record_of(args, RunOptions)
    trees = parse_trees(asked.trees) if asked.trees else None
    params = options.load_pair(args, "tune")
    found = options.prompts_of(args, params)
    most = max(len(found), *asked.batches)
    rows = [found[row % len(found)].tokens(params.tokenizer) for row in range(most)]
    if work.contexts:
        rows = [ids for n in work.contexts for ids in prompts.joined_contexts(params, found, n, most)]
    tuned = tune(
        params,
        rows,
        temperature=work.temperatures,
        batch=asked.batches,
        max_new_tokens=work.max_new_tokens,
        trees=trees,
        reuses=asked.reuse,
        finalists=asked.finalists,
        repeats=work.repeats,
        seed=work.seed,
        keep=asked.keep,
        report=options.say,
    )
    tables.print_tuned(tuned)
    if args.out:
        tuned.save(args.out)
        options.say(f"wrote {args.out}")
    return 0
