"""Plans a call that names no tree: the largest tree or plain decoding, and the costs for the decode loop.

`costs.py` predicts seconds, and `acceptance.py` tokens, from the profile that was stored when the drafter was trained.
What a race has measured (`race.py`) corrects the seconds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hsd_jax import validation
from hsd_jax.config import NO_REUSE_FORM, TreeConfig, bucket
from hsd_jax.drafters.table import method_of
from hsd_jax.infer.rules.table import RULES
from hsd_jax.pair import Params
from hsd_jax.planning.acceptance import profile_of, profile_of_slowest
from hsd_jax.planning.costs import CostModel
from hsd_jax.planning.race import Outcome, Race, is_off, race_of
from hsd_jax.types import Costs, Drafts

LEAST_GAIN, OF_MANY_ROWS = 1.05, 1.1
"""The speed of a chosen tree must be at least this many times that of plain decoding, as predicted or as measured by a
race; the second number is for more than FEW_ROWS rows. The ratios of short chains were predicted within about 5 per
cent on one kind of processor (docs/history.md). A race is as exact, and its plain rounds, which the drafter follows,
are a little slower than those of plain decoding. Of many rows the slowest one decides, and texts unlike those of the
profile take the gain away: eight greedy rows of the bundled pair got 1.1 on its dialogues and 0.92 on questions."""
FEW_ROWS = 4
EQUALLY_GOOD = 0.99
"""Trees whose predicted speed is at least this fraction of the best one count as equally good. Of these the one is
chosen that promises most tokens if all its nodes are verified, if those are free (`CostModel.are_free`): a round can
drop drafts that do not pay, but add none."""
WARM = 0.3
"""Calls with a temperature of at least WARM are planned as sampled calls, the others as greedy ones."""
AVERAGE_FILL = 1 / 4
"""The share of the slots of a cache that counts as filled during a call. It was set by hand."""
PLANNED_CHAINS = range(1, 8)
"""Drafts of the chains that are considered."""
PLANNED_WIDE = ((6, 3, 2), (8, 4, 2), (16, 7, 3))
"""Nodes, depth and width of the wide trees that are considered."""
PLANNED_WIDEST = (32, 7, 4)
"""A further one where this many nodes are free (`CostModel.are_free`)."""


@validation.dataclass
class Plan:
    """How a call is decoded, and why."""

    tree: TreeConfig | None
    """The largest tree. None: plain decoding."""
    reuse: str = NO_REUSE_FORM
    is_adaptive: bool = False
    """Whether a round verifies only the drafts that pay. False: every round verifies the whole tree."""
    gain: float = 1.0
    """The predicted speed of a chosen tree over that of plain decoding."""
    least_gain: float = LEAST_GAIN
    """What it must be at least."""
    reason: str = ""

    @property
    def name(self) -> str:
        if self.tree is None:
            return "plain"
        name = f"up to {self.tree.name}" if self.is_adaptive else self.tree.name
        return name if self.reuse == NO_REUSE_FORM else f"{name} {self.reuse}"

    def __str__(self) -> str:
        return f"{'plain decoding' if self.tree is None else f'trees of {self.name}'}: {self.reason}"


def is_warm(temperature: float) -> bool:
    """Whether calls at this temperature are planned as sampled calls."""
    return temperature >= WARM


def trees_of(
    config: Any,
    chains: Sequence[int] = PLANNED_CHAINS,
    wide: Sequence[tuple[int, int, int]] = PLANNED_WIDE,
    is_sampled: bool = False,
) -> list[TreeConfig]:
    """The trees that may be chosen for a drafter: chains that it can make, and wide trees, made small enough.

    Trees of greedy rows may end in copies, below the levels that the drafter grows. Sampled text repeats itself too
    seldom to pay for the noise of these levels.
    """
    planning = method_of(config).planning
    steps = planning.max_depth(config)
    trees = [TreeConfig.chain(depth) for depth in chains if depth <= steps]
    for nodes, depth, width in wide if planning.grows_wide else ():
        tree = TreeConfig.fitting(nodes, min(depth, steps), min(width, config.draft_vocab_size))
        deep = dataclasses.replace(tree, depth=max(tree.depth, min(tree.nodes - 1, PLANNED_CHAINS[-1])))
        ends_in_copies = planning.grown(config, deep) != deep
        trees.append(deep if ends_in_copies and not is_sampled else tree)
    return list(dict.fromkeys(trees))


@functools.lru_cache(maxsize=256)
def best_plan(
    model: CostModel,
    rows: int,
    slots: int,
    is_sampled: bool,
    is_refilled: bool = False,
    is_raced: bool = False,
) -> Plan:
    """The plan by the cost model and the drafter's profile.

    It is the fastest tree or one that is about as fast (EQUALLY_GOOD), or plain decoding if that tree gains too little.

    Args:
      rows: those of the program.
      slots: those of a row's caches.
      is_refilled: whether other rows follow those that end. Otherwise the call lasts as long as its slowest row.
      is_raced: a race decides whether enough is gained. Then the tree only must promise no loss.
    """
    profile = profile_of(model.drafter, is_sampled)
    likely = profile if is_refilled else profile_of_slowest(profile, rows)

    def speed(tree: TreeConfig | None) -> float:
        return model.predicted_speed(rows, AVERAGE_FILL * slots, tree, likely, is_sampled)

    wide = (*PLANNED_WIDE, *[PLANNED_WIDEST] * model.are_free(rows, PLANNED_WIDEST[0]))
    trees = [tree for tree in trees_of(model.drafter, wide=wide, is_sampled=is_sampled) if tree.depth <= len(profile)]
    if not trees:
        return Plan(None, reason="this drafter can grow none of the trees that are considered")
    speeds = {tree: speed(tree) for tree in trees}
    best = max(trees, key=speeds.__getitem__)
    good = [tree for tree in trees if speeds[tree] >= EQUALLY_GOOD * speeds[best] and model.are_free(rows, tree.nodes)]
    best = max([best, *good], key=lambda tree: model.tokens(tree, likely, is_sampled)[-1])
    gain = speeds[best] / speed(None)
    how = "sampled" if is_sampled else "greedy"
    what = f"{rows} {how} row{'s' if rows > 1 else ''}, up to {slots} slots"
    least = OF_MANY_ROWS if rows > FEW_ROWS and not is_refilled else LEAST_GAIN
    plan = Plan(best, is_adaptive=True, gain=gain, least_gain=least)
    return _judged(plan, what, 1.0 if is_raced else least)


def _judged(plan: Plan, what: str, least_gain: float) -> Plan:
    """The plan, or plain decoding if it gains too little, with the reason. `what` describes the calls."""
    if plan.gain >= least_gain:
        return dataclasses.replace(plan, reason=f"should be {plan.gain:.2f} times as fast as plain decoding ({what})")
    reason = f"drafts should not pay here ({plan.gain:.2f} times as fast as plain decoding, with {plan.name}; {what})"
    return Plan(None, gain=plan.gain, reason=reason)


@functools.lru_cache(maxsize=256)
def corrected(plan: Plan, raced: Outcome | None) -> Plan:
    """A plan with drafts as a race has corrected it."""
    if raced is None or plan.tree is None:
        return plan
    plan = dataclasses.replace(plan, gain=plan.gain / raced.correction)
    return _judged(plan, f"measured: {raced}", plan.least_gain)


def plan_for(
    params: Params, rows: int, slots: int, temperature: float, is_refilled: bool = False, raced_as: Any = None
) -> tuple[Plan, Race | None]:
    """The plan of a call that names no tree, as the model of costs has it, and the race that corrects it, if any.

    Calls of the same sizes share a plan and its programs. All sampled calls are planned as at temperature 1, because
    each tree needs programs of its own.

    Args:
      temperature: the highest of all rows.
      raced_as: what else the seconds of a round depend on; None: no race.
    """
    call = CostModel.of(params), rows, slots, is_warm(temperature), is_refilled
    if raced_as is not None and not is_off():
        plan = best_plan(*call, is_raced=not is_refilled)  # a session decides for each number of rows by the model
        race = None if plan.tree is None else race_of(plan.gain, *call, plan.tree, raced_as)
        if race is not None and not race.gave_up:
            return plan, race
    return best_plan(*call), None


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
    model: CostModel,
    rows: int,
    tree: TreeConfig,
    ends_early: bool = False,
    is_sampled: bool = False,
    slots_of_trial: int | None = None,
    raced: Outcome | None = None,
) -> Costs:
    """The costs with which the decode loop decides whether drafts pay, on the device.

    Args:
      slots_of_trial: slots of the caches, for a session. Drafts are tried with n rows if 1, 2, ... n rows, rounded up
        to powers of two, would all get a tree. None: with any number of rows.
      raced: what corrects the costs.
    """
    drafts = np.full(rows + 1, Drafts.IF_THEY_PAY, np.int8)
    if slots_of_trial is not None:
        plans = (best_plan(model, bucket(num, 1), slots_of_trial, is_sampled, True) for num in range(rows + 1))
        pays = np.logical_and.accumulate([corrected(plan, raced).tree is not None for plan in plans])
        drafts[~pays] = Drafts.NEVER
    if raced is None:
        return model.table(rows, tree, drafts, ends_early, is_sampled)
    costs = loop_costs(model, rows, tree, ends_early, is_sampled)
    correction, drafts = jax.device_put((np.float32(raced.correction), drafts))
    return dataclasses.replace(costs, correction=correction, drafts=drafts)
