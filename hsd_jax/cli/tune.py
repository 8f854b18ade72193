"""`hsd tune`: measures which way to decode is the fastest here, and keeps the choice in a file for `--tuned`.

Read next: `hsd_jax/tuning.py`, which does it.
"""

from __future__ import annotations

import argparse

from hsd_jax.cli import bench, options, prompts

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
        "the pair, the machine, the batch size and the temperature, so it is measured, on prompts like those to come:\n"
        "the target writes a text for each; what every candidate would have got right there is simulated, the time of\n"
        "its rounds estimated from three trees that are timed; the best then run in turns with plain decoding, and\n"
        "the fastest is the choice. The text is the same whatever is chosen.",
        """
hsd tune --demo
hsd tune --target DIR --drafter DIR --prompts dev.jsonl --batch 4 --temperature 0.8 --out tuned.json
hsd generate --target DIR --drafter DIR --temperature 0.8 --tuned tuned.json "Once upon a time,"
hsd bench --target DIR --drafter DIR --prompts dev.jsonl --tuned tuned.json
""",
    )
    options.add_model_arguments(parser)
    bench.add_prompt_arguments(parser, PROMPTS)
    parser.add_argument(
        "--max-new-tokens", type=options.COUNT, default=64, metavar="N", help="per prompt (default: 64)"
    )
    parser.add_argument(
        "--temperature", type=options.TEMPERATURE, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    parser.add_argument("--batch", type=options.COUNT, default=1, metavar="B", help="rows decoded at once (default: 1)")
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


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table and the choice, writes the record."""
    trees = options.parse_trees(args.trees) if args.trees else None
    import hsd_jax
    from hsd_jax.cli import report

    params = options.load_params(args)
    options.need_drafter(params, "tune")
    found = prompts.for_checkpoint(params, args.prompts, args.half, args.limit, args.max_new_tokens)
    tuned = hsd_jax.tune(
        params,
        [prompt.text for prompt in found],
        temperature=args.temperature,
        batch=args.batch,
        max_new_tokens=args.max_new_tokens,
        trees=trees,
        reuses=args.reuse,
        finalists=args.finalists,
        repeats=args.repeats,
        seed=args.seed,
        report=options.say,
    )
    report.print_tuned(tuned)
    if args.out:
        tuned.save(args.out)
        options.say(f"wrote {args.out}")
    return 0
