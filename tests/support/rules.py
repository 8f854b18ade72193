"""Rules for tests, the depths of their trees, and what functions of ours say of every tree there is."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from oracles import recursive as recursive_oracle

from hsd_jax.config import TreeConfig
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.rules.accept import match_path
from hsd_jax.infer.rules.table import RULES
from hsd_jax.types import DRAWN_SCHEMES, NO_PARENT, AcceptRule, DraftTree, DrawScheme

DEPTH = 3


def drawn_schemes(rule: str) -> list[DrawScheme]:
    """Schemes of drawn trees for which a rule of the package's table is lossless, its default first."""
    row = RULES[rule]
    allowed = row.make(TreeConfig.chain(1)).schemes & DRAWN_SCHEMES
    return sorted(allowed, key=lambda scheme: (scheme is not row.scheme, scheme.value))


def judges(rule: str, tree: TreeConfig) -> bool:
    """Whether a rule of the package's table takes trees of this shape."""
    try:
        RULES[rule].make(tree)
    except ValueError:
        return False
    return True


def depths_of(parents: list[int]) -> list[int]:
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent == NO_PARENT else depth[parent] + 1)
    return depth


def keyed(predicted, max_depth: int = DEPTH) -> AcceptRule:
    """The match rule with noise taken at `predicted(root_position [B, 1], depth [B, N])`."""

    def judge(keys, tree, logits, sampling, root_position, noise):
        positions = predicted(root_position[:, None], tree.depth)
        return match_path(tree, sampling_lib.draw(keys, logits, positions, sampling), max_depth)

    return AcceptRule("keyed", frozenset(DrawScheme), judge)


Trees = list[tuple[list[int], list[bool], Fraction]]
"""Tokens, which nodes there are, and the probability."""
Judged = Callable[[int], tuple]
"""Of a node: the odds of its children once those before them are refused, and what is left once all are."""


def judged_by_ours(rule, target, draft, parents, trees: Trees, scheme: DrawScheme) -> list[Judged]:
    """What a function of ours says of every tree, all in one batch, in float64."""
    tokens, valid = np.array([t for t, _, _ in trees], np.int32), np.array([v for _, v, _ in trees])
    interior = max(parents) + 1
    with np.errstate(divide="ignore"):
        logs = [np.log(np.array(t, float)) for t in (target, draft)]
    rows = functools.partial(np.broadcast_to, shape=tokens.shape)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        tree = DraftTree(
            jnp.asarray(tokens),
            jnp.asarray(rows(np.array(parents, np.int32))),
            jnp.asarray(rows(np.array(depths_of(parents), np.int32))),
            jnp.asarray(valid),
            jnp.asarray(logs[1][tokens[:, :interior]]),
            scheme,
        )
        # Traced anew, so that a mutant is in it.
        chances, residual = map(np.asarray, jax.jit(lambda *args: rule(*args))(tree, logs[0][tokens]))
    assert chances.dtype == residual.dtype == np.float64
    residual = residual / np.maximum(residual.sum(-1, keepdims=True), 1e-300)  # as drawing by Gumbel-max does

    def of(row: int) -> Judged:
        def judged(node):
            if node >= interior:
                return [], [float(p) for p in target[tokens[row, node]]]
            return [chances[row, c] for c in recursive_oracle.children_of(parents, valid[row], node)], residual[
                row, node
            ]

        return judged

    return [of(row) for row in range(len(trees))]


def emitted_one_by_one(parents, trees: Trees, judged: list[Judged]) -> dict:
    """The distribution of what is emitted over all trees and coins, where siblings are tried in their order."""
    emitted: dict = defaultdict(int)
    for (tokens, valid, mass), of in zip(trees, judged, strict=True):
        for text, p in recursive_oracle.verdict_distribution(tokens, parents, valid, of).items():
            emitted[text] += mass * p if isinstance(p, Fraction | int) else float(mass) * p
    return emitted
