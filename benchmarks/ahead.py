"""PEARL on one device: rounds by phase, and what two devices should give.

    python benchmarks/ahead.py --drafter SMALL --prompts dev.jsonl --gammas 2 4 --temperatures 0 1

Plain decoding, a chain of gamma drafts and PEARL take turns, `--repeats` times. Every token of PEARL is an accepted
draft or stands in the place of a rejected one, so `acceptance` is a count. c is the time of a plain pass over that of a
draft: what a round of the chain takes beyond its pass, over gamma. `overlapped` lets each round last as long as the
slower of both.
"""

from __future__ import annotations

import argparse
import statistics

import jax

import hsd_jax
from hsd_jax import theory
from hsd_jax.bench.machine import hardware
from hsd_jax.bench.prompts import for_checkpoint
from hsd_jax.config import TreeConfig

PLAIN, CHAIN, PEARL = "plain", "chain", "pearl"


def totals(params, texts: list[str], temperature: float, new: int, **how) -> tuple[float, list]:
    """Seconds of decoding all texts, one after the other, and the result of each."""
    found = [hsd_jax.decode(params, text, new, temperature, seed=row, **how) for row, text in enumerate(texts)]
    return sum(out.stats.decode_seconds for out in found), found


def report(small, texts: list[str], gamma: int, temperature: float, new: int, repeats: int) -> None:
    ahead = hsd_jax.pearl(small, gamma)
    ways = {
        PLAIN: (small, {"speculate": False}),
        CHAIN: (small, {"tree": TreeConfig.chain(gamma)}),
        PEARL: (ahead, {}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    results = {}
    for turn in range(repeats + 1):  # the first one compiles
        for name, (params, how) in ways.items():
            taken, results[name] = totals(params, texts, temperature, new, **how)
            seconds[name] += [taken] * bool(turn)
    took = {name: statistics.median(times) for name, times in seconds.items()}
    num = {name: sum(int(out.num_tokens.sum()) for out in found) for name, found in results.items()}
    rounds = {name: sum(out.stats.num_target_passes for out in found) for name, found in results.items()}
    same = sum(a.tokens.tolist() == b.tokens.tolist() for a, b in zip(results[PLAIN], results[PEARL], strict=True))
    pre, post = (sum(out.stats.drafter[f"{kind}-verify rounds"] for out in results[PEARL]) for kind in ("pre", "post"))
    tau = {name: num[name] / rounds[name] for name in ways}
    acceptance = (
        1 - (pre - len(texts)) / num[PEARL]
    )  # behind a rejection, and at first, a round verifies the root alone
    one = took[PLAIN] / rounds[PLAIN]
    draft = max((took[CHAIN] / rounds[CHAIN] - one) / gamma, 1e-9)
    speed = {name: took[PLAIN] / took[name] for name in (PEARL, CHAIN)}
    at_this_c = tau[PEARL] * one / max(one, gamma * draft)
    analytic = theory.pearl_speedup(acceptance, gamma), theory.standard_speedup(acceptance, gamma)
    print(
        f"T {temperature:g} gamma {gamma}: {same}/{len(texts)} texts as plain, {pre} pre and {post} post rounds,"
        f" acceptance {acceptance:.2f}, mean run {acceptance / max(1 - acceptance, 1e-9):.2f}, tau {tau[PEARL]:.2f}"
        f" (chain {tau[CHAIN]:.2f}), c {one / draft:.2f}; over plain: scheduled {speed[PEARL]:.2f}, chain"
        f" {speed[CHAIN]:.2f} (measured), overlapped {at_this_c:.2f} (computed from this c); at c = gamma"
        f" {analytic[0]:.2f}, chains {analytic[1]:.2f} (analytic)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--half", default="report")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    small = hsd_jax.load("demo", drafter=args.drafter)
    new = args.max_new_tokens
    texts = [p.text for p in for_checkpoint(small, args.prompts, args.half, args.limit, new)]
    print(f"{hardware()}; gamma by costs: {hsd_jax.pearl(small).drafter_config.gamma}")
    for temperature in args.temperatures:
        for gamma in args.gammas:
            report(small, texts, gamma, temperature, new, args.repeats)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
