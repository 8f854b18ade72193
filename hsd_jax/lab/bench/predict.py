"""What a way to decode should give: tokens from a simulated decode, seconds from a few rounds that were measured.

Read first: `train/evaluate.py`, which simulates. Read next: `tune.py`, which measures the best of what is predicted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from hsd_jax.config import NO_REUSE, TreeConfig
from hsd_jax.train.evaluate import AcceptedLengths, Draft

LEAST_GAIN_OF_REUSE = 1.01
"""A form of reuse is a candidate where it is predicted to be so many times as fast as none in the same tree."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a candidate should give."""

    tau: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """Seconds of a round, linear in the nodes and the depth of its tree; of a trunk run, linear in its states."""

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

    def seconds(self, tree: TreeConfig) -> float:
        """Of a round without reuse."""
        a, b, c = self.coefficients
        return max(a + b * tree.nodes + c * tree.depth, self.least)

    def trunk_seconds(self, num_states: int) -> float:
        assert self.trunk is not None, "the trunk was not timed"
        most, of_one, of_most = self.trunk
        return float(np.interp(num_states, [1, most], [of_one, of_most]))

    def rate(self, draft: Draft, fate: AcceptedLengths, batch: int) -> float:
        """Tokens per second of a decode with this fate, `batch` rows at once."""
        tree, reuse = draft
        num_rounds, num_runs = in_step(fate, batch)
        seconds = num_rounds * self.seconds(tree)
        if reuse != NO_REUSE:
            assert self.trunk is not None, "the trunk was not timed"
            own_run = self.trunk_seconds(reuse.num_states(tree.depth, self.trunk[0]))
            seconds += num_runs * own_run - num_rounds * self.trunk_seconds(tree.depth)
        return fate.tau * fate.num_passes / max(seconds, num_rounds * self.least)


def in_step(fate: AcceptedLengths, batch: int) -> tuple[int, int]:
    """Rounds, and those of them in which the trunk runs, if `batch` texts are decoded at once.

    A batch goes on until its last row ends, and its trunk runs if any row asks for it.
    """
    rows = fate.trunk_runs
    batches = (rows[first : first + batch] for first in range(0, len(rows), batch))
    rounds = [any(runs) for some in batches for runs in itertools.zip_longest(*some, fillvalue=False)]
    return len(rounds), sum(rounds)


def sample_of(trees: Sequence[TreeConfig]) -> list[TreeConfig]:
    """Up to three trees that tell what nodes and what depth cost: the smallest, the deepest chain, the largest."""
    smallest = min(trees, key=lambda tree: (tree.nodes, tree.depth))
    deepest = min(trees, key=lambda tree: (-tree.depth, tree.nodes))
    largest = max(trees, key=lambda tree: (tree.nodes, tree.depth))
    return list(dict.fromkeys((smallest, deepest, largest)))


def best_of(predictions: Mapping[Draft, Prediction], count: int) -> list[Draft]:
    """The `count` fastest by prediction; reuse counts only where it gains something over none in the same tree."""

    def is_worth_it(draft: Draft) -> bool:
        without = predictions.get((draft[0], NO_REUSE))
        if draft[1] == NO_REUSE or without is None:
            return True
        return predictions[draft].tokens_per_second > LEAST_GAIN_OF_REUSE * without.tokens_per_second

    ranked = sorted(predictions, key=lambda draft: -predictions[draft].tokens_per_second)
    return [draft for draft in ranked if is_worth_it(draft)][:count]
