"""What a plan makes of predicted speeds. (What is predicted: tests/infer/test_worth.py.)"""

from __future__ import annotations

import dataclasses

import pytest
from support import toy

from hsd_jax.planning import plan


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A cost model that predicts the gains of chains of 1, 2, 3 drafts over plain decoding."""

    gains: tuple[float, float, float]

    @property
    def drafter(self):
        return toy.drafter_config(toy.target_config(), num_steps=3, profile=(0.9,) * 3, sampled_profile=(0.9,) * 3)

    def predicted_speed(self, rows, slots, tree, profile):
        return 1.0 if tree is None else self.gains[tree.depth - 1] if tree.width == 1 else 0.1


@pytest.mark.parametrize(
    "rows, gains, depth",
    [
        (1, (1.3, 1.5, 1.49), 3),  # equally good: the deepest
        (2, (1.3, 1.5, 1.49), 2),  # the fastest
        (4, (1.5, 1.5, 1.49), 2),  # the deepest of two that are equally fast
        (1, (1.035, 1.0, 1.0), 1),
        (1, (1.025, 1.0, 1.0), None),
        (2, (1.035, 1.0, 1.0), None),
        (2, (1.065, 1.0, 1.0), 1),
        (8, (1.11, 1.0, 1.0), None),
        (8, (1.13, 1.0, 1.0), 1),
    ],
)
def test_one_row_takes_the_deepest_good_tree_and_several_the_fastest_if_it_promises_enough(rows, gains, depth):
    found = plan.best_plan(Predicted(gains), rows, 512, False)
    assert (None if found.tree is None else found.tree.depth) == depth
    assert found.is_adaptive == (found.tree is not None)
