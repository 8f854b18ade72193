"""The gap to the optimum: on a tiny pair, whose nodes are few and known."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import optimal as oracle
from support.tiny_pairs import TINY, tiny_pair

from hsd_jax.config import TreeConfig
from hsd_jax.lab import theory
from hsd_jax.lab.bench import gap, tables
from hsd_jax.params import Params
from hsd_jax.planning.measure import Mode
from hsd_jax.request import Speculation
from hsd_jax.types import DrawScheme


@pytest.fixture(scope="module")
def params() -> Params:
    config, _, drafter_config, models = tiny_pair()
    return Params(models["target"], models["drafter"], config, drafter_config, max_len=256, precision="exact")


@pytest.mark.parametrize(
    ("accept", "scheme", "tree"),
    [
        ("optimal", DrawScheme.TOP_THEN_RANDOM, TreeConfig(branching=(3, 2))),
        pytest.param("recursive", DrawScheme.WITHOUT_REPLACEMENT, TreeConfig(branching=(3, 2)), marks=pytest.mark.slow),
        pytest.param("kseq", DrawScheme.INDEPENDENT, TreeConfig(branching=(3, 2)), marks=pytest.mark.slow),
    ],
)
def test_a_rule_accepts_no_more_than_the_optimum_and_the_optimal_one_as_much(params, accept, scheme, tree):
    """On the nodes that were looked at; false alarm once in 10^6 (five standard deviations of the draws)."""
    mode = Mode("m", params, Speculation(tree, accept))
    found = gap.gap_by_depth(mode, [[1], [2], [3], [0]], 0, 200, 1.0)
    assert [one["depth"] for one in found] == [1, 2]
    for one, children in zip(found, tree.branching, strict=True):
        assert one["mean_children"] == children and one["num_nodes"] > 40
        error = 5 * (0.25 / one["num_nodes"]) ** 0.5
        assert one["expected"] < one["optimum"] + error
        assert one["greedy_plus_one"] <= 1 + 1e-6
        if scheme is DrawScheme.TOP_THEN_RANDOM:
            assert one["optimum"] == pytest.approx(one["greedy_plus_one"])
            assert one["expected"] > one["optimum"] - error
    lines = tables.gap_lines(found, "by depth")
    assert len(lines) == 5 and f"{found[1]['optimum']:.2f}" in lines[2]


def test_means_are_those_of_the_nodes():
    """Nodes of several numbers of children, more than are computed at once."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(TINY), (2, gap.ROWS + 5)).astype(np.float32)
    nodes = [(1 + i % 3, 0.01 * i, p[i], q[i]) for i in range(len(p))]
    found = gap._record(0, nodes, DrawScheme.INDEPENDENT)
    wanted = [
        float(oracle.best_subset(list(map(float, one)), oracle.node_draws(list(map(float, two)), n, "independent")))
        for n, _, one, two in nodes
    ]
    assert found["optimum"] == pytest.approx(np.mean(wanted), abs=1e-5)
    assert found["expected"] == np.mean([expected for _, expected, *_ in nodes])


def test_only_drawn_trees_of_sampled_text_have_a_gap(params):
    def mode(*how: str) -> Mode:
        return Mode("m", params, Speculation(TreeConfig(4, 3, 1), *how))

    assert gap.has_gap(mode("recursive"), 0.5) and not gap.has_gap(mode("recursive"), 0.0)
    assert not gap.has_gap(mode("match"), 0.5)
    assert gap.has_gap(mode("match", "independent"), 0.5)
    assert not gap.has_gap(Mode("plain", params), 1.0) and DrawScheme.COUPLED not in theory.BOUNDED
