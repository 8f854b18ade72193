"""How a call is decoded when nobody says how: which tree at most, or plainly; and what the loop is told about costs.

Nothing is measured here. Seconds are computed from the sizes of the models and from a few rates of the platform, and
what drafts are worth from the drafter's profile, the share of its drafts that were accepted when it was trained. Inside
the call `infer/worth.py` then verifies the drafts that pay. Where `hsd_jax.tune` has measured (`planning/tuned.py`),
its record counts instead. Read next: `infer/worth.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.config import NO_REUSE, SLIDING, ModelConfig, ReuseConfig, TreeConfig, layer_numbers
from hsd_jax.drafters.table import make_drafter, method_of
from hsd_jax.infer import worth
from hsd_jax.infer.accept import RULES
from hsd_jax.kernels import native
from hsd_jax.params import Params
from hsd_jax.planning.tuned import WARM, Choice, Tuned, is_warm, kept, num_cores
from hsd_jax.types import Costs

LEAST_PROMISE, LEAST_OF_SHARED = 1.03, 1.0
"""A tree is chosen if it promises so many times the tokens a second of plain decoding; the second for sampled calls of
several rows, which share the program of greedy ones."""
NEARLY = 0.98
"""Trees whose predicted rate is at least this fraction of the best one count as equally good: the model of costs is no
more exact than that."""
LONGEST_PLANNED = 8
"""Nodes of the longest chain that is considered."""
WIDE_PLANNED = ((8, 4, 2), (16, 6, 4))
"""Nodes, depth and width of the trees that are considered, where a drafter can grow them."""
BETWEEN = 0.4
"""Temperature for which the tree of several rows is chosen: they share one plan, greedy or sampled."""
UNKNOWN_PROFILE = {True: (0.75,) * LONGEST_PLANNED, False: (0.55,) * LONGEST_PLANNED}
"""Of a drafter without one, greedy (True) and at temperature 1: conservative, the call learns the rest."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a processor does a second. A pass takes little more than the slower of reading weights and multiplying."""

    bytes_per_second: float
    flops_per_second: float
    operation_seconds: float
    """Of one small operation, whatever it computes."""
    attention_share: float = 0.6
    """Of `flops_per_second` that attention to a cache reaches."""
    many_rows: float = 1.0
    """Times as long to read the weights for several rows as for one: XLA on CPU packs them then."""
    skips_rows: bool = False
    """Whether nodes that are not verified cost nothing."""


CPU_RATES = {  # of one core
    "avx512_bf16": Rates(24e9, 160e9, 3e-6, attention_share=0.35, skips_rows=True),
    "avx512": Rates(24e9, 90e9, 3e-6, skips_rows=True),
    "avx2": Rates(20e9, 55e9, 3e-6, skips_rows=True),
    native.OFF: Rates(12e9, 40e9, 5e-6, many_rows=2.2),
}
DEVICE_RATES = {"gpu": Rates(2.0e12, 3e14, 2e-6), "tpu": Rates(6e11, 1.2e14, 1e-6)}
MOST_CORES = 8
"""Cores that share the memory's speed; more do not read faster."""
OPERATIONS_PER_LAYER, OPERATIONS_PER_ROW = 8, 1.5
"""Small operations of a layer, and what each row adds to them, in such operations."""
TILE = 8
TILE_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.66, 0.93, 0.93, 1.0)
"""Of the time of a tile of 8 rows, what one of 0 to 8 rows takes: 6 rows do not fit the registers as well."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is decoded, and why."""

    tree: TreeConfig | None
    """The largest tree; None: plain decoding."""
    reason: str
    is_chosen: bool = True
    """False: this tree was asked for, or measured so, and is verified whole in every round."""
    reuse: ReuseConfig = NO_REUSE

    def __str__(self) -> str:
        if self.tree is None:
            return f"plain decoding: {self.reason}"
        reuse = "" if self.reuse == NO_REUSE else f" with reuse {self.reuse}"
        return f"trees of {'up to ' if self.is_chosen else ''}{self.tree.name}{reuse}: {self.reason}"


