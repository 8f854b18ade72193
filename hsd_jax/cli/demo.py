"""`hsd demo`, which `make demo` runs: a pair of models answers a few prompts.

The work is done in `lab/bench/demo.py`.
"""

from __future__ import annotations

import argparse
import time

from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value

SHOWN = 6
"""Default of --limit for a chat model, which has a dozen questions."""


def add_parser(commands) -> None:
    """Declares `hsd demo`."""
    parser = options.add_command(
        commands,
        "demo",
        run,
        "answer a few prompts with plain and with speculative decoding",
        "Answer six questions with SmolLM2 and its drafter, each with plain and with speculative decoding. The\n"
        "texts are streamed. A table then shows tau and the speeds. If SmolLM2 is not installed, or with --target\n"
        "demo, the bundled pair continues a dozen dialogues and maths problems.",
        """
hsd demo
hsd demo --target demo --max-new-tokens 64
hsd demo --precision exact --temperature 0.8
""",
    )
    what = "demo, smollm2, or any chat model as hsd generate takes it"
    add_value(parser, "--target NAME", str, what, without="smollm2 where it is installed, else demo")
    add_value(parser, "--drafter NAME", str, "the drafter, as hsd generate takes it", without="the target's own")
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 96)
    add_value(parser, "--temperature T", options.TEMPERATURE, "0 is greedy", 0.0)
    add_value(parser, "--limit N", COUNT, "first N prompts only", without=f"{SHOWN} for a chat model, else all")
    options.add_dtype_argument(parser)
    options.add_precision_argument(parser)
    options.add_tree_arguments(parser)
    names = "revision", "tokenizer", "mesh", "max_len", "rescore", "alpha", "stack", "pearl", "devices"
    parser.set_defaults(demo=False, strict=False, **dict.fromkeys(names))


def run(args: argparse.Namespace) -> int:
    """Answers all prompts with plain and with speculative decoding, and prints the table."""
    from hsd_jax.lab.bench import demo, prompts
    from hsd_jax.lab.bench.facts import model_record

    start = time.perf_counter()
    if args.target is None:
        args.target = _default_target()
    options.say(f"loading {args.target}")
    params = options.load_pair(args, "demo")
    tree = options.tree_asked(args, params)
    found = prompts.for_checkpoint(params, None, None, args.limit, args.max_new_tokens)
    if args.limit is None and found[0].is_templated:
        found = found[:SHOWN]
    sizes = [model_record(model)["parameters"] / 1e6 for model in (params.target, params.drafter)]
    shape = "a tree chosen by cost" if tree is None else f"tree of {tree.nodes} nodes"
    options.say(
        f"target {sizes[0]:.1f}M parameters, drafter {sizes[1]:.1f}M, {params.arithmetic},"
        f" {shape}; compiling (the first time takes a while)"
    )
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "tree": tree}
    rows = [demo.answer_prompt(params, prompt, settings, prompt is found[0]) for prompt in found]
    print()
    demo.print_demo(rows)
    options.say(f"done in {time.perf_counter() - start:.0f} s")
    return 0


def _default_target() -> str:
    """Returns "smollm2" if its package is installed, else "demo", and then prints why."""
    from hsd_jax.models.checkpoint import BUNDLED

    try:
        BUNDLED["smollm2"].target()
    except FileNotFoundError as error:
        options.say(f"{error}; the bundled pair answers instead")
        return "demo"
    return "smollm2"
