"""`hsd tune`: measures which way to decode is the fastest on this machine, and stores the result for `decode`."""

from __future__ import annotations

import argparse

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value


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
    options.add_prompt_arguments(parser, 8)
    options.add_length_arguments(parser, 64)
    add_value(parser, "--temperatures T,...", options.numbers(options.TEMPERATURE), "0 is greedy", [0.0], "0")
    add_value(parser, "--batches N,...", options.numbers(COUNT), "rows decoded at once", [1], "1")
    what = "tokens of a prompt; prompts are joined or cut to this length"
    add_value(parser, "--contexts N,...", options.numbers(COUNT), what, without="the prompts are not changed")
    candidates = parser.add_argument_group("candidates")
    otherwise = "chains, and trees of 8, 12 and 16 nodes, as the drafter allows"
    add_value(candidates, "--trees NxDxW,...", str, "for example 6x5x1,8x5x2,3.2.1", without=otherwise)
    add_value(candidates, "--reuse FORM", str, "forms of reuse", without="all that the drafter allows", nargs="+")
    add_value(candidates, "--finalists N", COUNT, "trees to measure: those with the best estimates", 3)
    add_value(candidates, "--repeats R", COUNT, "timed passes", 3)
    what = "write the record as JSON, for --tuned of generate"
    add_value(parser, "--out FILE", options.NEW_FILE, what)
    parser.add_argument("--no-keep", action="store_true", help="do not keep the record where decode() finds it")


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table and the choice, and writes the record."""
    from hsd_jax.lab.bench import prompts, tables
    from hsd_jax.measure.speeds import parse_trees
    from hsd_jax.measure.tune import tune

    trees = parse_trees(args.trees) if args.trees else None
    params = options.load_pair(args, "tune")
    found = options.prompts_of(args, params)
    most = max(len(found), *args.batches)
    rows = [found[row % len(found)].tokens(params.tokenizer) for row in range(most)]
    if args.contexts:
        rows = [ids for n in args.contexts for ids in prompts.joined_contexts(params, found, n, most)]
    tuned = tune(
        params,
        rows,
        temperature=args.temperatures,
        batch=args.batches,
        max_new_tokens=args.max_new_tokens,
        trees=trees,
        reuses=args.reuse,
        finalists=args.finalists,
        repeats=args.repeats,
        seed=args.seed,
        keep=not args.no_keep,
        report=options.say,
    )
    tables.print_tuned(tuned)
    if args.out:
        tuned.save(args.out)
        options.say(f"wrote {args.out}")
    return 0
