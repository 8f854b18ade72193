"""`hsd tune`: measures which ways to decode are the fastest here, and keeps them where `decode` finds them.

Read next: `hsd_jax/tuning.py`, which does it.
"""

from __future__ import annotations

import argparse

from hsd_jax.cli import bench, grid, options, prompts

PROMPTS = 8
"""Prompts of each file, unless --limit says otherwise."""


def add_parser(commands) -> None:
    """Declares `hsd tune`."""
    parser = options.add_command(
        commands,
        "tune",
        run,
        "find the fastest way to decode on this machine",
        "Find which tree and which form of reuse decode the fastest, or whether plain decoding does. That depends on\n"
        "the pair, the machine, the batch size, the lengths and the temperature, so it is measured, on prompts like\n"
        "those to come: the target writes a text for each; what every candidate would have got right there is\n"
        "simulated, the time of its rounds estimated from three trees that are timed; the best then run in turns\n"
        "with plain decoding, and the fastest is the choice. It is kept for this pair and machine: from then on\n"
        "`decode` and the commands follow it in calls of such a size. The text is the same whatever is chosen.",
        """
hsd tune --demo
hsd tune --target DIR --drafter DIR --prompts dev.jsonl --batches 1,4 --contexts 64,1024 --temperatures 0,0.8
hsd tune --target DIR --drafter DIR --prompts dev.jsonl --no-keep --out tuned.json
hsd generate --target DIR --drafter DIR --tuned tuned.json "Once upon a time,"
""",
    )
    options.add_model_arguments(parser)
    bench.add_prompt_arguments(parser, PROMPTS)
    parser.add_argument(
        "--max-new-tokens", type=options.COUNT, default=64, metavar="N", help="per prompt (default: 64)"
    )
    several = {"default": [0.0], "metavar": "T,..."}
    parser.add_argument(
        "--temperatures", type=options.numbers(options.TEMPERATURE), **several, help="0 is greedy (default: 0)"
    )
    several = {"type": options.numbers(options.COUNT), "metavar": "N,..."}
    parser.add_argument("--batches", **several, default=[1], help="rows decoded at once (default: 1)")
    parser.add_argument(
        "--contexts", **several, help="tokens of a prompt, joined or cut to that (default: prompts as they are)"
    )
    parser.add_argument("--seed", type=options.SEED, default=0, help="of prompt i: seed + i (default: 0)")
    candidates = parser.add_argument_group("candidates")
    candidates.add_argument(
        "--trees",
        metavar="NxDxW,...",
        help="for example 6x5x1,8x5x2 (default: chains, and trees of 8, 12 and 16 nodes, as the drafter allows)",
    )
    candidates.add_argument(
        "--reuse", metavar="FORM", nargs="+", help="forms of reuse (default: all that the drafter allows)"
    )
    candidates.add_argument(
        "--finalists",
        type=options.COUNT,
        default=3,
        metavar="N",
        help="candidates to measure, the best by prediction (default: 3)",
    )
    candidates.add_argument("--repeats", type=options.COUNT, default=3, metavar="R", help="timed passes (default: 3)")
    parser.add_argument(
        "--out", type=options.NEW_FILE, metavar="FILE", help="write the record, JSON, for --tuned of generate and bench"
    )
    parser.add_argument("--no-keep", action="store_true", help="do not keep the record where decode() finds it")


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table and the choice, writes the record."""
    trees = options.parse_trees(args.trees) if args.trees else None
    import hsd_jax
    from hsd_jax.cli import report

    params = options.load_params(args)
    options.need_drafter(params, "tune")
    found = prompts.for_checkpoint(params, args.prompts, args.half, args.limit, args.max_new_tokens)
    most = max(len(found), *args.batches)
    rows = [found[row % len(found)].text for row in range(most)]
    if args.contexts:
        rows = [ids for n in args.contexts for ids in grid.joined_contexts(params, found, n, most)]
    tuned = hsd_jax.tune(
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
    report.print_tuned(tuned)
    if args.out:
        tuned.save(args.out)
        options.say(f"wrote {args.out}")
    return 0
