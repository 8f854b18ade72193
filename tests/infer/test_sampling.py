"""Warping and noise: against sorting in float64, and the distribution of a draw against its own softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import sampling as oracle
from scipy import stats
from support import toy

from hsd_jax.infer.sampling import draw, position_noise, warp

VOCAB = 40
OFF = (None, None)

jitted_warp = jax.jit(warp)
jitted_draw = jax.jit(draw)


def assert_warps_as_the_oracle(logits: np.ndarray, rows: list) -> None:
    """`logits` [B, M, V]."""
    found = np.asarray(jitted_warp(jnp.asarray(logits, jnp.float32), toy.sampling_of(rows)))
    for row, setting in enumerate(rows):
        for node in range(logits.shape[1]):
            wanted = oracle.warp(logits[row, node], *setting)
            np.testing.assert_array_equal(np.isneginf(found[row, node]), np.isneginf(wanted), str(setting))
            kept = ~np.isneginf(wanted)
            np.testing.assert_allclose(found[row, node][kept], wanted[kept], rtol=1e-6)


ROWS = [
    (0.0, *OFF),
    (0.0, 3, 0.5),
    (1.0, *OFF),
    (0.7, 5, None),
    (1.3, None, 0.9),
    (0.8, 5, 0.9),
    (1.0, VOCAB + 9, 0.999),
    (2.0, None, 1e-6),
]


@pytest.mark.parametrize("seed", range(2))
def test_warp_is_that_of_sorting(seed):
    """All settings in one batch: none leaks into another row."""
    logits = np.random.default_rng(seed).normal(0, 3, (len(ROWS), 3, VOCAB)).astype(np.float32)
    assert_warps_as_the_oracle(logits, ROWS)


@pytest.mark.parametrize("rows", [[(0.0, *OFF)] * 2, [(1.0, *OFF)] * 2, [(0.0, 2, 0.5), (0.5, *OFF)]])
def test_warp_without_filters(rows):
    """The branch in which no row filters."""
    logits = np.random.default_rng(9).normal(0, 3, (2, 1, VOCAB)).astype(np.float32)
    assert_warps_as_the_oracle(logits, rows)


@pytest.mark.parametrize(
    ("logits", "setting", "kept"),
    [
        ([1.0, 2.0, 2.0, 0.0], (1.0, 1, None), [1, 2]),  # tied with the k-th
        ([3.0, 2.0, 2.0, 1.0], (1.0, 2, None), [0, 1, 2]),
        ([0.0, 0.0, 0.0, 0.0], (1.0, None, 0.5), [0, 1, 2, 3]),  # tied at the edge
        ([9.0, 0.0, 0.0, -9.0], (1.0, None, 0.9999), [0, 1, 2]),
        ([9.0, 0.0, -1.0, -9.0], (1.0, None, 1e-9), [0]),  # never empty
        ([1.0, 1.0, 0.0, -1.0], (1.0, 2, 0.4), [0, 1]),
        ([0.0, -1.0, -2.0, -30.0], (1.0, None, 1.0), [0, 1, 2, 3]),  # p = 1 removes nothing
        ([-3.0, -1.0, -2.0, -0.0], (1.0, 3, None), [1, 2, 3]),
        (np.log([0.2501, 0.2499, 0.249, 0.251]), (1.0, 2, 0.45), [3]),  # top-p counts what top-k left
    ],
)
def test_edges_and_ties(logits, setting, kept):
    found = np.asarray(jitted_warp(jnp.asarray([[logits]], jnp.float32), toy.sampling_of([setting])))[0, 0]
    assert np.flatnonzero(~np.isneginf(found)).tolist() == kept
    assert_warps_as_the_oracle(np.array([[logits]]), [setting])


def test_temperature_zero_takes_the_first_largest_logit():
    logits = jnp.asarray([[[0.0, 5.0, 5.0, 1.0], [2.0, 1.0, 0.0, 2.0]]], jnp.float32)
    keys = jax.vmap(jax.random.key)(jnp.arange(1, dtype=jnp.uint32))
    positions = jnp.asarray([[3, 4]], jnp.int32)
    for setting in [(0.0, None, None), (0.0, 1, 0.1)]:
        assert jitted_draw(keys, logits, positions, toy.sampling_of([setting])).tolist() == [[1, 0]]


def test_noise_is_a_function_of_key_and_position():
    """Not of the row, not of the node, not of the width of the pass."""
    keys = jax.vmap(jax.random.key)(jnp.array([5, 6, 5], jnp.uint32))
    positions = jnp.array([[7, 8, 8, 9], [7, 8, 8, 9], [9, 7, 2, 8]], jnp.int32)
    noise = np.asarray(position_noise(keys, positions, VOCAB))
    np.testing.assert_array_equal(noise[0, 1], noise[0, 2])
    np.testing.assert_array_equal(noise[0, [0, 1, 3]], noise[2, [1, 3, 0]])
    distinct = [noise[0, 0], noise[0, 1], noise[0, 3], noise[1, 0], noise[1, 1], noise[2, 2]]
    for i, one in enumerate(distinct):
        for other in distinct[:i]:
            assert (one != other).all()
    alone = position_noise(keys[1:2], positions[1:2, 3:], VOCAB)
    np.testing.assert_array_equal(alone[0, 0], noise[1, 3])
    np.testing.assert_array_equal(position_noise(keys, positions, VOCAB), noise)  # the keys were not consumed


FALSE_ALARM = 1e-6
NUM_DRAWS = 40_000


def chi_square_p_value(draws: np.ndarray, distribution: np.ndarray) -> float:
    """Of the counts of `draws` under `scheme`; tokens without mass must not occur at all."""
    counts = np.bincount(draws, minlength=len(distribution))
    if counts[distribution == 0].any():
        return 0.0
    expected = distribution[distribution > 0] * len(draws)
    if len(expected) == 1:
        return 1.0
    return float(stats.chisquare(counts[distribution > 0], expected).pvalue)


def draw_many(logits: np.ndarray, setting, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One draw for each (seed, position) from the same logits."""
    sampling = toy.sampling_of([setting])
    sampling = jax.tree.map(lambda x: jnp.broadcast_to(x, len(seeds)), sampling)
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    positions = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), (len(seeds), len(positions)))
    spread = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (*positions.shape, len(logits)))
    return np.asarray(jitted_draw(keys, spread, positions, sampling)).ravel()


