"""Which speeds are predicted for the trees of a call, and what a plan makes of them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from support import toy
from support.costs import cost_model

from hsd_jax.config import TreeConfig
from hsd_jax.planning import plan
from hsd_jax.planning.acceptance import expected_tokens, profile_of_slowest
from hsd_jax.planning.costs import CostModel
from hsd_jax.planning.rates import Rates


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
        return False

    def predicted_speed(self, rows, filled, tree, profile, is_sampled):
        return 1.0 if tree is None else self.gains[tree.depth - 1] if tree.width == 1 else self.wide


@pytest.mark.parametrize(("narrow", "nodes"), [(2.2, 8), (100.0, 32)])
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
        (1, (1.3, 1.5, 1.49), 3),  # equally good: the deepest
        (2, (1.3, 1.5, 1.47), 2),  # the fastest
        (4, (1.5, 1.5, 1.47), 2),
        (8, (1.3, 1.5, 1.49), 3),
        (1, (1.055, 1.0, 1.0), 1),
        (1, (1.045, 1.0, 1.0), None),
        (8, (1.055, 1.0, 1.0), 1),
        (8, (1.045, 1.0, 1.0), None),
    ],
)
def test_the_deepest_good_tree_is_taken_if_it_promises_enough(rows, gains, depth):
    found = plan.best_plan(Predicted(gains), rows, 512, False)
    assert (None if found.tree is None else found.tree.depth) == depth
    assert found.is_adaptive == (found.tree is not None)


def test_a_plan_speculates_where_a_pass_waits_for_its_weights_and_decodes_plainly_where_it_computes():
    alone, crowd = (plan.best_plan(cost_model(), batch, 512, False) for batch in (1, 64))
    assert alone.tree is not None and crowd.tree is None and alone.is_adaptive
    assert "1 greedy row" in alone.reason and "plain" in str(crowd)
    cold, warm = (plan.best_plan(cost_model(), 1, 512, is_sampled).tree for is_sampled in (False, True))
    assert warm.depth < cold.depth
    assert plan.best_plan(cost_model(), 2, 512, False).tree.depth <= alone.tree.depth
    wide = plan.best_plan(CostModel(**{**vars(cost_model(False)), "rates": Rates(2e12, 3e14, 1e-8)}), 1, 512, False)
    assert wide.tree.width > 1 and wide.tree.nodes >= 8


def test_sampled_rows_have_shallower_trees():
    """Their drafts are accepted less often; a deep tree of which most is left out would still have to be drafted."""
    shallower = 0
    for batch, context in itertools.product((1, 2, 4), (512, 4096)):
        greedy, sampled = (
            plan.best_plan(cost_model(), batch, context, is_sampled).tree for is_sampled in (False, True)
        )
        assert sampled is None or sampled.depth <= greedy.depth
        shallower += sampled is not None and sampled.depth < greedy.depth
    assert shallower > 1


def test_a_tree_is_wide_where_drafts_often_fail_and_a_chain_where_they_seldom_do():
    """Sizes of SmolLM2 and its drafter, which is right in half of its places, on kernels where rows are cheap."""
    target = toy.target_config(hidden_size=576, num_layers=30, intermediate_size=1536, vocab_size=49152)
    for first, is_wide in ((0.45, True), (0.9, False)):
        known = {"profile": (first, *[first + 0.05] * 6), "sampled_profile": (first,) * 7, "num_steps": 7, "rank": 128}
        drafter = toy.drafter_config(target, intermediate_size=1536, **known)
        tree = plan.best_plan(
            CostModel(target, drafter, Rates(4e10, 1.8e11, 3e-6, skips_positions=True, narrow=1.8), 2, 2), 1, 512, False
        ).tree
        assert (tree.width > 1) == is_wide, (first, tree)


def test_a_call_lasts_as_long_as_its_slowest_row():
    """Four rows, chains of 3 nodes, all verified; by hand. A round takes as long as it does for equal rows."""
    model, tree, profile = cost_model(skips_positions=False), TreeConfig.chain(2), (0.6, 0.6)
    seconds = model.target_pass(12) + 4 * model.attention(3, 100) + model.drafting(4, tree)
    first, second = profile_of_slowest(profile, 4)
    found = model.predicted_speed(4, 100, tree, profile, False)
    assert found == pytest.approx(4 * (1 + first + first * second) / float(seconds))
    assert found < 0.9 * 4 * (1 + 0.6 + 0.6 * 0.6) / float(seconds)


def test_sampled_positions_pay_for_their_noise():
    """Every position that a round may reach, whatever is verified; also those of plain decoding."""
    quiet, noisy = (cost_model(skips_positions=False, noise_seconds=seconds) for seconds in (0.0, 2e-9))
    for rows, tree, positions in ((1, None, 1), (3, None, 3), (3, TreeConfig.chain(2), 9), (2, TreeConfig(8, 3, 3), 8)):
        spent = [
            1 / model.predicted_speed(rows, 100, tree, (0.6, 0.6), is_sampled)
            for model, is_sampled in ((quiet, False), (quiet, True), (noisy, False), (noisy, True))
        ]
        assert spent[0] == spent[1] == spent[2]
        share = rows * (1 if tree is None else float(expected_tokens(profile_of_slowest((0.6, 0.6), rows), tree)[-1]))
        assert spent[3] - spent[0] == pytest.approx(positions * 4096 * 2e-9 / share)


def test_of_good_trees_that_are_equally_deep_the_smallest_is_chosen():
    for chain, wide, width in ((1.49, 1.5, 1), (1.5, 1.49, 1), (1.4, 1.5, 2)):
        found = plan.best_plan(Predicted((1.0, 1.0, chain), wide), 1, 512, False).tree
        assert (found.depth, found.width) == (3, width)
