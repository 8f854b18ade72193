"""`hsd demo`, which `make demo` runs: the bundled pair on a dozen prompts. The work is done in `bench/demo.py`."""

from __future__ import annotations

import argparse
import time

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value


def add_parser(commands) -> None:
    """Declares `hsd demo`."""
    parser = options.add_command(
        commands,
        "demo",
        run,
        "decode the bundled prompts with the bundled models, both ways",
        "Decode a dozen dialogue and maths prompts plainly and speculatively, with the bundled target and drafter:\n"
        "the text as it comes, then a table with tau, speeds and where a round's time goes.",
        """
hsd demo
hsd demo --max-new-tokens 64 --plot demo.png
hsd demo --precision exact --temperature 0.8
""",
    )
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 96)
    add_value(parser, "--temperature T", options.TEMPERATURE, "0 is greedy", 0.0)
    add_value(parser, "--repeats R", COUNT, "timed runs", 2)
    add_value(parser, "--limit N", COUNT, "first N prompts only", without="all")
    options.add_dtype_argument(parser)
    precisions = ("fast", "exact")
    add_value(parser, "--precision", str, "exact: float32, no token ever differs", "fast", choices=precisions)
    options.add_tree_arguments(parser)
    options.add_plot_argument(parser)
    names = "target", "revision", "tokenizer", "drafter", "mesh", "max_len", "rescore", "alpha", "stack", "pearl"
    parser.set_defaults(demo=True, strict=False, **dict.fromkeys(names))


def run(args: argparse.Namespace) -> int:
    """Decodes all prompts both ways and prints the table."""
    from hsd_jax.bench import against_plain, demo, prompts, tables

    start = time.perf_counter()
    options.say("loading the bundled models")
    params = options.load_params(args)
    tree = options.tree_of(args, params)
    found = prompts.demo_prompts()[: args.limit]
    sizes = [against_plain.model_record(model)["parameters"] / 1e6 for model in (params.target, params.drafter)]
    options.say(
        f"target {sizes[0]:.1f}M parameters, drafter {sizes[1]:.1f}M, {params.arithmetic},"
        f" tree of {tree.nodes} nodes; compiling (the first time takes a while)"
    )
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "tree": tree}
    rows = [demo.time_prompt(params, prompt, settings, args.repeats, prompt is found[0]) for prompt in found]
    first = found[0].tokens(params.tokenizer)
    profile = against_plain.profile_mode(params, tree, first, args.max_new_tokens, args.temperature)
    print()
    tables.print_demo(rows, demo.total(rows), profile.shares(), profile.whole)
    options.say(f"done in {time.perf_counter() - start:.0f} s")
    if args.plot:
        from hsd_jax.viz import plots

        plots.plot_demo(rows, profile.seconds(), args.plot)
    return 0
