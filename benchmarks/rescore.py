"""Chooses the weight of a scorer of drafts (`--rescore`, `--alpha`) and counts what it gives (docs/drafters.md).

    python benchmarks/rescore.py --target demo --scorers 4-gram=runs/ngram --prompts dev.jsonl --trees 8x7x1,16x6x4

Only the target decodes, to write the texts. Under `match` these texts are known beforehand, so tau is a count on them
(`measure/simulate.py`) and equals that of decoding. alpha is chosen on the `tune` half of the prompts. The table is of
the `report` half: the drafter's own trees, the same without scores between tokens (0-gram), and each scorer.
"""

from __future__ import annotations

import argparse
import shlex
import sys

import numpy as np

import hsd_jax
from hsd_jax.config import TreeConfig
from hsd_jax.drafters.files import ZERO_GRAM
from hsd_jax.inputs import encode
from hsd_jax.lab.bench.prompts import HALVES, Workload
from hsd_jax.lab.bench.tables import Table, print_tables, say
from hsd_jax.measure.simulate import accepted_lengths
from hsd_jax.measure.speeds import parse_trees
from hsd_jax.measure.texts import Texts, write_texts
from hsd_jax.pair import Params, rescore


def own_texts(params: Params, work: Workload, temperature: float) -> Texts:
    """The texts that the target writes after the prompts."""
    found = work.read(params, work.prompts)
    say(f"the target writes {len(found)} texts of half {work.half}")
    ids = [np.asarray(row) for row in encode(params, [prompt.tokens(params.tokenizer) for prompt in found])]
    return write_texts(params, ids, work.max_new_tokens, temperature, work.seed)


def tau_of(params: Params, texts: Texts, tree: TreeConfig, temperature: float) -> float:
    """Tokens per target pass of decoding these texts, by simulation."""
    (found,), _ = accepted_lengths(params, texts, [tree], temperature)
    return found.tau


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter")
    parser.add_argument("--scorers", nargs="+", default=[], metavar="NAME=DIR")
    parser.add_argument("--trees", default="8x7x1,16x6x4", metavar="NxDxW,...")
    parser.add_argument("--alphas", nargs="+", type=float, default=[0.1, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each file and half (default: 12)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    params = hsd_jax.load(args.target, drafter=args.drafter)
    scorers = {name: rescore(params, folder) for name, folder in (text.split("=", 1) for text in args.scorers)}
    size = args.limit, args.max_new_tokens, 0, 1, shlex.join(sys.argv)
    tuned_on, texts = (
        own_texts(params, Workload(tuple(args.prompts), half, *size), args.temperature) for half in HALVES
    )
    rows = []
    for tree in parse_trees(args.trees):
        base = tau_of(params, texts, tree, args.temperature)
        zero = tau_of(rescore(params, ZERO_GRAM, 0.0), texts, tree, args.temperature)
        rows += [("its own", tree.name, "", f"{base:.2f}"), (ZERO_GRAM, tree.name, "", f"{zero:.2f}")]
        for name, scored in scorers.items():
            tried = {a: tau_of(with_alpha(scored, a), tuned_on, tree, args.temperature) for a in args.alphas}
            say(f"{name}, {tree.name}: " + ", ".join(f"alpha {a:g} tau {tau:.2f}" for a, tau in tried.items()))
            best = max(tried, key=lambda a: tried[a])
            tau = tau_of(with_alpha(scored, best), texts, tree, args.temperature)
            rows.append((name, tree.name, f"{best:g}", f"{tau:.2f}"))
    title = f"{len(texts.length)} prompts of the report half, temperature {args.temperature:g}, simulated"
    print_tables([Table(title, ("scorer", "tree", "alpha", "tau"), rows, left=2)])


def with_alpha(params: Params, alpha: float) -> Params:
    """The same models with another weight of the scorer."""
    rescorer = params.drafter["rescorer"] | {"alpha": np.full(1, alpha, np.float32)}
    return params.replace(drafter=params.drafter | {"rescorer": rescorer})


if __name__ == "__main__":
    main()
