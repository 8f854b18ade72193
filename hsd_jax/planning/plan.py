"""Plans a call that names no tree: the largest tree or plain decoding, and the costs for the decode loop.

No tree is timed here. `costs.py` predicts seconds, and `acceptance.py` tokens, from the profile that was stored when
the drafter was trained. Where `hsd_jax.tune` has measured, its record decides instead (`tuned.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hsd_jax import settings
from hsd_jax.config import ReuseConfig, TreeConfig
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.infer.rules.table import RULES
from hsd_jax.params import Params
from hsd_jax.planning.acceptance import profile_of
from hsd_jax.planning.costs import CostModel
from hsd_jax.planning.tuned import Choice, Tuned, Way, is_warm, kept
from hsd_jax.types import Costs

LEAST_GAIN = 1.05
"""The predicted speed of a chosen tree must be at least this many times that of plain decoding. The ratios
of short chains were predicted within about 5 per cent on one kind of processor (docs/history.md)."""
EQUALLY_GOOD = 0.985
"""Trees whose predicted speed is at least this fraction of the best one count as equally good. Of these the deepest is
chosen, because a round can drop drafts that do not pay, but not add levels; of several that deep, the smallest."""
AVERAGE_FILL = 1 / 4
"""The share of the slots of a cache that counts as filled during a call. It was set by hand."""
PLANNED_CHAINS = range(1, 8)
"""Drafts of the chains that are considered."""
PLANNED_WIDE = ((6, 3, 2), (8, 4, 2), (16, 7, 3))
"""Nodes, depth and width of the wide trees that are considered."""
PLANNED_WIDEST = (32, 7, 4)
"""A further one where this many nodes are free (`CostModel.are_free`)."""


@settings.dataclass
class Plan(Way):
    """How a call is decoded, and why."""

    reason: str = ""

    def __str__(self) -> str:
        return f"{'plain decoding' if self.tree is None else f'trees of {self.name}'}: {self.reason}"


def trees_of(
    config: Any, chains: Sequence[int] = PLANNED_CHAINS, wide: Sequence[tuple[int, int, int]] = PLANNED_WIDE
) -> list[TreeConfig]:
    """The trees that may be chosen for a drafter: chains that it can make, and wide trees, made small enough."""
    planning = method_of(config).planning
    steps = planning.max_depth(config)
    trees = [TreeConfig.chain(depth) for depth in chains if depth <= steps]
    for nodes, depth, width in wide if planning.grows_wide else ():
        trees.append(TreeConfig.fitting(nodes, min(depth, steps), min(width, config.draft_vocab_size)))
    return list(dict.fromkeys(trees))


@functools.lru_cache(maxsize=256)
def best_plan(model: CostModel, rows: int, slots: int, is_sampled: bool) -> Plan:
    """The plan by the cost model and the drafter's profile.

    It is the deepest of the trees that are about as fast as the fastest (EQUALLY_GOOD), or plain decoding if that tree
    gains too little (LEAST_GAIN). `rows` are those of the program, `slots` those of a row's caches.
    """
    profile = profile_of(model.drafter, is_sampled)

    def speed(tree: TreeConfig | None) -> float:
        return model.predicted_speed(rows, AVERAGE_FILL * slots, tree, profile, is_sampled)

    wide = (*PLANNED_WIDE, *[PLANNED_WIDEST] * model.are_free(rows, PLANNED_WIDEST[0]))
    trees = [tree for tree in trees_of(model.drafter, wide=wide) if tree.depth <= len(profile)]
    if not trees:
        return Plan(None, reason="this drafter can grow none of the trees that are considered")
    speeds = {tree: speed(tree) for tree in trees}
    enough = EQUALLY_GOOD * max(speeds.values())
    best = max((tree for tree in trees if speeds[tree] >= enough), key=lambda tree: (tree.depth, -tree.nodes))
    gain = speeds[best] / speed(None)
    how = "sampled" if is_sampled else "greedy"
    what = f"{rows} {how} row{'s' if rows > 1 else ''}, up to {slots} slots"
    if gain < LEAST_GAIN:
        reason = f"drafts should not pay here ({gain:.2f} times as fast as plain decoding, with {best.name}; {what})"
        return Plan(None, reason=reason)
    return Plan(best, is_adaptive=True, reason=f"should be {gain:.2f} times as fast as plain decoding ({what})")


def plan_for(params: Params, rows: int, slots: int, temperature: float, tuned: bool | Tuned = True) -> Plan:
    """The plan of a call that names no tree. Calls of the same sizes share a plan and its programs.

    Args:
      temperature: the highest of all rows.
      tuned: a record, or whether to use the record that was kept for these params.
    """
    record = tuned if isinstance(tuned, Tuned) else kept(params) if tuned else None
    choice = None if record is None else record.choice(rows, slots, temperature)
    if choice is not None and _can_grow(params, choice):
        size = f"for {choice.calls}"
        if choice.tree is None:
            return Plan(None, reason=f"`tune` found nothing faster {size}")
        reason = f"{choice.speedup:.2f} times as fast as plain decoding when `tune` measured it {size}"
        return Plan(choice.tree, choice.reuse, choice.is_adaptive, reason)
    # All sampled calls are planned as at temperature 1, because each tree needs programs of its own.
    return best_plan(CostModel.of(params), rows, slots, is_warm(temperature))


def _can_grow(params: Params, choice: Choice) -> bool:
    """Whether this drafter can grow the tree. Edited params keep their old fingerprints, so a record may not fit."""
    if choice.tree is None:
        return True
    scheme, reuse = RULES["match"].scheme, ReuseConfig.parse(choice.reuse)
    try:
        make_drafter(params.target_config, params.drafter_config, choice.tree, scheme=scheme, reuse=reuse)
    except ValueError:
        return False
    return True


def may_end_early(config: Any, tree: TreeConfig) -> bool:
    """Whether the drafter can stop before the last level of such a tree (`infer/chains.py`)."""
    return method_of(config).planning.ends_early and tree.width == 1


def check_adaptive(config: Any, rule: str, tree: TreeConfig) -> None:
    """Checks that a round may leave out drafts."""
    if not method_of(config).planning.has_score:
        raise ValueError(f"adaptive=True: a {config.kind} drafter does not predict how likely a draft is accepted")
    if not RULES[rule].trees_may_shrink and not may_end_early(config, tree):
        raise ValueError(
            f"adaptive=True with accept={rule!r} and tree {tree.name}: allowed are chains of a small language model, or"
            " accept='match'"
        )


@functools.lru_cache(maxsize=256)
def loop_costs(
    model: CostModel, rows: int, tree: TreeConfig, ends_early: bool = False, slots_of_trial: int | None = None
) -> Costs:
    """The costs with which the decode loop decides whether drafts pay, on the device.

    Args:
      slots_of_trial: slots of the caches, for a session that drafts only while few rows run. Drafts are tried with
        n rows if greedy batches of 1, 2, ... n rows would all get a tree. None: with any number of rows.
    """
    costs = model.table(rows, tree, ends_early)
    if slots_of_trial is None:
        return costs
    plans = [best_plan(model, max(num, 1), slots_of_trial, False) for num in range(rows + 1)]
    has_tree = [plan.tree is not None for plan in plans]
    return dataclasses.replace(costs, worth_trying=jax.device_put(np.logical_and.accumulate(has_tree)))