SCHEMES = [(1.0, *OFF), (0.5, *OFF), (1.5, 4, None), (1.0, None, 0.8), (0.8, 5, 0.9)]


@pytest.mark.parametrize("setting", SCHEMES, ids=str)
def test_draws_follow_the_warped_distribution(setting):
    """Over seeds and over positions of one seed; each of the ten tests fires falsely once in 10^6."""
    logits = np.array([0.3, -1.0, 1.2, 0.9, -0.4, 0.0, 0.6, -2.0])
    distribution = oracle.distribution(logits, *setting)
    over_seeds = draw_many(logits, setting, np.arange(NUM_DRAWS // 4), np.arange(4) + 10)
    over_positions = draw_many(logits, setting, np.array([1, 2]), np.arange(NUM_DRAWS // 2))
    assert chi_square_p_value(over_seeds, distribution) > FALSE_ALARM
    assert chi_square_p_value(over_positions, distribution) > FALSE_ALARM


def test_neighbouring_positions_and_seeds_are_independent():
    """Pairs of draws follow the product of the distributions; false alarm 10^-6 each."""
    logits = np.array([0.3, -1.0, 1.2])
    distribution = oracle.distribution(logits, 1.0, None, None)
    draws = draw_many(logits, (1.0, *OFF), np.arange(10_000), np.arange(2)).reshape(-1, 2)
    product = np.outer(distribution, distribution).ravel()
    assert chi_square_p_value(draws[:, 0] * 3 + draws[:, 1], product) > FALSE_ALARM
    assert chi_square_p_value(draws[:-1:2, 0] * 3 + draws[1::2, 0], product) > FALSE_ALARM


def test_the_chi_square_finds_a_wrong_distribution():
    """Draws under slightly other settings are refused, so the test above has power."""
    logits = np.array([0.3, -1.0, 1.2, 0.9, -0.4, 0.0, 0.6, -2.0])
    draws = draw_many(logits, (1.05, *OFF), np.arange(NUM_DRAWS // 4), np.arange(4) + 10)
    assert chi_square_p_value(draws, oracle.distribution(logits, 1.0, None, None)) < FALSE_ALARM
