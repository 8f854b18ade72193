"""Compares the acceptance of a rule with the optimum for the trees that it judges, by depth.

A few prompts are decoded again, round by round and not timed. The distributions of target and drafter are kept at every
node that a round reaches. The expected acceptance of the rule there, over its own noise, is compared with the mean of
`theory.optimal_acceptance` at the same nodes. Read first: `lab/theory.py`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.arguments import Sampling
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.lab import theory
from hsd_jax.lab.bench.replay import JudgedRound, watched_rounds, watched_step
from hsd_jax.models.cache import take_nodes
from hsd_jax.planning.measure import Mode
from hsd_jax.request import rule_and_scheme
from hsd_jax.session import prepare
from hsd_jax.types import DRAWN_SCHEMES, AcceptRule, DecodeState, DrawScheme, SamplingParams

MOST_PROMPTS = 4
MOST_NUMBERS = 2**20
"""Most probabilities that are read, as vocabulary times nodes. It bounds the time."""

ROWS = 16
"""Number of nodes whose optimum is computed at once."""


def has_gap(mode: Mode, temperature: float) -> bool:
    """Whether the mode has a gap: its children are drawn, its text is sampled and not lossy, and there is no mesh."""
    how = mode.how
    drawn = how.tree is not None and rule_and_scheme(how.accept, how.draw)[1] in DRAWN_SCHEMES
    return drawn and temperature > 0 and mode.params.mesh is None and not how.lossy


def gap_by_depth(
    mode: Mode, prompts: Sequence[Any], seed: int, max_new_tokens: int, temperature: float
) -> list[dict[str, Any]]:
    """One record per depth, on replayed prefixes of the first prompts: nodes, mean children, and three acceptances.

    `expected` is the mean probability that the rule accepts one of the drawn children. Its coins decide only which
    nodes are reached. `optimum` is the mean of the largest acceptance of any lossless rule for as many children, drawn
    in this way. `greedy_plus_one` is the same if all children but one were the likeliest tokens (`top_then_random`).
    """
    vocab_size = mode.params.target_config.vocab_size
    most, nodes = max(16, MOST_NUMBERS // vocab_size), defaultdict(list)
    _, scheme = rule_and_scheme(mode.how.accept, mode.how.draw)
    watched = None
    for row, prompt in enumerate(prompts[:MOST_PROMPTS]):
        if sum(map(len, nodes.values())) >= most:
            break
        asked = Sampling(max_new_tokens, temperature, seed=[seed + row])
        with prepare(mode.params, prompt, asked, mode.how) as session:
            if watched is None:
                decoder, rule = session.setup.decoder, session.setup.accept_rule
                see = functools.partial(look_along_path, rule)
                watched = watched_step(decoder, mode.params.target_config, rule, see)
            for seen in watched_rounds(session, watched):
                accepted, counts, expected, target, draft = (np.asarray(x)[0] for x in seen)
                for depth in range(min(int(accepted) + 1, len(counts))):
                    if counts[depth]:
                        nodes[depth].append((int(counts[depth]), float(expected[depth]), target[depth], draft[depth]))
                if sum(map(len, nodes.values())) >= most:
                    break
    return [_record(depth, nodes[depth], scheme) for depth in sorted(nodes)]


def look_along_path(rule: AcceptRule, models: dict, sampling: SamplingParams, state: DecodeState, judged: JudgedRound):
    """A `see` for `watched_step`, after its first argument: the nodes along the path of a round.

    Returns:
      The number of accepted drafts [B]. For the first D nodes of the path: the number of valid children [B, D], the
      expected acceptance [B, D], and the probabilities of target and drafter [B, D, V]. Values after the accepted nodes
      have no meaning.
    """
    tree, verdict = judged.tree, judged.verdict
    assert tree.draft_logp is not None, "drawn trees have distributions"
    path = jnp.minimum(verdict.path[:, :-1], tree.draft_logp.shape[1] - 1)
    is_child = (tree.parents[:, None, :] == path[:, :, None]) & tree.valid[:, None, :]
    target = sampling_lib.target_distribution(judged.logits, sampling)
    assert rule.expected is not None, "the rules of the table say what they expect"
    expected = jnp.take_along_axis(rule.expected(tree, target), path, 1)
    probabilities = (jnp.exp(take_nodes(logp, path, axis=1)) for logp in (target, tree.draft_logp))
    return verdict.num_accepted, jnp.sum(is_child, -1), expected, *probabilities


def _record(depth: int, nodes: list[tuple], scheme: DrawScheme) -> dict[str, Any]:
    """The means over the nodes of a depth."""
    sums = {"optimum": 0.0, "greedy_plus_one": 0.0}
    for count in sorted({count for count, *_ in nodes}):
        target, draft = (np.stack([node[i] for node in nodes if node[0] == count]) for i in (2, 3))
        for name, drawn in (("optimum", scheme), ("greedy_plus_one", DrawScheme.TOP_THEN_RANDOM)):
            sums[name] += _total_optimum(target, draft, count, drawn)
    return {
        "depth": depth + 1,
        "num_nodes": len(nodes),
        "mean_children": float(np.mean([count for count, *_ in nodes])),
        "expected": float(np.mean([expected for _, expected, *_ in nodes])),
        **{name: total / len(nodes) for name, total in sums.items()},
    }


_optimal = functools.partial(jax.jit, static_argnames=("num_drafts", "scheme"))(theory.optimal_acceptance)


def _total_optimum(target: np.ndarray, draft: np.ndarray, num_drafts: int, scheme: DrawScheme) -> float:
    """The sum of `theory.optimal_acceptance` over rows, ROWS at a time, so that only one shape compiles."""
    total = 0.0
    for start in range(0, len(target), ROWS):
        here = slice(start, start + ROWS)
        num = len(target[here])
        padded = (np.pad(x[here], ((0, ROWS - num), (0, 0)), mode="edge") for x in (target, draft))
        total += float(np.asarray(_optimal(*padded, num_drafts=num_drafts, scheme=scheme))[:num].sum())
    return total