def rates_here(has_kernels: bool) -> Rates:
    """The rates of this process's device.

    Args:
      has_kernels: False on a mesh, where the CPU kernels are off.
    """
    platform = jax.default_backend()
    if platform != "cpu":
        return DEVICE_RATES.get(platform, DEVICE_RATES["gpu"])
    rates = CPU_RATES[native.chosen_level() if has_kernels and native.available() else native.OFF]
    cores = num_cores() or 1
    return dataclasses.replace(
        rates,
        bytes_per_second=rates.bytes_per_second * min(cores, MOST_CORES),
        flops_per_second=rates.flops_per_second * cores,
    )


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds of the passes of a pair of models.

    Args:
      itemsize, drafter_itemsize: bytes of a weight as it is held.
    """

    target: ModelConfig
    drafter: Any
    rates: Rates
    itemsize: int
    drafter_itemsize: int

    def product(self, numbers: float, rows: float | np.ndarray, itemsize: int) -> np.ndarray:
        """Products of some rows with weights of so many numbers."""
        rows = np.asarray(rows, float)
        reading = numbers * itemsize / self.rates.bytes_per_second * np.where(rows > 1, self.rates.many_rows, 1.0)
        counted = tile_rows(rows) if self.rates.skips_rows else rows
        multiplying = 2 * numbers * counted / self.rates.flops_per_second
        return np.where(rows > 0, (reading**5 + multiplying**5) ** 0.2, 0.0)  # near the larger, a little more

    def target_pass(self, rows: float | np.ndarray) -> np.ndarray:
        """A pass over so many rows, without attention to the cache."""
        c = self.target
        operations = c.num_layers * (OPERATIONS_PER_LAYER + OPERATIONS_PER_ROW * np.asarray(rows, float)) + 10
        small = operations * self.rates.operation_seconds
        numbers = c.num_layers * layer_numbers(c) + c.vocab_size * c.hidden_size
        return self.product(numbers, rows, self.itemsize) + small

    @property
    def windowed_share(self) -> float:
        """Of the layers, those with a sliding window."""
        c = self.target
        num = sum(c.layer_type(layer) == SLIDING for layer in range(c.num_layers))
        return 0.0 if c.sliding_window is None else num / c.num_layers

    def seen(self, slots: float) -> float:
        """Slots that a layer reads on average, of so many that are filled."""
        share = self.windowed_share
        return (1 - share) * slots + share * min(slots, self.target.sliding_window or slots)

    def slot(self) -> float:
        """One node's attention to one slot of the cache."""
        c = self.target
        flops = 4 * c.num_heads * c.head_dim * c.num_layers
        return flops / (self.rates.attention_share * self.rates.flops_per_second)

    def drafting(self, batch: int, tree: TreeConfig) -> float:
        """All of drafting a tree for every row of a batch."""
        return method_of(self.drafter).drafting_seconds(self, self.drafter, batch, tree)

    def layer_seconds(self, num_layers: int) -> float:
        """The small operations of a pass through so many layers."""
        return OPERATIONS_PER_LAYER * num_layers * self.rates.operation_seconds

    def costs(self, batch: int, tree: TreeConfig, trust: float, ends_early: bool = False) -> Costs:
        """What the loop is told.

        Args:
          ends_early: chains may.
        """
        rows = np.arange(batch * tree.nodes + 1)
        verify = self.target_pass(rows if self.rates.skips_rows else np.full(len(rows), rows[-1]))
        plain = self.target_pass(np.arange(batch + 1))
        draft = np.array([self.drafting(num if self.rates.skips_rows else batch, tree) for num in range(batch + 1)])
        window = self.target.sliding_window or 0, self.windowed_share
        numbers = verify, plain, draft, self.slot(), *window, trust, *([draft / tree.depth] if ends_early else [])
        return Costs(*(jax.device_put(np.asarray(x, np.float32)) for x in numbers))


def tile_rows(rows: np.ndarray) -> np.ndarray:
    """So many rows, as the whole tiles of a CPU kernel that would take as long."""
    rows = np.asarray(rows, float)
    tiles = np.maximum(np.ceil(rows / TILE), 1.0)
    return tiles * TILE * np.interp(rows / tiles, np.arange(TILE + 1), TILE_SHARES)


def profile_at(config: Any, temperature: float) -> tuple[float, ...]:
    """The share of a chain's drafts that is accepted, by depth, where all before were."""
    greedy = getattr(config, "profile", ()) or UNKNOWN_PROFILE[True]
    sampled = getattr(config, "sampled_profile", ()) or UNKNOWN_PROFILE[False]
    share = min(temperature, 1.0) if temperature >= WARM else 0.0
    most = min(len(greedy), len(sampled))
    return tuple((1 - share) * g + share * s for g, s in zip(greedy[:most], sampled[:most], strict=True))


def candidates(config: Any, skips_rows: bool) -> list[TreeConfig]:
    """The trees that a drafter can grow and that may be chosen.

    Where every node costs, chains: the drafts of a wide tree that pay are nearly all on its likeliest path, and growing
    the others costs a round more than they give.
    """
    method = method_of(config)
    steps = method.max_depth(config)
    found = [TreeConfig.chain(depth) for depth in range(1, min(steps, LONGEST_PLANNED - 1) + 1)]
    if method.grows_wide and not skips_rows:
        widest = config.draft_vocab_size
        found += [TreeConfig(*tree) for tree in WIDE_PLANNED if tree[1] <= steps and tree[2] <= widest]
    return found


def expected_tokens(profile: Sequence[float], tree: TreeConfig) -> np.ndarray:
    """Tokens a round if the 1, 2, ... N likeliest nodes of every tree are verified.

    Of a level's siblings the first is worth the profile, all W together 1 - (1 - a)^(1 + (W - 1) / 2): a guess; the
    tuner measures.
    """
    gains, reached = [], 1.0  # the probability that a round gets to the level above
    for a in profile[: tree.depth]:
        best = reached * a
        together = reached * (1 - (1 - a) ** (1 + (tree.width - 1) / 2))
        gains += [best] + [(together - best) / max(tree.width - 1, 1)] * (tree.width - 1)
        reached = together
    gains = np.sort(gains)[::-1][: tree.nodes - 1]
    return 1 + np.concatenate([[0.0], np.cumsum(gains)])


