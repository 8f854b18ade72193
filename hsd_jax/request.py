"""How rows are decoded: the tree, the rule that judges, the compiled functions, and the sizes of their arrays.

What can be wrong with that is found here, and in `arguments.py` what can be wrong with a row; nothing compiles before.
Read next: `planning/plan.py`, which chooses the tree, and `session.py`, where rows are decoded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any

from jax.sharding import Mesh
from pydantic import Field

from hsd_jax.arguments import Sampling
from hsd_jax.config import NO_REUSE, NONE, ModelConfig, ReuseConfig, TreeConfig, bucket
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.host.distributed import check_mesh
from hsd_jax.infer.accept import RULES, make_rule
from hsd_jax.infer.decode import GROWTH, Decoder
from hsd_jax.infer.lossy import Lossy
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.infer.step import make_step
from hsd_jax.kernels import native
from hsd_jax.models import cache as cache_lib
from hsd_jax.params import Params, default_tree
from hsd_jax.planning.costs import CostModel
from hsd_jax.planning.plan import Plan, check_adaptive, costs_of, may_end_early, plan_for
from hsd_jax.planning.tuned import Tuned
from hsd_jax.settings import OneOf, dataclass, take
from hsd_jax.types import Costs, DrawScheme

SMALLEST_CAPACITY, CAPACITY_UNIT = 512, 256
"""Slots of the smallest caches, the next GROWTH times as many; and what every capacity is a multiple of."""
MOST_LOOKAHEAD = 16
"""Slots that are kept free after a row for what a round may write, whatever tree it has: one size for all plans."""
LARGEST_FIRST = 2048
"""Caches up to this size are made for all tokens a call may give, larger ones for the prompt: they grow when full."""
MOST_PAD_ROWS = 256
"""Rows that plain decoding may be padded to: as many as a tree has nodes."""

AUTO = "auto"
"""The rule `match` for every row: a row's tokens depend on its prompt, settings and seed alone."""
Rule = Annotated[str, OneOf((AUTO, *RULES))]
Scheme = Annotated[str, OneOf(tuple(scheme.value for scheme in DrawScheme))]


@dataclass
class Speculation:
    """How the call is decoded: the arguments of `decode` of the same names.

    Under the rule `match` none of them changes a text; the other rules draw another one of the same distribution, with
    `lossy` one of another distribution.
    """

    tree: TreeConfig | None = None
    accept: Rule = AUTO
    draw: Scheme | None = None
    reuse: str = NONE
    speculate: bool = True
    tuned: bool | Tuned = True
    pad_rows: Annotated[int, Field(ge=1, le=MOST_PAD_ROWS)] = 1
    lossy: tuple[str, float] | str | None = None
    adaptive: bool | None = None


def records(settings: Mapping[str, Any]) -> tuple[Sampling, Speculation]:
    """Keyword arguments of `decode` as the two records."""
    own = {field.name for field in dataclasses.fields(Sampling)}
    sampling = {name: value for name, value in settings.items() if name in own}
    return Sampling(**sampling), Speculation(**{name: settings[name] for name in settings if name not in own})


@dataclasses.dataclass(frozen=True)
class Setup:
    """How rows are decoded: what is fixed for the life of a session."""

    decoder: Decoder
    models: dict[str, Any]
    """Weights of "target" and "drafter"."""
    costs: Costs | None
    """By which drafts that do not pay are dropped; None: every tree is verified whole."""
    plan: Plan
    rule: str
    scheme: DrawScheme
    lossy: str | None
    """The name of the lossy acceptance that drafts met; None: the text follows the target."""

    @functools.cached_property
    def held(self) -> Any:
        """`models` as `Decoder.run` takes them the fastest."""
        return self.decoder.hold(self.models)

    @property
    def lookahead(self) -> int:
        """Slots that are kept free after a row."""
        return max(self.decoder.lookahead, MOST_LOOKAHEAD)


def make_decoder(
    config: ModelConfig,
    drafter_config: Any,
    tree: TreeConfig | None,
    precision: str,
    cache_dtype: str,
    pad_rows: int,
    mesh: Mesh | None,
    accept: str,
    scheme: DrawScheme,
    reuse: ReuseConfig,
    lossy: Lossy | None = None,
    drafter_mesh: Mesh | None = None,
) -> Decoder:
    """The compiled functions of a static configuration; `_decoder` keeps those of this process."""
    matmul_precision = "highest" if precision == "exact" else None
    if drafter_config is None or tree is None:
        return Decoder(config, make_plain_step(config, pad_rows), None, cache_dtype, matmul_precision, mesh=mesh)
    rule = make_rule(accept, tree, lossy)
    if drafter_mesh is not None:
        overlapped = method_of(drafter_config).overlapped
        if overlapped is None:
            raise ValueError(
                f"a {drafter_config.kind} drafter is part of the target's program: place() both on one mesh"
            )
        meshes = mesh, drafter_mesh
        return overlapped(config, drafter_config, tree, scheme, rule, *meshes, cache_dtype, matmul_precision)
    drafter = make_drafter(config, drafter_config, tree, cache_dtype, scheme, reuse)
    step = make_step(config, drafter, rule)
    return Decoder(config, step, drafter, cache_dtype, matmul_precision, mesh=mesh)


