"""Rules for tests, and the depths of their trees."""

from __future__ import annotations

from hsd_jax.config import TreeConfig
from hsd_jax.infer import sampling as sampling_lib
from hsd_jax.infer.rules.accept import match_path
from hsd_jax.infer.rules.table import RULES
from hsd_jax.types import DRAWN_SCHEMES, NO_PARENT, AcceptRule, DrawScheme

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
