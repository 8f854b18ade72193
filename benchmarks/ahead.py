"""Measures PEARL (methods.md 4.4): rounds by phase, and its speed, predicted and measured.

    python benchmarks/ahead.py --drafter SMALL --prompts dev.jsonl --gammas 2 4 --temperatures 0 1
    python benchmarks/ahead.py --drafter SMALL --prompts dev.jsonl --devices 1 1

Plain decoding, a chain of gamma drafts and PEARL take turns, `--repeats` times. Every token of PEARL is either an
accepted draft or the replacement of a rejected one, so `acceptance` is an exact count. c is the time of a plain pass of
the target over that of the small model, each on its own devices. Without `--gammas` gamma is round(c). The prediction
assumes that a round takes as long as the slower of a pass of the target and gamma drafts.

With `--devices T D` the target runs on T devices and the small model on D others, at the same time (overlapped). Plain
decoding and chains stay on the target's devices. Without it both models take turns (scheduled). On a CPU the devices
are simulated: they share its cores and the CPU kernels are off, so these speeds say nothing about real devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics

import jax

import hsd_jax
from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value
from hsd_jax.config import TreeConfig
from hsd_jax.lab import theory
from hsd_jax.lab.bench.machine import hardware
from hsd_jax.lab.bench.prompts import for_checkpoint
from hsd_jax.planning.ahead import measured_c

PLAIN, CHAIN, PEARL = "plain", "chain", "pearl"


def totals(params, texts: list[list[int]], temperature: float, new: int, **how) -> tuple[float, list]:
    """Seconds of decoding all texts one by one, and the result of each."""
    found = [hsd_jax.decode(params, text, new, temperature, seed=row, **how) for row, text in enumerate(texts)]
    return sum(out.stats.decode_seconds for out in found), found


def report(
    small, ahead, c: float, texts: list[list[int]], temperature: float, new: int, repeats: int, accept: str = "auto"
) -> None:
    """Prints a line for the gamma of `ahead`.

    Args:
      small: drafts chains of the same length, in one program with the target.
    """
    gamma = ahead.tree.depth
    ways = {
        PLAIN: (small, {"speculate": False}),
        CHAIN: (small, {"tree": TreeConfig.chain(gamma), "accept": accept}),
        PEARL: (ahead, {"accept": accept}),
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
    counted = [out.stats.drafter for out in results[PEARL]]
    pre, post, overlapped = (
        sum(one[f"{kind} rounds"] for one in counted) for kind in ("pre-verify", "post-verify", "overlapped")
    )
    tau = {name: num[name] / rounds[name] for name in ways}
    acceptance = 1 - (pre - len(texts)) / num[PEARL]  # a round is pre-verify first and after a rejection
    run = acceptance / (1 - acceptance) if acceptance < 1 else float("inf")
    speed = {name: took[PLAIN] / took[name] for name in (PEARL, CHAIN)}
    beside, in_turn = max(1, gamma / c), 1 + gamma / c
    analytic = theory.pearl_speedup(acceptance, gamma), theory.standard_speedup(acceptance, gamma)
    print(
        f"T {temperature:g} gamma {gamma}, c {c:.2f}: {same}/{len(texts)} texts as plain, {pre} pre and {post} post"
        f" rounds, acceptance {acceptance:.2f}, mean run {run:.2f}, tau"
        f" {tau[PEARL]:.2f} (chain {tau[CHAIN]:.2f}); over plain: {'overlapped' if overlapped else 'scheduled'}"
        f" {speed[PEARL]:.2f}, chain {speed[CHAIN]:.2f} (measured); overlapped {tau[PEARL] / beside:.2f}, scheduled"
        f" {tau[PEARL] / in_turn:.2f}, chain {tau[CHAIN] / in_turn:.2f} (predicted from this c and tau); at c = gamma"
        f" {analytic[0]:.2f}, chains {analytic[1]:.2f} (analytic)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    options.add_prompt_arguments(parser, 8)
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 96)
    parser.add_argument("--gammas", type=int, nargs="+", default=[None])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--accept", choices=("match", "recursive"), default="match")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs=2, metavar=("T", "D"))
    parser.add_argument("--platform", default="cpu", help="name of the jax platform, for example cuda (default: cpu)")
    parser.set_defaults(half="report")
    args = parser.parse_args()
    jax.config.update("jax_platforms", args.platform)
    if args.devices and args.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", sum(args.devices))
    small = hsd_jax.load("demo", drafter=args.drafter)
    new = args.max_new_tokens
    prompts = for_checkpoint(small, args.prompts, args.half, args.limit, new, args.chat_template)
    texts = [p.tokens(small.tokenizer) for p in prompts]
    print(f"{hardware()}; devices {args.devices or 'shared'}, accept {args.accept}")
    found = [hsd_jax.pearl(small, gamma, args.devices) for gamma in args.gammas]
    c = measured_c(found[0])
    if args.devices:  # one program for both models runs on the target's devices
        small = hsd_jax.place(dataclasses.replace(small, tree=None), found[0].mesh)
    for temperature in args.temperatures:
        for ahead in found:
            report(small, ahead, c, texts, temperature, new, args.repeats, args.accept)


if __name__ == "__main__":
    main()
