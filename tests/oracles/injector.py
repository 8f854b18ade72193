"""Token information in plain loops: what a path of tokens adds to the logits behind its last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def shortlisted(bias: np.ndarray, base: np.ndarray, count: int) -> np.ndarray:
    """What is added of a bias where only the `count` largest of the base logits are corrected; 0: all are."""
    return np.where(base >= np.sort(base)[-count], bias, 0.0) if count else bias


def bias(
    injector: Mapping[str, np.ndarray], path: Sequence[int], eps: float, state: np.ndarray | None = None
) -> np.ndarray:
    """W2 . r of the last token, r = RMSNorm(W1[token] + R r of the token before), from the root on.

    An injector without R knows the last token alone; one with a gate multiplies r by 1 + H h of the normed state.
    """
    weights = {name: np.asarray(value, np.float64) for name, value in injector.items()}
    rank = len(weights["norm"])
    read = np.zeros(rank)
    for token in path:
        row = weights["previous"][token] + weights.get("path", np.zeros((rank, rank))) @ read
        read = row / np.sqrt((row * row).mean() + eps) * weights["norm"]
    if "gate" in weights:
        assert state is not None
        read = read * (1 + weights["gate"] @ state)
    return weights["bias"] @ read