@functools.lru_cache(maxsize=64)
def _decoder(level: str, *configuration, **more) -> Decoder:
    """`make_decoder`, once for each level of the CPU kernels."""
    return make_decoder(*configuration, **more)


def set_up(
    params: Params, asked: Speculation, num_rows: int, plan_rows: int, capacity: int, temperature: float
) -> Setup:
    """Plans, and looks up the decoder of that plan, or makes it; nothing compiles yet.

    Args:
      num_rows: of the program.
      plan_rows: for which the tree is chosen, where none is asked for.
      capacity: slots of the caches.
      temperature: the highest of all rows.
    Raises:
      ValueError: naming the wrong value and the allowed ones.
    """
    check_mesh(params.mesh)
    plan, rule, scheme = _plan_and_rule(params, asked, plan_rows, capacity, temperature)
    is_plain, lossy = plan.tree is None, Lossy.parse(asked.lossy, rule)
    decoder = _decoder(
        native.selected_isa(),
        params.target_config,
        None if is_plain else params.drafter_config,
        plan.tree,
        params.precision,
        cache_lib.fastest_dtype(params.target["embedding"].dtype).name,
        asked.pad_rows if is_plain else 1,
        mesh=params.mesh,
        accept="match" if is_plain else rule,
        scheme=DrawScheme.ARBITRARY if is_plain else scheme,
        reuse=plan.reuse,
        lossy=None if is_plain else lossy,
        drafter_mesh=None if is_plain else params.drafter_mesh,
    )
    costs = None
    if plan.is_adaptive and plan.tree is not None:
        ends_early = bool(asked.adaptive) and may_end_early(params.drafter_config, plan.tree)
        costs = costs_of(
            CostModel.of(params), num_rows, plan.tree, ends_early, None if plan_rows == num_rows else capacity
        )
    models = {"target": params.target, "drafter": None if is_plain else params.drafter}
    return Setup(decoder, models, costs, plan, rule, scheme, None if is_plain or lossy is None else lossy.name)


def _plan_and_rule(
    params: Params, asked: Speculation, rows: int, capacity: int, temperature: float
) -> tuple[Plan, str, DrawScheme]:
    """How the call is decoded, and the rule and the scheme of its trees, if there are any.

    Args:
      rows, capacity: of the program.
      temperature: the highest of all rows.
    """
    tree = params.tree if asked.tree is None else asked.tree
    reuse = ReuseConfig.parse(asked.reuse)
    rule, scheme = rule_and_scheme(asked.accept, asked.draw)
    if not asked.speculate or params.drafter is None:
        plan = Plan(None, "asked for" if params.drafter is not None else "no drafter is loaded", is_adaptive=False)
    elif tree is not None:
        plan = Plan(tree, "asked for", is_adaptive=False, reuse=reuse)
    elif not RULES[rule].trees_may_shrink or reuse != NO_REUSE:
        why = "trees that are drawn, or grow from reused states, stay whole"
        plan = Plan(default_tree(params.drafter_config), why, is_adaptive=False, reuse=reuse)
    else:
        plan = plan_for(params, rows, capacity, temperature, asked.tuned)
    return _adapted(params, asked, plan, rule), rule, scheme


def _adapted(params: Params, asked: Speculation, plan: Plan, rule: str) -> Plan:
    """The plan as `Speculation.adaptive` wants it."""
    if asked.adaptive is None:
        return plan
    if asked.adaptive:
        if params.drafter is None or not asked.speculate:
            raise ValueError(f"adaptive=True: this call has no drafts, {plan.reason}")
        check_adaptive(params.drafter_config, rule, plan.tree or default_tree(params.drafter_config))
    return dataclasses.replace(plan, is_adaptive=asked.adaptive)


def rows_bucket(batch: int, multiple: int = 1) -> int:
    """Rows that a batch is padded to: a power of two, and as many as the mesh divides."""
    rows = bucket(batch, 1)
    return -(-rows // multiple) * multiple


def first_capacity(prompt: int, total: int, lookahead: int, max_len: int) -> int:
    """Slots of the caches of a call, from few sizes: a size is a program.

    Args:
      prompt, total: tokens of the longest prompt, and of the longest row with all it may be given.
      lookahead: slots that a round may write after the committed ones.
      max_len: tokens that no row exceeds.
    """
    most, capacity = largest_capacity(lookahead, max_len), SMALLEST_CAPACITY
    while capacity < min(total + lookahead, max(prompt + SMALLEST_CAPACITY // 2 + lookahead, LARGEST_FIRST)):
        capacity *= GROWTH
    return most if 2 * capacity > most else capacity  # no size that is nearly the largest


def largest_capacity(lookahead: int, max_len: int) -> int:
    """Slots of the caches in which no row is ever full."""
    return -(-(max_len + lookahead) // CAPACITY_UNIT) * CAPACITY_UNIT


def rule_and_scheme(accept: str, draw: str | None) -> tuple[str, DrawScheme]:
    """The rule that judges and the scheme of the draft trees.

    Args:
      accept: "auto" is "match".
      draw: None: the scheme that suits the rule.
    Raises:
      ValueError: for an unknown rule or scheme, naming the allowed ones.
    """
    take(Scheme | None, draw, "draw")
    rule = "match" if take(Rule, accept, "accept") == AUTO else accept
    return rule, RULES[rule].scheme if draw is None else DrawScheme(draw)
