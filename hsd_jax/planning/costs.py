"""What a round costs: seconds of passes and of drafting, from the sizes of models and the rates of a processor, or from
rounds that were timed.

Read first: `rates.py`. What a round yields is in `acceptance.py`. Read next: `plan.py`, which compares trees by
`CostModel.tokens_a_second`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.config import NO_REUSE, SLIDING, ModelConfig, ReuseConfig, TreeConfig, layer_numbers
from hsd_jax.drafters.table import method_of
from hsd_jax.infer.worth import FREE_DEPTH, first_trust
from hsd_jax.params import Params
from hsd_jax.planning.acceptance import expected_tokens
from hsd_jax.planning.rates import Rates, rates_here
from hsd_jax.types import Costs

OPERATIONS_PER_LAYER, OPERATIONS_PER_ROW = 8, 1.5
"""Small operations of a layer, and what each row adds to them, in such operations."""
TILE = 8
TILE_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.66, 0.93, 0.93, 1.0)
"""Of the time of a tile of 8 rows, what one of 0 to 8 rows takes: 6 rows do not fit the registers as well."""


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

    @classmethod
    def of(cls, params: Params) -> CostModel:
        """Of params that have a drafter, on this process's device."""
        assert params.drafter_config is not None
        weights = (x for x in jax.tree.leaves(params.drafter) if jnp.issubdtype(x.dtype, jnp.floating))
        drafter_size = next((x.dtype.itemsize for x in weights), 4)
        size = jax.tree.leaves(params.target["embedding"])[0].dtype.itemsize
        return cls(params.target_config, params.drafter_config, rates_here(params.mesh is None), size, drafter_size)

    def product(self, numbers: float, rows: float | np.ndarray, itemsize: int | None = None) -> np.ndarray:
        """Products of some rows with weights of so many numbers; the drafter's, if no `itemsize` is given."""
        rows = np.asarray(rows, float)
        size = self.drafter_itemsize if itemsize is None else itemsize
        num_bytes = numbers * size * np.where(rows > 1, self.rates.many_rows, 1.0)
        counted = tile_rows(rows) if self.rates.skips_rows else rows
        flops = 2 * numbers * counted / (self.rates.narrow if size == 2 else 1.0)
        return np.where(rows > 0, self.rates.seconds(num_bytes, flops), 0.0)

    def layers(self, config: Any) -> float:
        """The small operations of a pass through the layers of a model."""
        return OPERATIONS_PER_LAYER * config.num_layers * self.rates.operation_seconds

    def drafter_pass(self, config: Any, rows: float) -> float:
        """Of a language model that drafts."""
        return float(self.product(language_model(config), rows)) + self.layers(config)

    def target_pass(self, rows: float | np.ndarray) -> np.ndarray:
        """A pass over so many rows, without attention to the cache."""
        of_rows = self.target.num_layers * OPERATIONS_PER_ROW * np.asarray(rows, float) + 10
        small = self.layers(self.target) + of_rows * self.rates.operation_seconds
        return self.product(language_model(self.target), rows, self.itemsize) + small

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
        return method_of(self.drafter).planning.drafting_seconds(self, self.drafter, batch, tree)

    def tokens_a_second(self, batch: int, slots: float, tree: TreeConfig | None, profile: Sequence[float]) -> float:
        """Of rows of about so many filled slots, of the tree as many nodes verified as are best; None: plainly."""
        tokens = np.ones(1) if tree is None else expected_tokens(profile, tree)
        nodes = np.arange(1, len(tokens) + 1)
        verified = nodes if self.rates.skips_rows else np.full(len(nodes), 1 if tree is None else tree.nodes)
        attention = self.slot() * self.seen(slots) * batch * np.maximum(nodes, FREE_DEPTH + 1)
        drafting = 0.0 if tree is None else self.drafting(batch, tree)
        return float(np.max(batch * tokens / (self.target_pass(batch * verified) + attention + drafting)))

    def table(self, batch: int, tree: TreeConfig, ends_early: bool = False) -> Costs:
        """What the loop is told.

        Args:
          ends_early: chains may.
        """
        rows = np.arange(batch * tree.nodes + 1)
        verify = self.target_pass(rows if self.rates.skips_rows else np.full(len(rows), rows[-1]))
        plain = self.target_pass(np.arange(batch + 1))
        draft = np.array([self.drafting(num if self.rates.skips_rows else batch, tree) for num in range(batch + 1)])
        trust = first_trust(method_of(self.drafter).planning.has_score)
        window = self.target.sliding_window or 0, self.windowed_share
        numbers = verify, plain, draft, self.slot(), *window, trust, *([draft / tree.depth] if ends_early else [])
        return Costs(*(jax.device_put(np.asarray(x, np.float32)) for x in numbers))


def language_model(config: Any) -> int:
    """Weights that a pass of a language model reads."""
    return config.num_layers * layer_numbers(config) + config.vocab_size * config.hidden_size


def tile_rows(rows: np.ndarray) -> np.ndarray:
    """So many rows, as the whole tiles of a CPU kernel that would take as long."""
    rows = np.asarray(rows, float)
    tiles = np.maximum(np.ceil(rows / TILE), 1.0)
    return tiles * TILE * np.interp(rows / tiles, np.arange(TILE + 1), TILE_SHARES)


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """Seconds of a round by timings, linear in the nodes and the depth of its tree; of a trunk run, in its states."""

    coefficients: tuple[float, float, float]
    """Of 1, nodes, depth; without reuse, so with a trunk run of as many states as the tree is deep."""
    least: float
    """No round is predicted to be shorter: outside of what was measured a line may go anywhere."""
    trunk: tuple[int, float, float] | None = None
    """Most states K, the seconds of a run of one state, and of one of K."""

    @classmethod
    def fit(cls, measured: Mapping[TreeConfig, float]) -> RoundCost:
        """Least squares; exact for up to three trees that are not in a line."""
        rows = np.array([[1.0, tree.nodes, tree.depth] for tree in measured])
        seconds = np.array(list(measured.values()))
        a, b, c = np.linalg.lstsq(rows, seconds, rcond=None)[0]
        return cls((float(a), float(b), float(c)), float(seconds.min()) / 2)

    def seconds(self, tree: TreeConfig, reuse: ReuseConfig = NO_REUSE, rounds: int = 1, runs: int = 1) -> float:
        """Of so many rounds; with reuse the trunk runs in `runs` of them, over as many states as the form says."""
        a, b, c = self.coefficients
        fresh = rounds * max(a + b * tree.nodes + c * tree.depth, self.least)
        if reuse == NO_REUSE:
            return fresh
        assert self.trunk is not None, "the trunk was not timed"
        most, of_one, of_most = self.trunk
        states = reuse.num_states(tree.depth, most), tree.depth
        own, left_out = (float(np.interp(num, [1, most], [of_one, of_most])) for num in states)
        return max(fresh + runs * own - rounds * left_out, rounds * self.least)
