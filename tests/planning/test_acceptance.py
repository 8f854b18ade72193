"""The tokens of a tree by its profile, and of the slowest of several rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hsd_jax.config import TreeConfig
from hsd_jax.planning import acceptance
from hsd_jax.planning.acceptance import mixed


def test_expected_tokens_of_a_tree():
    """Half of the likeliest children are right, 1 - 0.5^1.5 of two; below the second one both shares shrink."""
    second = 0.5 - 0.5**1.5
    found = acceptance.expected_tokens((0.5, 0.5), TreeConfig(7, 2, 2))
    np.testing.assert_allclose(np.diff(found), [0.5, 0.25, second, second / 2, second / 2, second**2])
    assert acceptance.expected_tokens((0.5,), TreeConfig(2, 1, 1)).tolist() == [1.0, 1.5]
    sampled = acceptance.expected_tokens((0.5,), TreeConfig(3, 1, 2), is_sampled=True)
    np.testing.assert_allclose(sampled, [1.0, 1.5, 2 - 0.5**1.6])  # a second sibling adds more where tokens are drawn


def test_tokens_of_a_random_number_of_drafts():
    laws = {2: {1: 0.4, 3: 0.6}, 3: {1: 0.5, 4: 0.5}}
    assert mixed({2: 0.5, 3: 0.5}, laws.__getitem__) == pytest.approx({1: 0.45, 3: 0.3, 4: 0.25})


def test_the_slowest_row_is_that_of_a_simulation():
    """Texts differ in the log-odds of acceptance; the mean of the least log-odds of several texts."""
    rng = np.random.default_rng(0)
    for rows in (2, 4, 8):
        least = rng.normal(size=(100_000, rows)).min(1).mean() * acceptance.SPREAD_OF_TEXTS
        (found,) = acceptance.profile_of_slowest((0.5,), rows)
        assert math.log(found / (1 - found)) == pytest.approx(least, rel=0.06)
