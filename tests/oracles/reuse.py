"""Spare states in plain loops: which old state forecasts a position, and how old and new logits add up."""

from __future__ import annotations

import numpy as np


def spare_depths(num_states: int, num_committed: int) -> list[int]:
    """For each depth 1, 2, ... behind the new root the depth of the old state that forecasts the same position.

    The old root stands at position 0, so old state k forecasts position k; depths without a state end the list.
    """
    forecasts = {position: position for position in range(1, num_states + 1)}
    new_root, found = num_committed, []
    depth = 1
    while new_root + depth in forecasts:
        found.append(forecasts[new_root + depth])
        depth += 1
    return found


def add(fresh: np.ndarray, old: np.ndarray, num_committed: int) -> np.ndarray:
    """Base logits [D, C] of a round: those of the states `fresh` [D, C] plus `old` [K, C] of the round before."""
    added = np.array(fresh, np.float64)
    for j, k in enumerate(spare_depths(len(old), num_committed), start=1):
        if j <= len(fresh):
            added[j - 1] += old[k - 1]
    return added
