"""What a round costs: the seconds of its passes and of drafting.

`CostModel` computes them from the sizes of the models and the rates of a processor; the seconds of drafting are in each
drafter's folder (`Planning.drafting_seconds`). `types.Costs` is its table for the decode loop, which adds up a round's
seconds in `infer/adapt.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsd_jax.config import SLIDING, ModelConfig, TreeConfig, weights_of_layer
from hsd_jax.drafters.table import method_of
from hsd_jax.infer.adapt import first_trust, slots_read
from hsd_jax.kernels.int8 import GroupedInt8, Int8, Quantized
from hsd_jax.pair import Params
from hsd_jax.planning.acceptance import expected_tokens
from hsd_jax.planning.rates import Rates, rates_here
from hsd_jax.types import Costs

FREE = 1.3
"""Nodes are free if a pass over all takes at most this many times as long as a pass over one."""


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds of the passes of a pair of models. An item size is the bytes of a weight in memory."""

    target: ModelConfig
    drafter: Any
    rates: Rates
    itemsize: int
    drafter_itemsize: int

    @classmethod
    def of(cls, params: Params) -> CostModel:
        """The costs of `params`, which have a drafter, on this process's device."""
        assert params.drafter_config is not None
        held = jax.tree.leaves(params.drafter, is_leaf=lambda x: isinstance(x, Quantized))
        floats = [x for x in held if jnp.issubdtype(x.dtype, jnp.floating)]  # or what stands for them in 8 bits
        drafter_size = min((1 if isinstance(x, GroupedInt8) else x.dtype.itemsize for x in floats), default=4)
        size = jax.tree.leaves(params.target["embedding"])[0].dtype.itemsize
        rates = rates_here(params.mesh is None)
        if isinstance(params.target["embedding"], Int8):  # its products are in float
            rates = dataclasses.replace(rates, integer=1.0)
        return cls(params.target_config, params.drafter_config, rates, size, drafter_size)

    def product(
        self, numbers: float, positions: float | np.ndarray, itemsize: int | None = None, cached_bytes: float = 0.0
    ) -> np.ndarray:
        """Seconds to multiply the states of `positions` positions with `numbers` weights.

        Args:
          itemsize: bytes of a weight; None: `drafter_itemsize`.
          cached_bytes: bytes of the weights that need not be read from memory.
        """
        positions = np.asarray(positions, float)
        size = self.drafter_itemsize if itemsize is None else itemsize
        num_bytes = max(numbers * size - cached_bytes, 0.0) * np.where(positions > 1, self.rates.many_positions, 1.0)
        faster = {1: self.rates.integer, 2: self.rates.narrow}.get(size, 1.0)
        flops = 2 * numbers * self.rates.rows(positions, faster) / faster
        return np.where(positions > 0, self.rates.seconds(num_bytes, flops), 0.0)

    def layers(self, config: Any) -> float:
        """Seconds of the small operations of one pass through the layers of a model."""
        return self.rates.layer_operations * config.num_layers * self.rates.operation_seconds

    def drafter_pass(self, config: Any, positions: float) -> float:
        """Seconds of a pass of a language model that drafts."""
        return float(self.product(weights_of_language_model(config), positions)) + self.layers(config)

    def target_pass(self, positions: float | np.ndarray) -> np.ndarray:
        """Seconds of a pass of the target over `positions` positions, without attention to the cache."""
        positions, rates = np.asarray(positions, float), self.rates
        of_layer = rates.position_operations * positions + rates.several_operations * (positions > 1)
        small = self.layers(self.target) + (self.target.num_layers * of_layer + 10) * rates.operation_seconds
        return (
            self.product(weights_of_language_model(self.target), positions, self.itemsize, rates.cached_bytes) + small
        )

    def are_free(self, rows: int, nodes: int) -> bool:
        """Whether a pass over this many nodes of each row takes little longer than over one (FREE).

        False where nodes that are not verified cost as much as others.
        """
        one, all_nodes = self.target_pass(rows * np.array([1, nodes]))
        return self.rates.skips_positions and bool(all_nodes <= FREE * one)

    @property
    def windows(self) -> tuple[float, int]:
        """`Costs.windowed_share` and `Costs.window`."""
        c = self.target
        num = sum(c.layer_type(layer) == SLIDING for layer in range(c.num_layers))
        return (0.0, 0) if c.sliding_window is None else (num / c.num_layers, c.sliding_window)

    def slot(self) -> float:
        """Seconds of one node's attention to one slot of the cache, all layers together."""
        c = self.target
        flops = 4 * c.num_heads * c.head_dim * c.num_layers
        return flops / (self.rates.attention_share * self.rates.flops_per_second)

    def attention(self, num_nodes: int | np.ndarray, filled: float) -> np.ndarray:
        """Seconds of the attention of a row's nodes to the filled slots of its cache."""
        return np.asarray(self.slot() * slots_read(num_nodes, filled, *self.windows))

    def drafting(self, rows: int, tree: TreeConfig) -> float:
        """Seconds to draft a tree for each of `rows` rows."""
        return method_of(self.drafter).planning.drafting_seconds(self, self.drafter, rows, tree)

    def noise(self, rows: int, tree: TreeConfig | None) -> float:
        """Seconds of the noise of a round. All levels of a tree have noise, whatever is verified."""
        positions = rows * (1 if tree is None else tree.depth + 1)
        return positions * self.target.vocab_size * self.rates.noise_seconds

    def tokens(self, tree: TreeConfig | None, profile: Sequence[float], is_sampled: bool) -> np.ndarray:
        """Expected tokens of a round that verifies 1, 2, ... nodes of a tree; None: of a plain one."""
        if tree is None:
            return np.ones(1)
        return expected_tokens(profile, method_of(self.drafter).planning.grown(self.drafter, tree), is_sampled)

    def predicted_speed(
        self, rows: int, filled: float, tree: TreeConfig | None, profile: Sequence[float], is_sampled: bool
    ) -> float:
        """Predicted tokens per second of a call, if the best number of nodes is verified.

        Args:
          filled: filled slots of the cache of each row.
          tree: the largest tree; None: plain decoding.
          profile: acceptance probabilities by depth.
        """
        tokens = self.tokens(tree, profile, is_sampled)
        nodes = np.arange(1, len(tokens) + 1)
        computed = nodes if self.rates.skips_positions else np.full(len(nodes), 1 if tree is None else tree.nodes)
        seconds = self.target_pass(rows * computed) + rows * self.attention(nodes, filled)
        drafting = 0.0 if tree is None else self.drafting(rows, tree)
        noise = self.noise(rows, tree) if is_sampled else 0.0
        return float(np.max(rows * tokens / (seconds + drafting + noise)))

    def table(
        self, rows: int, tree: TreeConfig, drafts: np.ndarray, ends_early: bool = False, is_sampled: bool = False
    ) -> Costs:
        """The costs by which the decode loop decides which drafts to verify; `drafts` is a field of them."""

        def computed(most: int) -> np.ndarray:
            """For each number of wanted positions or rows from 0 to `most`: how many are computed."""
            return np.arange(most + 1) if self.rates.skips_positions else np.full(most + 1, most)

        verify, plain = self.target_pass(computed(rows * tree.nodes)), self.target_pass(computed(rows))
        draft = np.array([self.drafting(int(num), tree) for num in computed(rows)])
        level = draft / tree.depth
        if is_sampled:
            plain += [self.noise(int(num), None) for num in computed(rows)]
            draft += [self.noise(int(num), tree) for num in computed(rows)]
        trust = first_trust(method_of(self.drafter).planning.has_score)
        put = lambda x: jax.device_put(np.asarray(x, np.float32))  # noqa: E731
        numbers = map(put, (verify, plain, draft, self.slot(), *self.windows, trust, 1.0))
        return Costs(*numbers, drafts=jax.device_put(drafts), level_seconds=put(level) if ends_early else None)


def weights_of_language_model(config: Any) -> int:
    """The number of weights that a pass of a language model reads."""
    return config.num_layers * weights_of_layer(config) + config.vocab_size * config.hidden_size
