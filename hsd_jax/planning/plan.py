"""How a call is decoded when nobody says how: which tree at most, or plainly; and what the loop is told about costs.

Nothing is measured here: `costs.py` computes seconds, `acceptance.py` what drafts are worth, from the share of the
drafter's drafts that were accepted when it was trained. Inside the call `infer/worth.py` then verifies the drafts that
pay. Where `hsd_jax.tune` has measured (`tuned.py`), its record counts instead. Read next: `infer/worth.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from hsd_jax.config import NO_REUSE, ReuseConfig, TreeConfig
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.infer.accept import RULES
from hsd_jax.params import Params
from hsd_jax.planning.acceptance import profile_at
from hsd_jax.planning.costs import CostModel
from hsd_jax.planning.tuned import WARM, Choice, Tuned, is_warm, kept
from hsd_jax.types import Costs

LEAST_PROMISE, LEAST_OF_SHARED = 1.03, 1.0
"""A chosen tree must promise this many times the tokens a second of plain decoding. The second value is for sampled
calls of several rows, which share the program of greedy ones."""
NEARLY = 0.98
"""Trees whose predicted rate is at least this fraction of the best one count as equally good: the model of costs is no
more exact than that."""
LONGEST_PLANNED = 8
"""Nodes of the longest chain that is considered."""
WIDE_PLANNED = ((6, 3, 2), (8, 4, 2), (16, 7, 3))
"""Nodes, greatest depth and width of the trees that are considered, where a drafter can grow them."""
BETWEEN = 0.4
"""Temperature for which the tree of several rows is chosen: they share one plan, greedy or sampled."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is decoded, and why."""

    tree: TreeConfig | None
    """The largest tree; None: plain decoding."""
    reason: str
    is_adaptive: bool = True
    """False: this tree was asked for, or measured so, and is verified whole in every round."""
    reuse: ReuseConfig = NO_REUSE

    def __str__(self) -> str:
        if self.tree is None:
            return f"plain decoding: {self.reason}"
        reuse = "" if self.reuse == NO_REUSE else f" with reuse {self.reuse}"
        return f"trees of {'up to ' if self.is_adaptive else ''}{self.tree.name}{reuse}: {self.reason}"


def candidates(config: Any) -> list[TreeConfig]:
    """The trees that a drafter can grow and that may be chosen."""
    method = method_of(config).planning
    steps = method.max_depth(config)
    found = [TreeConfig.chain(depth) for depth in range(1, min(steps, LONGEST_PLANNED - 1) + 1)]
    for nodes, most, width in WIDE_PLANNED if method.grows_wide else ():
        depth = min(most, steps)
        if width <= config.draft_vocab_size and nodes <= 1 + width + (depth - 1) * width**2:
            found.append(TreeConfig(nodes, depth, width))
    return found


@functools.lru_cache(maxsize=256)
def best_plan(model: CostModel, batch: int, context: int, temperature: float) -> Plan:
    """The fastest way to decode by the model of costs and the drafter's profile.

    Args:
      batch: rows, as many as the program has.
      context: slots of the caches: the plan is one for all calls of these sizes.
      temperature: the highest of all rows.
    """

    def rate(tree: TreeConfig | None, temperature: float) -> float:
        return model.tokens_a_second(batch, context / 4, tree, profile_at(model.drafter, temperature))

    deepest = len(profile_at(model.drafter, temperature))
    trees = [tree for tree in candidates(model.drafter) if tree.depth <= deepest]
    if not trees:
        return Plan(None, "this drafter can grow no tree that is considered")
    rates = {tree: rate(tree, temperature if batch == 1 else BETWEEN) for tree in trees}
    # Of trees that are nearly as good the deepest: drafts that do not pay after all are dropped, none can be added.
    best = max((tree for tree in trees if rates[tree] >= NEARLY * max(rates.values())), key=lambda tree: tree.depth)
    gain = rate(best, temperature) / rate(None, temperature)
    what = f"{batch} row{'s' if batch > 1 else ''}, up to {context} slots, temperature {temperature:g}"
    is_shared = batch > 1 and temperature >= WARM
    if gain < (LEAST_OF_SHARED if is_shared else LEAST_PROMISE):
        return Plan(None, f"drafts should not pay here ({gain:.2f} times plain decoding with {best.name}; {what})")
    return Plan(best, f"should be {gain:.2f} times as fast as plain decoding ({what})")


def plan_for(params: Params, batch: int, capacity: int, temperature: float, tuned: bool | Tuned = True) -> Plan:
    """The plan of a call that leaves it to us; calls of the same sizes share one, and its programs.

    Args:
      batch, capacity: rows and slots of the program.
      temperature: the highest of all rows.
      tuned: a record; or whether one that was kept for these params counts.
    """
    record = tuned if isinstance(tuned, Tuned) else kept(params) if tuned else None
    choice = None if record is None else record.choice(batch, capacity, temperature)
    if choice is not None and _can_grow(params, choice):
        size = f"for {choice.calls}"
        if choice.tree is None:
            return Plan(None, f"`tune` found nothing faster {size}", is_adaptive=False)
        reason = f"{choice.speedup:.2f} times as fast as plain decoding when `tune` measured it {size}"
        return Plan(choice.tree, reason, not choice.is_whole, ReuseConfig.parse(choice.reuse))
    # Two plans by temperature where a tree can be deep; one tree, or none, where it is short: each is a program.
    return best_plan(CostModel.of(params), batch, capacity, float(is_warm(temperature)))


def _can_grow(params: Params, choice: Choice) -> bool:
    """Whether this drafter can grow the tree: params that were changed by hand keep the fingerprints of others."""
    if choice.tree is None:
        return True
    scheme, reuse = RULES["match"].scheme, ReuseConfig.parse(choice.reuse)
    try:
        make_drafter(params.target_config, params.drafter_config, choice.tree, scheme=scheme, reuse=reuse)
    except ValueError:
        return False
    return True


def may_end_early(config: Any, tree: TreeConfig) -> bool:
    """Whether the drafter can stop before the last level of such a tree."""
    return method_of(config).planning.ends_early and tree.width == 1


def check_adaptive(config: Any, rule: str, tree: TreeConfig) -> None:
    """Refuses `adaptive=True` where nothing can be left out.

    Raises:
      ValueError: without a drafter; for one that does not say how sure it is; under a rule that tests drawn drafts, for
        trees that cannot end early: of those no node may be dropped.
    """
    if not method_of(config).planning.has_score:
        raise ValueError(f"adaptive=True: a {config.kind} drafter does not say how sure it is of a draft")
    if not RULES[rule].trees_may_shrink and not may_end_early(config, tree):
        raise ValueError(
            f"adaptive=True with accept={rule!r}, a {config.kind} drafter and tree {tree.name}: there only chains"
            " of a small language model can end early; accept='match' allows every tree"
        )


@functools.lru_cache(maxsize=256)
def costs_of(
    model: CostModel, batch: int, tree: TreeConfig, ends_early: bool = False, tries_for: int | None = None
) -> Costs:
    """What the loop weighs drafts by, on the device.

    Args:
      ends_early: chains may.
      tries_for: slots of caches. Where given, drafts are tried only while fewer rows are busy than the smallest greedy
        batch for which no tree would be chosen.
    """
    costs = model.table(batch, tree, ends_early)
    if tries_for is None:
        return costs
    has_tree = [best_plan(model, max(rows, 1), tries_for, 0.0).tree is not None for rows in range(batch + 1)]
    return dataclasses.replace(costs, worth_trying=jax.device_put(np.logical_and.accumulate(has_tree)))
