"""`hsd demo`, which `make demo` runs: a pair of models answers a few prompts.

The work is done in `lab/bench/demo.py`.
"""

from __future__ import annotations

import argparse
import time

from hsd_jax.asked import Length, SamplingSettings
from hsd_jax.cli import options
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.loading import LoadSettings

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
    what = "demo, smollm2, or any chat model as hsd generate takes it (default: smollm2 where it is there, else demo)"
    names = "target", "drafter", "dtype", "quantize", "precision"
    options.add_record(parser, LoadSettings, *names, target={"help": what})
    options.add_text_settings(parser, "max_new_tokens", "temperature", max_new_tokens=96)
    what = f"first N prompts only (default: {SHOWN} for a chat model, else all)"
    options.add_record(parser, Workload, "limit", limit={"help": what})
    options.add_tree_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answers all prompts with plain and with speculative decoding, and prints the table."""
    from hsd_jax.lab.bench import demo
    from hsd_jax.lab.bench.facts import model_record

    start = time.perf_counter()
    args.target = getattr(args, "target", None) or _default_target()
    options.say(f"loading {args.target}")
    params = options.load_pair(args, "demo")
    tree = options.tree_asked(args, params)
    found = options.prompts_of(args, params)
    if not hasattr(args, "limit") and found[0].is_templated:
        found = found[:SHOWN]
    sizes = [model_record(model)["parameters"] / 1e6 for model in (params.target, params.drafter)]
    shape = "a tree chosen by cost" if tree is None else f"tree of {tree.nodes} nodes"
    options.say(
        f"target {sizes[0]:.1f}M parameters, drafter {sizes[1]:.1f}M, {params.arithmetic},"
        f" {shape}; compiling (the first time takes a while)"
    )
    settings = options.given(args, Length, SamplingSettings) | {"tree": tree}
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
