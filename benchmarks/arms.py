"""Compares tau of several drafters of one target, greedy and at temperature 1 with coupled drafts.

    python benchmarks/arms.py --prompts dialogue=dev.jsonl maths=test.jsonl --half tune --limit 48 \
        --drafters base=runs/base/drafter other=runs/other/drafter --json arms.json

Texts are decoded in batches and no speed is measured. For each drafter but the first, the difference from the first
drafter's tau follows, with the 95 % interval of 2,000 resamplings of the prompts.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

import hsd_jax
from hsd_jax import TreeConfig
from hsd_jax.api import conditional_acceptance
from hsd_jax.lab.bench.prompts import for_checkpoint


def cases(depth: int) -> dict[str, tuple[TreeConfig, float]]:
    """Trees and temperatures by name. `depth` must not exceed the depth the drafters were trained for."""
    chain = TreeConfig.chain(depth)
    trees = {nodes: TreeConfig(nodes, depth, width) for nodes, width in ((8, 2), (16, 4), (31, 4))}
    found = {f"chain of {depth}": (chain, 0.0)} | {f"{n} nodes": (tree, 0.0) for n, tree in trees.items()}
    return found | {f"chain of {depth}, T=1": (chain, 1.0), "16 nodes, T=1": (trees[16], 1.0)}


def counts(
    params: hsd_jax.Params, prompts: list[list[int]], tree: TreeConfig, temperature: float, args: argparse.Namespace
):
    """Tokens and target passes of each prompt, and acceptance by depth."""
    tokens, passes, histogram = [], [], 0
    for first in range(0, len(prompts), args.batch):
        some = prompts[first : first + args.batch]
        stats = hsd_jax.decode(
            params, some, args.max_new_tokens, temperature, seed=first, tree=tree, accept="match"
        ).stats
        passes.append(stats.per_row.num_target_passes)
        tokens.append(np.round(stats.per_row.tau * stats.per_row.num_target_passes))
        histogram = histogram + stats.accepted_histogram
    return np.concatenate(tokens), np.concatenate(passes), conditional_acceptance(histogram)


def difference(ours, theirs, seed: int = 0) -> list[float]:
    """The 95 % interval of the difference of two pooled taus, by resampling prompts."""
    draws = np.random.default_rng(seed).integers(0, len(ours[0]), (2000, len(ours[0])))
    tau = [tokens[draws].sum(1) / passes[draws].sum(1) for tokens, passes in (ours, theirs)]
    return np.percentile(tau[0] - tau[1], [2.5, 97.5]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a folder (default: the bundled demo target)")
    parser.add_argument("--drafters", nargs="+", required=True, metavar="NAME=DIR")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--half", choices=["tune", "report"], default="tune")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--json")
    args = parser.parse_args()
    first, record = {}, {}
    for name, folder in (item.split("=", 1) for item in args.drafters):
        base = {"name": "demo"} if args.target is None else {"target": args.target}
        params = hsd_jax.load(**base, drafter=folder)
        for source in args.prompts:
            kind, file = source.split("=", 1)
            prompts = for_checkpoint(params, [file], args.half, args.limit, args.max_new_tokens)
            texts = [one.tokens(params.tokenizer) for one in prompts]
            for case, (tree, temperature) in cases(args.depth).items():
                tokens, passes, acceptance = counts(params, texts, tree, temperature, args)
                tau, key, line = tokens.sum() / passes.sum(), (kind, case), ""
                if (reference := first.setdefault(key, (tokens, passes)))[0] is not tokens:
                    low, high = difference((tokens, passes), reference)
                    line = f" ({tau - reference[0].sum() / reference[1].sum():+.2f} [{low:+.2f}, {high:+.2f}])"
                record.setdefault(name, {}).setdefault(kind, {})[case] = {"tau": tau, "acceptance": acceptance.tolist()}
                shown = " ".join(f"{x:.2f}" for x in acceptance)
                print(f"{name:12} {kind}, {case}: tau {tau:.2f}{line}; by depth {shown}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
