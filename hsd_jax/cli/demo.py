"""`hsd demo`, which `make demo` runs: a pair of models answers a few prompts, plainly and speculatively."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from hsd_jax.cli import options
from hsd_jax.lab.bench.prompts import Workload
from hsd_jax.settings import Length, LoadSettings, SamplingSettings

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
    import hsd_jax
    from hsd_jax.lab.bench.facts import model_record
    from hsd_jax.lab.bench.tables import Table, print_pieces, print_tables

    start = time.perf_counter()
    args.target = getattr(args, "target", None) or options.default_target()
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
    settings: dict[str, Any] = options.given(args, Length, SamplingSettings) | {"tree": tree, "race": False}
    ids = [prompt.tokens(params.tokenizer) for prompt in found]
    for speculate in (False, True):  # to compile
        list(hsd_jax.stream(params, ids[0], speculate=speculate, **settings))
    rows = []
    for prompt, tokens in zip(found, ids, strict=True):
        print(f"\n== {prompt.name}\n{prompt.question or prompt.text}")
        texts, speeds, tau = [], [], 0.0
        for name, speculate in (("plain", False), ("speculative", True)):
            pieces, _, stats = print_pieces(hsd_jax.stream(params, tokens, speculate=speculate, **settings))
            texts.append([token for piece in pieces for token in piece.tokens.tolist()])
            speeds.append(len(texts[-1]) / stats.decode_seconds)  # without prefill
            tau = stats.tau
            print(f"\n[{name}: {len(texts[-1])} tokens, {speeds[-1]:.0f} tokens/s, tau {tau:.2f}]")
        rows.append((prompt.name, texts[0] == texts[1], tau, *speeds, speeds[1] / speeds[0]))
    medians = map(statistics.median, list(zip(*rows, strict=True))[2:])
    rows.append(("all (medians)", all(row[1] for row in rows), *medians))
    cells = [
        (name, "yes" if is_same else "NO", f"{tau:.2f}", f"{plain:.0f}", f"{drafted:.0f}", f"{gain:.2f}x")
        for name, is_same, tau, plain, drafted, gain in rows
    ]
    heads = "prompt", "identical", "tau", "plain tok/s", "spec tok/s", "speed-up"
    print()
    print_tables([Table("Plain and speculative decoding", heads, cells, left=2, bold=[cells[-1][0]])])
    options.say(f"done in {time.perf_counter() - start:.0f} s")
    return 0
