"""`hsd demo`, which `make demo` runs: the bundled pair on a dozen prompts, plainly and speculatively.

Each prompt is streamed for the eye, then decoded both ways for the clock. Read next: `bench.py`, the thorough one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from hsd_jax.cli import bench, options, quality


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
    parser.add_argument(
        "--max-new-tokens", type=options.COUNT, default=96, metavar="N", help="per prompt (default: 96)"
    )
    parser.add_argument(
        "--temperature", type=options.TEMPERATURE, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    parser.add_argument("--repeats", type=options.COUNT, default=2, metavar="R", help="timed runs (default: 2)")
    parser.add_argument("--limit", type=options.COUNT, metavar="N", help="first N prompts only (default: all)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the target's weights (default: that of the checkpoint)"
    )
    parser.add_argument(
        "--precision", choices=("fast", "exact"), default="fast", help="exact: float32, no token ever differs"
    )
    options.add_tree_arguments(parser)
    parser.add_argument("--plot", type=options.PICTURE, metavar="OUT", help="write a PNG (needs matplotlib)")
    parser.set_defaults(demo=True, target=None, drafter=None, mesh=None, max_len=None)


def run(args: argparse.Namespace) -> int:
    """Decodes all prompts both ways and prints the table."""
    from hsd_jax import demo

    start = time.perf_counter()
    options.say("loading the bundled models")
    params = options.load_params(args)
    tree = options.tree_of(args, params)
    found = demo.read_prompts()[: args.limit]
    sizes = [quality.model_record(weights)["parameters"] / 1e6 for weights in (params.target, params.drafter)]
    options.say(
        f"target {sizes[0]:.1f}M parameters, drafter {sizes[1]:.1f}M, {params.arithmetic},"
        f" tree of {tree.nodes} nodes; compiling (the first time takes a while)"
    )
    # `match`: its sampled text can be compared with that of plain decoding.
    settings = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "tree": tree,
        "accept": "match",
    }
    rows = [_one(params, prompt, settings, args.repeats, is_first=i == 0) for i, prompt in enumerate(found)]
    profile = bench.profile_mode(params, tree, found[0].text, args.max_new_tokens, args.temperature)
    from hsd_jax.cli import report
    from hsd_jax.infer.metrics import STAGES

    print()
    report.print_demo(rows, _total(rows), profile.shares(), profile.whole)
    options.say(f"done in {time.perf_counter() - start:.0f} s")
    if args.plot:
        report.plot_demo(rows, {name: getattr(profile, name) for name in STAGES}, args.plot)
    return 0


def _one(params, prompt, settings: dict[str, Any], repeats: int, is_first: bool) -> dict[str, Any]:
    """Streams one prompt, then times it both ways, interleaved; the first prompt is compiled for before."""
    import hsd_jax

    def decode(speculate: bool):
        return hsd_jax.decode(params, prompt.text, speculate=speculate, **settings)

    if is_first:  # all prompts share their shapes, so this compiles for all
        for speculate in (False, True):
            decode(speculate)
    print(f"\n\033[1m{prompt.name}\033[0m" if sys.stdout.isatty() else f"\n== {prompt.name}")
    sys.stdout.write(prompt.text)
    for piece in hsd_jax.stream(params, prompt.text, **settings):
        sys.stdout.write(f"\033[32m{piece.text}\033[0m" if sys.stdout.isatty() else piece.text or "")
        sys.stdout.flush()
    print()
    runs = [(decode(False), decode(True)) for _ in range(repeats)]
    plain, drafted = runs[0]
    rates = [
        statistics.median(int(pair[i].num_tokens[0]) / pair[i].stats.decode_seconds for pair in runs) for i in (0, 1)
    ]
    return {
        "name": prompt.name,
        "identical": plain.tokens.tolist() == drafted.tokens.tolist(),
        "tau": drafted.stats.tau,
        "num_tokens": int(drafted.num_tokens[0]),
        "num_target_passes": drafted.stats.num_target_passes,
        "plain": rates[0],
        "speculative": rates[1],
        "speedup": rates[1] / rates[0],
    }


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """tau over all tokens; medians over the prompts of the speeds."""
    medians = {key: statistics.median(row[key] for row in rows) for key in ("plain", "speculative", "speedup")}
    tau = sum(r["num_tokens"] for r in rows) / max(sum(r["num_target_passes"] for r in rows), 1)
    return {"name": "all (medians)", "identical": all(r["identical"] for r in rows), "tau": tau, **medians}
