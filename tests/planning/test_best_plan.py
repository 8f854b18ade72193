"""Which speeds are predicted for the trees of a call, and what a plan makes of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import toy
from support.costs import cost_model

from hsd_jax.config import TreeConfig
from hsd_jax.drafters.both import BothConfig
from hsd_jax.planning import plan
from hsd_jax.planning.costs import CostModel
from hsd_jax.planning.rates import ROWS, Rates


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A cost model that predicts the gains of chains of 1, 2, 3 drafts over plain decoding."""

    gains: tuple[float, float, float]
    wide: float = 0.1
    """The gain of wide trees."""

    @property
    def drafter(self):
        return toy.drafter_config(toy.target_config(), num_steps=3, profile=(0.9,) * 3, sampled_profile=(0.9,) * 3)

    def are_free(self, rows, nodes):
        return rows == 1

    tokens = CostModel.tokens

    def predicted_speed(self, rows, filled, tree, profile, is_sampled):
        return 1.0 if tree is None else self.gains[tree.depth - 1] if tree.width == 1 else self.wide


@pytest.mark.parametrize(("narrow", "nodes"), [(2.2, 16), (100.0, 32)])
def test_a_tree_of_32_nodes_is_chosen_where_nodes_are_free_and_drafts_often_fail(narrow, nodes):
    """Sizes of Llama 3.2 1B. 32 nodes take 2.0 or 1.02 times as long as one."""
    target = toy.target_config(hidden_size=2048, num_layers=16, intermediate_size=8192, vocab_size=128256)
    drafter = toy.drafter_config(target, num_steps=7, rank=128, profile=(0.6,) * 7)
    rates = Rates(2.4e10, 1.8e11, 3e-6, skips_positions=True, narrow=narrow)
    tree = plan.best_plan(CostModel(target, drafter, rates, 2, 2), 1, 512, False).tree
    assert tree.nodes == nodes
    all_cost = dataclasses.replace(rates, skips_positions=False)
    assert plan.best_plan(CostModel(target, drafter, all_cost, 2, 2), 1, 512, False).tree.nodes <= 16


@pytest.mark.parametrize(
    "rows, gains, depth",
    [
        (1, (1.3, 1.5, 1.49), 3),  # equally good: that of more tokens
        (1, (1.3, 1.5, 1.47), 2),  # the fastest
        (2, (1.3, 1.5, 1.49), 2),  # the same, because more nodes cost more here
        (1, (1.055, 1.0, 1.0), 1),
        (1, (1.045, 1.0, 1.0), None),  # too little
        (4, (1.055, 1.0, 1.0), 1),
        (8, (1.09, 1.0, 1.0), None),  # too little for so many rows
        (8, (1.11, 1.0, 1.0), 1),
    ],
)
def test_the_good_tree_of_most_tokens_is_taken_if_it_gains_enough(rows, gains, depth):
    found = plan.best_plan(Predicted(gains), rows, 512, False)
    assert (None if found.tree is None else found.tree.depth) == depth
    assert found.is_adaptive == (found.tree is not None)


@pytest.mark.parametrize("wide", [1.48, 1.49])
def test_a_wide_tree_that_is_as_good_as_a_deep_one_is_taken(wide):
    """It promises more tokens where the drafter is wrong."""
    tree = plan.best_plan(Predicted((1.3, 1.5, 1.495), wide), 1, 512, False).tree
    assert (tree.depth, tree.width > 1) == (3, wide > 1.485)


def test_a_race_decides_where_the_model_promises_little(monkeypatch, tmp_path):
    monkeypatch.setenv("HSD_RACE", str(tmp_path))
    monkeypatch.setattr(plan.CostModel, "of", lambda params: Predicted((1.03, 1.0, 1.0)))
    about = None, 1, 512, 0.0
    found, race = plan.plan_for(*about, raced_as="rounds")
    assert found.tree is not None and race is not None
    assert plan.plan_for(*about, is_refilled=True, raced_as="rounds")[0].tree is None
    race.give_up()  # these calls are too short to be timed
    for raced_as in ("rounds", None):
        found, race = plan.plan_for(*about, raced_as=raced_as)
        assert found.tree is None and race is None


def test_each_block_of_rows_reads_the_weights_again():
    rates = Rates(1e11, 1e11, 1e-6, skips_positions=True, narrow=2.0, rows_at_once=8)
    rows = rates.rows(np.array([1, 8, 9, 16, ROWS]), 2.0)
    assert rows[4] == ROWS / rates.far and rows[3] == pytest.approx(2 * rows[1])
    assert rows[2] - rows[1] > 4 * (rows[1] - rows[0]) / 7 > 0
    seconds = dataclasses.replace(cost_model(), rates=rates).product(1e9, np.array([7, 8, 9]), 2)
    assert seconds[2] - seconds[1] > 4 * (seconds[1] - seconds[0])


def test_greedy_trees_end_in_copies_where_lookup_drafts_too():
    """Which cost nothing to draft; what they add is unknown."""
    target = toy.target_config()
    drafter = toy.drafter_config(target, num_steps=7, profile=(0.5,) * 7)
    both = BothConfig(drafter)

    def depths(config, is_sampled):
        return [tree.depth for tree in plan.trees_of(config, chains=(), is_sampled=is_sampled)]

    assert depths(both, False) == [5, 7, 7]
    assert depths(both, True) == depths(drafter, True) == depths(drafter, False) == [3, 4, 7]
    often_right = BothConfig(dataclasses.replace(drafter, profile=(0.9,) * 7))  # and grows all levels itself
    assert depths(often_right, False) == [3, 4, 7]
    model = CostModel(target, both, Rates(1e11, 1e11, 1e-6), 4, 4)
    speeds = [model.predicted_speed(1, 0, TreeConfig(8, depth, 2), both.profile, False) for depth in (3, 4, 7)]
    assert speeds[2] < 1.01 * speeds[0] and speeds[2] == pytest.approx(speeds[1], rel=0.01)


def test_sampled_siblings_promise_more():
    rates = Rates(1e11, 1e15, 1e-12, skips_positions=True)  # further nodes cost nothing
    model, tree = dataclasses.replace(cost_model(), rates=rates), TreeConfig(3, 1, 2)
    assert model.predicted_speed(1, 0, tree, (0.5,), True) > model.predicted_speed(1, 0, tree, (0.5,), False)


def test_a_plan_speculates_where_a_pass_waits_for_its_weights_and_decodes_plainly_where_it_computes():
    alone, crowd = (plan.best_plan(cost_model(), batch, 512, False) for batch in (1, 64))
    assert alone.tree is not None and crowd.tree is None and alone.is_adaptive
    assert "1 greedy row" in alone.reason and "plain" in str(crowd)
    cold, warm = (plan.best_plan(cost_model(), 1, 512, is_sampled).tree for is_sampled in (False, True))
    assert warm.depth < cold.depth
    assert plan.best_plan(cost_model(), 2, 512, False).tree.depth <= alone.tree.depth
    wide = plan.best_plan(CostModel(**{**vars(cost_model(False)), "rates": Rates(2e12, 3e14, 1e-8)}), 1, 512, False)
    assert wide.tree.width > 1 and wide.tree.nodes >= 8
