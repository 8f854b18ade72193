"""Drafts coupled to the target's noise, from methods.md 0.5b, in plain loops and in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from oracles.sampling import warp
from oracles.tree import grow_paths, log_softmax

Setting = tuple[float, int | None, float | None]
"""Temperature, top-k and top-p of a row."""


def scores(
    logits: np.ndarray, noise: np.ndarray, setting: Setting, draft_to_target: Sequence[int] | None, vocab: int
) -> np.ndarray:
    """log q + g over the whole vocabulary; at temperature 0 the logits. q is 0 off the hot and the kept tokens."""
    hot = list(range(vocab)) if draft_to_target is None else list(draft_to_target)
    found = np.full(vocab, -np.inf)
    found[hot] = logits if setting[0] == 0.0 else log_softmax(warp(logits, *setting)) + noise[hot]
    return found


def sharpness(temperature: float) -> float:
    """What log q + g is multiplied by before a beam takes its log-softmax."""
    return 3.0 if temperature == 0.0 else 2.0 * min(temperature, 1.0)


def grow(
    logits: Callable[[tuple[int, ...]], np.ndarray],
    root: int,
    nodes: int,
    depth: int,
    width: int,
    noise: np.ndarray,
    setting: Setting,
    draft_to_target: Sequence[int] | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """The coupled beam of one row: tokens, parents, depths.

    Args:
      logits: the drafter's, behind a path of tokens that starts with the root.
      noise: [depth, V], of the positions behind the root.
    """

    def perturbed(path: tuple[int, ...]) -> np.ndarray:
        own = noise[len(path) - 1]
        return sharpness(setting[0]) * scores(logits(path), own, setting, draft_to_target, len(own))

    return grow_paths(perturbed, root, nodes, depth, width)
