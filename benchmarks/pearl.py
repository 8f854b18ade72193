"""Measures PEARL (methods.md 4.4): rounds by phase, and its speed against plain decoding and the best chain.

    python benchmarks/pearl.py --drafter SMALL --prompts dev.jsonl --gammas 2 4 --temperatures 0 1
    python benchmarks/pearl.py --drafter SMALL --prompts dev.jsonl --devices 1,1

Plain decoding, chains of every length in `--chains` and PEARL take turns on every prompt, `--repeats` times. PEARL is
compared with the chain that was the fastest of them, whatever its length. That chain is chosen on the same prompts, so
it is a little favoured. Every token of PEARL is either an accepted draft or the replacement of a rejected one, so
`acceptance` is an exact count. c is the time of a plain pass of the target over that of the small model, each on its
own devices (`measure/pearl.measured_c`). Without `--gammas` gamma is round(c). Predictions assume that a round of
PEARL takes as long as the slower of a pass of the target and gamma drafts, and that a chain's drafts take 1 / c each.

With `--devices T,D` the target runs on T devices and the small model on D others, at the same time (overlapped). Plain
decoding and chains stay on the target's devices. Without it both models take turns (scheduled). On a CPU 8 devices
are simulated: they share its cores and the CPU kernels are off, so these speeds say nothing about real devices.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax

import hsd_jax
from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value
from hsd_jax.config import TreeConfig
from hsd_jax.lab.bench.facts import hardware
from hsd_jax.measure.pearl import measured_c
from hsd_jax.measure.speeds import Mode, Runs, fastest, mode_record, speedup, time_modes
from hsd_jax.settings import Speculation

PLAIN = "plain"


def pearl_speedup(acceptance: float, gamma: int) -> float:
    """Speed of PEARL over plain decoding (Liu et al., arXiv:2408.11850).

    Each draft is accepted independently with probability a, and gamma drafts take as long as a pass of the target. A
    cycle from one rejection to the next has 1 / (1 - a) tokens in 1 + a / (1 - a^gamma) rounds of one pass each.
    """
    if acceptance == 1.0:
        return float(gamma)
    return 1 / (1 - acceptance) / (1 + acceptance / (1 - acceptance**gamma))


def standard_speedup(acceptance: float, gamma: int, ratio: float | None = None) -> float:
    """The same for chains of gamma drafts, first drafted and then verified (Leviathan et al., arXiv:2211.17192).

    Args:
      ratio: drafts in the time of a pass of the target. None: gamma, so a round takes the time of two passes.
    """
    return sum(acceptance**k for k in range(gamma + 1)) / (1 + gamma / (gamma if ratio is None else ratio))


def pearl_name(gamma: int) -> str:
    return f"pearl of {gamma}"


def modes_of(small: Any, ahead: list[Any], chains: list[int], accept: str) -> list[Mode]:
    """Plain decoding, the chains, in one program with the target, and PEARL with each gamma."""
    drafted = [Mode(f"chain of {n} drafts", small, Speculation(TreeConfig.chain(n), accept)) for n in chains]
    early = [Mode(pearl_name(one.tree.depth), one, Speculation(one.tree, accept)) for one in ahead]
    return [Mode(PLAIN, small), *drafted, *early]


def line_of(mode: Mode, modes: list[Mode], runs: Runs, c: float) -> str:
    """A line for a mode of PEARL."""
    gamma, chains = mode.tree.depth, {one.name: one for one in modes if one.name.startswith("chain")}
    record, num_prompts = mode_record(mode, runs, PLAIN), len(runs.results[PLAIN])
    counted = [result.stats.drafter for result in runs.results[mode.name]]
    pre, post, overlapped = (
        sum(one[f"{kind} rounds"] for one in counted) for kind in ("pre-verify", "post-verify", "overlapped")
    )
    acceptance = 1 - (pre - num_prompts) / record["num_tokens"]  # a round is pre-verify first and after a rejection
    run = acceptance / (1 - acceptance) if acceptance < 1 else float("inf")
    best = fastest(list(chains), runs)
    own, chain, ratio = (speedup(*two, runs)["value"] for two in ((mode.name, PLAIN), (best, PLAIN), (mode.name, best)))
    taus = {name: mode_record(one, runs, PLAIN)["tau"] for name, one in chains.items()}
    guesses = {name: taus[name] / (1 + one.tree.depth / c) for name, one in chains.items()}
    guess = max(guesses, key=lambda name: guesses[name])
    analytic = max(range(1, 2 * gamma + 2), key=lambda n: standard_speedup(acceptance, n, gamma))
    return (
        f"gamma {gamma}, c {c:.2f}: {record['same_text_as_plain']}/{num_prompts} texts as plain, {pre} pre and {post}"
        f" post rounds, acceptance {acceptance:.2f}, mean run {run:.2f}, tau {record['tau']:.2f} ({best}"
        f" {taus[best]:.2f}); over plain, measured: {'overlapped' if overlapped else 'scheduled'} {own:.2f}, the best"
        f" chain, {best}, {chain:.2f}; PEARL over it {ratio:.2f}; predicted from this c and tau: overlapped"
        f" {record['tau'] / max(1, gamma / c):.2f}, scheduled {record['tau'] / (1 + gamma / c):.2f}, {guess}"
        f" {guesses[guess]:.2f}; analytic, at c = gamma: {pearl_speedup(acceptance, gamma):.2f}, chain of"
        f" {analytic} drafts {standard_speedup(acceptance, analytic, gamma):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", required=True)
    options.add_prompt_arguments(parser, limit=8)
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 96)
    parser.add_argument("--gammas", type=int, nargs="+", default=[None])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="drafts of the chains")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--accept", choices=("match", "recursive"), default="match")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", metavar="T,D", help="as --devices of hsd generate")
    parser.add_argument("--platform", default="cpu", help="name of the jax platform, for example cuda (default: cpu)")
    parser.set_defaults(half="report")
    args = parser.parse_args()
    jax.config.update("jax_platforms", args.platform)
    if args.devices and args.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)
    small = hsd_jax.load(args.target, drafter=args.drafter)
    new = args.max_new_tokens
    prompts = options.prompts_of(args, small)
    texts = [list(map(int, p.tokens(small.tokenizer))) for p in prompts]
    print(f"{hardware()}; devices {args.devices or 'shared'}, accept {args.accept}")
    found = [hsd_jax.pearl(small, gamma, args.devices) for gamma in args.gammas]
    c = measured_c(found[0])
    if args.devices:  # one program for both models runs on the target's devices
        small = hsd_jax.place(dataclasses.replace(small, tree=None), found[0].mesh)
    modes = modes_of(small, found, args.chains, args.accept)
    for temperature in args.temperatures:
        runs = time_modes(modes, texts, max_new_tokens=new, temperature=temperature, repeats=args.repeats)
        for mode in modes[-len(found) :]:
            print(f"T {temperature:g}, {line_of(mode, modes, runs, c)}", flush=True)


if __name__ == "__main__":
    main()
