"""Tests whether 10^5 tokens of each rule other than `match` follow the target's distribution (docs/family.md).

    python benchmarks/distribution.py --prompts dev.jsonl --limit 900

Prints one line per rule and tree for the demo pair, plain decoding first: the number of tokens, tau, the chi-square of
the tokens' places in the target's distribution (`hsd_jax/lab/bench/distribution.py`) and its p-value.
"""

from __future__ import annotations

import argparse

import hsd_jax
from hsd_jax import TreeConfig
from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value
from hsd_jax.lab.bench import distribution, identity

CASES = {
    "plain": ("match", None, None),
    "recursive": ("recursive", None, TreeConfig.chain(7)),
    "recursive, RSD-S": ("recursive", None, TreeConfig(8, 5, 2)),
    "recursive, RSD-C": ("recursive", None, TreeConfig(branching=(2, 1, 1, 1))),
    "recursive, independent": ("recursive", "independent", TreeConfig(branching=(2, 1, 1, 1))),
    "kseq": ("kseq", None, TreeConfig(branching=(2, 1, 1, 1))),
    "optimal": ("optimal", None, TreeConfig(branching=(2, 1, 1, 1))),
    "block_verification": ("block_verification", None, TreeConfig.chain(7)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_prompt_arguments(parser, 900)
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 128)
    add_value(parser, "--temperature T", options.TEMPERATURE, "of all texts", 0.8)
    add_value(parser, "--batch B", COUNT, "rows at a time", 16)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.set_defaults(half="report")
    args = parser.parse_args()
    params = hsd_jax.load("demo")
    found = options.prompts_of(args, params)
    prompts = [(one.text, one.tokens(params.tokenizer)) for one in found]
    for name in args.cases:
        accept, draw, tree = CASES[name]
        how = {"temperature": args.temperature, "speculate": tree is not None, "tree": tree}
        how |= {} if tree is None else {"accept": accept, "draw": draw}
        texts, tau, _ = identity.decode_all(params, prompts, args.max_new_tokens, args.batch, 10_000, how)
        fit = distribution.goodness_of_fit(
            params, [ids for _, ids in prompts], texts, {"temperature": args.temperature}
        )
        print(f"{name}: {fit.tokens:,} tokens, tau {tau:.2f}, chi-square {fit.chi_square:.1f}, p {fit.p_value:.3f}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