def choose(model: CostModel, batch: int, context: int, temperature: float) -> Plan:
    """The fastest way to decode by the model of costs and the drafter's profile.

    Args:
      batch: rows, as many as the program has.
      context: slots of the caches: the plan is one for all calls of these sizes.
      temperature: the highest of all rows.
    """
    slots = model.seen(context / 4)

    def rate(tree: TreeConfig, temperature: float) -> float:
        tokens = expected_tokens(profile_at(model.drafter, temperature), tree)
        nodes = np.arange(1, len(tokens) + 1)
        verified = nodes if model.rates.skips_rows else np.full(len(nodes), tree.nodes)
        attention = model.slot() * slots * batch * np.maximum(nodes, 4)
        seconds = model.target_pass(batch * verified) + attention + model.drafting(batch, tree)
        return float(np.max(batch * tokens / seconds))

    plain = batch / float(model.target_pass(batch) + model.slot() * slots * batch * 4)
    deepest = len(profile_at(model.drafter, temperature))
    trees = [tree for tree in candidates(model.drafter, model.rates.skips_rows) if tree.depth <= deepest]
    if not trees:
        return Plan(None, "this drafter can grow no tree that is considered")
    rates = {tree: rate(tree, temperature if batch == 1 else BETWEEN) for tree in trees}
    # Of trees that are nearly as good the deepest: drafts that do not pay after all are dropped, none can be added.
    best = max((tree for tree in trees if rates[tree] >= NEARLY * max(rates.values())), key=lambda tree: tree.depth)
    gain = rate(best, temperature) / plain
    what = f"{batch} row{'s' if batch > 1 else ''}, up to {context} slots, temperature {temperature:g}"
    is_shared = batch > 1 and temperature >= WARM
    if gain < (LEAST_OF_SHARED if is_shared else LEAST_PROMISE):
        return Plan(None, f"drafts should not pay here ({gain:.2f} times plain decoding with {best.name}; {what})")
    return Plan(best, f"should be {gain:.2f} times as fast as plain decoding ({what})")


def cost_model(params: Params) -> CostModel:
    """Of these params, which have a drafter, on this process's device."""
    assert params.drafter_config is not None
    weights = (x for x in jax.tree.leaves(params.drafter) if jnp.issubdtype(x.dtype, jnp.floating))
    sizes = jax.tree.leaves(params.target["embedding"])[0].dtype.itemsize, next((x.dtype.itemsize for x in weights), 4)
    return CostModel(params.target_config, params.drafter_config, rates_here(params.mesh is None), *sizes)


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
            return Plan(None, f"`tune` found nothing faster {size}", is_chosen=False)
        reason = f"{choice.speedup:.2f} times as fast as plain decoding when `tune` measured it {size}"
        return Plan(choice.tree, reason, not choice.is_whole, ReuseConfig.parse(choice.reuse))
    # Two plans by temperature where a tree can be deep; one tree, or none, where it is short: each is a program.
    return _chosen_before(cost_model(params), batch, capacity, float(is_warm(temperature)))


_chosen_before = functools.lru_cache(maxsize=256)(choose)


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


def costs_of(
    params: Params, batch: int, tree: TreeConfig, ends_early: bool = False, tries_for: int | None = None
) -> Costs:
    """What the loop weighs drafts by, on the device.

    Args:
      ends_early: chains may.
      tries_for: slots of caches, where drafts are only tried while few rows are busy: up to the first number of rows
        for whose greedy batch no tree would be chosen.
    """
    return _costs(cost_model(params), batch, tree, ends_early, tries_for)


def may_end_early(config: Any, tree: TreeConfig) -> bool:
    """Whether the drafter can stop before the last level of such a tree."""
    return method_of(config).ends_early and tree.width == 1


def check_adaptive(config: Any, rule: str, tree: TreeConfig) -> None:
    """Refuses `adaptive=True` where nothing can be left out.

    Raises:
      ValueError: without a drafter; for one that does not say how sure it is; under a rule that tests drawn drafts, for
        trees that cannot end early: of those no node may be dropped.
    """
    if not method_of(config).has_score:
        raise ValueError(f"adaptive=True: a {config.kind} drafter does not say how sure it is of a draft")
    if rule != "match" and not may_end_early(config, tree):
        raise ValueError(
            f"adaptive=True with accept={rule!r}, a {config.kind} drafter and tree {tree.name}: there only chains"
            " of a small language model can end early; accept='match' allows every tree"
        )


@functools.lru_cache(maxsize=256)
def _costs(model: CostModel, batch: int, tree: TreeConfig, ends_early: bool, tries_for: int | None) -> Costs:
    costs = model.costs(batch, tree, worth.first_trust(method_of(model.drafter).has_score), ends_early)
    if tries_for is None:
        return costs
    has_tree = [_chosen_before(model, max(rows, 1), tries_for, 0.0).tree is not None for rows in range(batch + 1)]
    return dataclasses.replace(costs, worth_trying=jax.device_put(np.logical_and.accumulate(has_tree)))
