"""Simulates chains that end early: replays chains of 7 and cuts each where `hsd_jax/infer/chains.py` would.

    python benchmarks/early.py --drafter DIR --prompts FILE --level-cost 0.1 0.2 0.3

This is a simulation: after a round that ends earlier, the next one would start at another token, which is not replayed.
Costs are in units of a plain pass (methods.md 8.1).
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import hsd_jax
from hsd_jax.arguments import Sampling
from hsd_jax.cli import options
from hsd_jax.cli.options import COUNT, add_value
from hsd_jax.config import TreeConfig
from hsd_jax.infer.rules import make_rule
from hsd_jax.infer.step import make_step
from hsd_jax.lab.bench.replay import watched_rounds
from hsd_jax.request import Speculation
from hsd_jax.session import prepare

DEPTH, NODE = 7, 0.01
"""Drafts of a chain, and the cost of verifying one of them in plain passes."""


def rounds_of(
    params, texts: list[list[int]], temperature: float, accept: str, new: int
) -> tuple[np.ndarray, np.ndarray]:
    """(scores [rounds, DEPTH + 1], accepted [rounds]) of every round; the scores decide where a chain ends early."""
    tree, scores, accepted, watched = TreeConfig.chain(DEPTH), [], [], None
    rule = make_rule(accept, tree)
    for seed, text in enumerate(texts):
        session = prepare(params, text, Sampling(new, temperature, seed=seed), Speculation(tree=tree, accept=accept))
        decoder = session.setup.decoder

        def step(models, sampling, limits, state, costs, drafter=decoder.drafter):
            seen = []

            def draft(*args):
                seen.append(drafter.draft(*args))
                return seen[0]

            def judge(*args):
                seen.append(rule.judge(*args))
                return seen[1]

            own = make_step(params.target_config, drafter._replace(draft=draft), rule._replace(judge=judge))
            after, tree = own(models, sampling, limits, state, costs), seen[0][0]
            score = tree.score
            if tree.draft_logp is not None:
                sure = jnp.log1p(jnp.exp(jnp.max(tree.draft_logp, -1))) - jnp.log(2.0)
                score = jnp.pad(jnp.cumsum(sure, 1), ((0, 0), (1, 0)))
            return after, (score, seen[1].num_accepted)

        watched = watched or decoder.compile(step)
        for score, num in watched_rounds(session, watched):
            scores.append(np.asarray(score)[0])
            accepted.append(int(np.asarray(num)[0]))
    return np.array(scores), np.array(accepted)


def replayed(score: np.ndarray, accepted: np.ndarray, level: float) -> tuple[list[float], float, float]:
    """Tokens per plain pass of fixed chains of 1 to DEPTH drafts, of chains that end early, and their mean length."""
    num, price = len(accepted), level + NODE
    fixed = [float((np.minimum(accepted, d) + 1).sum() / (num * (1 + price * d))) for d in range(1, DEPTH + 1)]
    tried = accepted[:, None] >= np.arange(DEPTH)
    edges = np.exp(np.diff(score, axis=1))[tried].sum()
    trust, rate, length = min(accepted.sum() / edges, 1.0), 1.0, np.ones(num, int)
    for _ in range(20):  # fixed point: the rate that prices a level equals the rate that results
        length, goes_on = np.ones(num, int), np.ones(num, bool)
        for d in range(1, DEPTH):
            goes_on &= np.exp((d + 1) * (score[:, d] / d + np.log(trust))) >= rate * price
            length += goes_on
        rate = float((np.minimum(accepted, length) + 1).sum() / (num + price * length.sum()))
    return fixed, rate, float(length.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", required=True)
    options.add_prompt_arguments(parser, 6)
    add_value(parser, "--max-new-tokens N", COUNT, "per prompt", 96)
    parser.add_argument("--level-cost", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.45])
    parser.set_defaults(half="report")
    args = parser.parse_args()
    params = hsd_jax.load("demo", drafter=args.drafter)
    for file in args.prompts or [None]:
        files = None if file is None else [file]
        prompts = options.prompts_of(args, params, files)
        texts = [p.tokens(params.tokenizer) for p in prompts]
        for temperature, accept in ((0.0, "match"), (1.0, "match"), (1.0, "recursive")):
            found = rounds_of(params, texts, temperature, accept, args.max_new_tokens)
            for level in args.level_cost:
                fixed, rate, length = replayed(*found, level)
                print(
                    f"{file} T={temperature} {accept}, a level costs {level}: early {rate:.3f} ({length:.2f} drafts),"
                    f" over the best fixed {rate / max(fixed):.3f}, over 4 {rate / fixed[3]:.3f}, over 7"
                    f" {rate / fixed[6]:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
