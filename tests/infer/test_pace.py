"""How many rounds a call of a stream runs."""

from __future__ import annotations

import pytest

from hsd_jax.infer.loop import Pace


@pytest.mark.parametrize(("seconds_of_a_round", "rounds"), [(0.001, 90), (0.010, 9), (0.013, 6), (0.089, 1), (0.2, 1)])
def test_a_piece_comes_within_a_tenth_of_a_second(seconds_of_a_round, rounds):
    """The first call has one round, and what it learned is what the next ones follow."""
    pace = Pace()
    assert pace.num_rounds == 1
    for _ in range(3):
        pace.learn(pace.num_rounds * seconds_of_a_round * 0.999)
        assert pace.num_rounds == rounds


def test_the_slower_of_two_calls_counts():
    """Plain rounds and rounds with drafts take turns: a call must not last longer because the one before was short."""
    pace = Pace()
    for seconds, rounds in ((1.0, 1), (0.01, 9), (0.09, 9), (0.045, 9), (0.036, 18), (0.36, 4)):
        pace.learn(seconds)
        assert pace.num_rounds == rounds, seconds
