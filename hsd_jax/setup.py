"""Decides how rows are decoded: the tree, the acceptance rule, the compiled functions and the sizes of their arrays.

Wrong settings of speculation raise an error here, and wrong settings of a row in `inputs.py`, before anything
compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from hsd_jax.config import NO_REUSE, ModelConfig, ReuseConfig, TreeConfig, bucket
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.host.compilation import make_room
from hsd_jax.host.distributed import check_mesh
from hsd_jax.host.jax_settings import check_jax_settings
from hsd_jax.infer.adapt import with_drafts
from hsd_jax.infer.loop import GROWTH, ControlledBy, Decoder, or_most, program_for
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.infer.round import make_step
from hsd_jax.infer.rules.lossy import Lossy
from hsd_jax.infer.rules.table import RULES, make_rule
from hsd_jax.kernels import attention, native
from hsd_jax.kernels.program import Program
from hsd_jax.models import cache as cache_lib
from hsd_jax.pair import Params, default_tree
from hsd_jax.planning.costs import CostModel
from hsd_jax.planning.plan import Plan, check_adaptive, corrected, is_warm, loop_costs, may_end_early, plan_for
from hsd_jax.planning.race import Outcome, Race
from hsd_jax.settings import AUTO, Speculation
from hsd_jax.types import AcceptRule, Costs, DrawScheme, Processor

APART = "a drafter on devices of its own"
SMALLEST_CAPACITY, CAPACITY_UNIT = 512, 256
"""The number of slots of the smallest caches (each next size has GROWTH times as many), and a divisor of the number of
slots of all caches."""
MOST_LOOKAHEAD = 16
"""The number of slots that are reserved beyond a row for what a round writes. It is the same for all chosen trees, so
their caches have one size."""
LARGEST_FIRST = 2048
"""Caches of up to this number of slots have room for all tokens of a call from the start. Larger ones have room for the
prompt and grow when they are full."""


@dataclasses.dataclass(frozen=True)
class Drafting:
    """The static configuration of speculation, for which a decoder is compiled."""

    config: Any
    """The drafter's."""
    tree: TreeConfig
    rule: str
    scheme: DrawScheme
    reuse: ReuseConfig = NO_REUSE
    lossy: Lossy | None = None
    mesh: Mesh | None = None
    """The devices of a drafter that has its own."""

    @property
    def accept_rule(self) -> AcceptRule:
        """The rule that judges its trees."""
        return make_rule(self.rule, self.tree, self.lossy)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of decoding that are fixed for the life of a session."""

    decoder: Decoder
    models: dict[str, Any]
    """Weights of "target" and "drafter"."""
    costs: Costs | None
    """The costs by which drafts that do not pay are left out. None: all nodes of every tree are verified."""
    plan: Plan
    drafting: Drafting | None
    """None: plain decoding."""
    race: Race | None
    """What times the rounds of this plan. None: nothing."""
    is_exact: bool
    """Whether rounds with and without drafts have the same bits."""
    costs_after: Callable[[Outcome], Costs]
    """The costs that an outcome of the race corrects."""
    is_refilled: bool
    decoder_with: Callable[[ControlledBy], Decoder]
    """Makes the decoder of the same rounds for rows with `Controls`."""

    @property
    def is_apart(self) -> bool:
        """Whether the drafter runs on devices of its own."""
        return self.drafting is not None and self.drafting.mesh is not None

    def controlled(self, process: Processor | None = None) -> Setup:
        """The same setup for rows with `Controls`, whose logits this function changes, too."""
        return dataclasses.replace(self, decoder=self.decoder_with(ControlledBy(process)))

    def after_race(self, outcome: Outcome) -> Setup:
        """The same decoder, planned with the outcome of the race."""
        plan, costs = corrected(self.plan, outcome), self.costs_after(outcome)
        if plan.tree is None and not self.is_refilled:
            costs = with_drafts(costs, False)
        elif plan.tree is None and np.asarray(costs.drafts).any():
            plan = dataclasses.replace(self.plan, reason=f"{plan.reason}; fewer rows may draft")
        return dataclasses.replace(self, plan=plan, costs=costs, race=None)

    @functools.cached_property
    def held(self) -> Any:
        """`models`, flattened once for `Decoder.run`."""
        return self.decoder.hold(self.models)

    @property
    def lookahead(self) -> int:
        """The number of slots that are kept free after a row."""
        return max(self.decoder.lookahead, MOST_LOOKAHEAD)


@functools.lru_cache(maxsize=64)
def make_decoder(
    own: Program,
    config: ModelConfig,
    drafting: Drafting | None,
    cache_dtype: str,
    controlled: ControlledBy | None = None,
) -> Decoder:
    """The functions of a static configuration, which are compiled once for each and for each program `own`."""
    process = None if controlled is None else controlled.process
    if drafting is None:
        return Decoder(config, make_plain_step(config, process), None, cache_dtype, own, controlled)
    kind, tree, scheme, rule = drafting.config, drafting.tree, drafting.scheme, drafting.accept_rule
    if drafting.mesh is not None:
        overlapped = method_of(kind).overlapped
        if overlapped is None:
            raise ValueError(f"a {kind.kind} drafter cannot run on devices of its own: place() both models on one mesh")
        if controlled is not None:
            raise ValueError(f"{APART}: no row may change logits or ask for log-probabilities")
        return overlapped(config, kind, tree, scheme, rule, drafting.mesh, cache_dtype, own)
    drafter = make_drafter(config, kind, tree, cache_dtype, scheme, drafting.reuse)
    return Decoder(config, make_step(config, drafter, rule, process), drafter, cache_dtype, own, controlled)


def set_up(
    params: Params,
    asked: Speculation,
    num_rows: int,
    plan_rows: int,
    capacity: int,
    temperature: float,
    is_refilled: bool = False,
) -> Setup:
    """Makes the plan, and looks up or makes the decoder of that plan. Nothing compiles yet.

    Args:
      num_rows: rows of the program.
      plan_rows: the rows for which the tree is chosen.
      temperature: the highest of all rows.
      is_refilled: whether other rows follow those that end.
    """
    check_jax_settings()
    check_mesh(params.mesh)
    make_room()
    rule, scheme = rule_and_scheme(asked.accept, asked.draw)
    own = program_for(params.matmul_precision, mesh=params.mesh)
    # On an H200 plain laps took up to 1.4 times as long as rounds of plain decoding: the model was the better judge.
    is_raced = asked.race and own.platform == "cpu"
    raced_as = (num_rows, own, os.environ.get(attention.VARIABLE)) if is_raced else None
    plan, race = _plan(params, asked, rule, plan_rows, capacity, temperature, is_refilled, raced_as)
    outcome = None if race is None else race.outcome
    plan = corrected(plan, outcome)
    lossy, drafting, costs = Lossy.parse(asked.lossy, rule), None, None  # wrong also where nothing is drafted
    if plan.tree is not None:
        reuse = ReuseConfig.parse(plan.reuse)
        drafting = Drafting(params.drafter_config, plan.tree, rule, scheme, reuse, lossy, params.drafter_mesh)
    dtype = cache_lib.cache_dtype(params.target["embedding"].dtype).name
    # made here, because it refuses what no drafter can grow
    make = functools.partial(make_decoder, own, params.target_config, drafting, dtype)
    decoder = make()
    costs_after: Any = None
    if plan.tree is not None and plan.is_adaptive:
        ends_early = bool(asked.adaptive) and may_end_early(params.drafter_config, plan.tree)
        trial = capacity if is_refilled and plan.gain > 1.0 else None  # a requested tree is for any number of rows
        about = CostModel.of(params), num_rows, plan.tree, ends_early, is_warm(temperature), trial
        costs_after = functools.partial(loop_costs, *about)
        costs = costs_after(outcome)
    if costs is None or decoder.drafter.follow is None or outcome is not None:
        race = None
    models = {"target": params.target, "drafter": None if drafting is None else params.drafter}
    return Setup(decoder, models, costs, plan, drafting, race, own.isa != native.OFF, costs_after, is_refilled, make)


def _plan(
    params: Params,
    asked: Speculation,
    rule: str,
    rows: int,
    capacity: int,
    temperature: float,
    is_refilled: bool,
    raced_as: Any,
) -> tuple[Plan, Race | None]:
    tree, reuse = params.tree if asked.tree is None else asked.tree, ReuseConfig.parse(asked.reuse)
    race = None
    if not asked.speculate or params.drafter is None:
        plan = Plan(None, reason="requested" if params.drafter is not None else "no drafter is loaded")
    elif tree is not None:
        plan = Plan(tree, asked.reuse, reason="requested")
    elif not RULES[rule].trees_may_shrink or reuse != NO_REUSE:
        why = "trees that are drawn or grow from reused states keep all their nodes"
        plan = Plan(default_tree(params.drafter_config), asked.reuse, reason=why)
    else:
        plan, race = plan_for(params, rows, capacity, temperature, is_refilled, raced_as)
    if asked.adaptive:
        if params.drafter is None or not asked.speculate:
            raise ValueError(f"adaptive=True: this call has no drafts ({plan.reason})")
        check_adaptive(params.drafter_config, rule, plan.tree or default_tree(params.drafter_config))
    if asked.adaptive is not None:
        plan = dataclasses.replace(plan, is_adaptive=asked.adaptive and plan.tree is not None)
    return plan, race


def rows_bucket(batch: int, multiple: int = 1) -> int:
    """The number of rows to which a batch is padded: the next power of two, rounded up to a multiple of `multiple`."""
    rows = bucket(batch, 1)
    return -(-rows // multiple) * multiple


def first_capacity(prompt: int, total: int, lookahead: int, max_len: int) -> int:
    """The number of slots of a call's caches. It takes few values, because each value needs a program of its own.

    `prompt` is the length of the longest prompt, `total` the largest length that any row may reach.
    """
    most, capacity = largest_capacity(lookahead, max_len), SMALLEST_CAPACITY
    while capacity < min(total + lookahead, max(prompt + SMALLEST_CAPACITY // 2 + lookahead, LARGEST_FIRST)):
        capacity *= GROWTH
    return or_most(capacity, most)


def largest_capacity(lookahead: int, max_len: int) -> int:
    """The number of slots of caches that every row fits into."""
    return -(-(max_len + lookahead) // CAPACITY_UNIT) * CAPACITY_UNIT


def rule_and_scheme(accept: str, draw: str | None) -> tuple[str, DrawScheme]:
    """The acceptance rule ("auto" means "match") and the draw scheme of the trees (None: the one that suits it)."""
    rule = "match" if accept == AUTO else accept
    return rule, RULES[rule].scheme if draw is None else DrawScheme(draw)


def keeps_text(accept: str) -> bool:
    """Whether text under a rule of this name equals that of plain decoding with the same seed; "auto" is "match"."""
    return RULES[rule_and_scheme(accept, None)[0]].keeps_text
