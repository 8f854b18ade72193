"""The table of acceptance rules by name. A new rule is a file of this folder and a row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hsd_jax.config import TreeConfig
from hsd_jax.infer.rules.accept import match_rule, recursive_rule
from hsd_jax.infer.rules.block import block_rule
from hsd_jax.infer.rules.kseq import kseq_rule
from hsd_jax.infer.rules.lossy import Lossy
from hsd_jax.infer.rules.optimal import optimal_rule
from hsd_jax.types import AcceptRule, DrawScheme


class RuleEntry(NamedTuple):
    """A row of the table of rules."""

    make: Callable[[TreeConfig], AcceptRule]
    scheme: DrawScheme
    """The default scheme of its trees, under which it accepts most."""
    trees_may_shrink: bool = False
    """Whether any node may be left out of its trees, regardless of its token. Trees are then chosen by their cost."""
    keeps_text: bool = False
    """Whether the text equals that of plain decoding with the same seed. Other rules keep the distribution."""


RULES = {
    "match": RuleEntry(lambda tree: match_rule(tree.depth), DrawScheme.COUPLED, trees_may_shrink=True, keeps_text=True),
    "recursive": RuleEntry(lambda tree: recursive_rule(tree.depth, tree.width), DrawScheme.WITHOUT_REPLACEMENT),
    "optimal": RuleEntry(lambda tree: optimal_rule(tree.depth, tree.width), DrawScheme.TOP_THEN_RANDOM),
    "kseq": RuleEntry(lambda tree: kseq_rule(tree.depth), DrawScheme.INDEPENDENT),
    "block_verification": RuleEntry(block_rule, DrawScheme.WITHOUT_REPLACEMENT),
}


def make_rule(name: str, tree: TreeConfig, lossy: Lossy | None = None) -> AcceptRule:
    """The rule `name` of RULES for trees of this shape. With `lossy`, the rule is recursive (`Lossy.parse` checks)."""
    return RULES[name].make(tree) if lossy is None else recursive_rule(tree.depth, tree.width, lossy)
