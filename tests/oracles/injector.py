"""Token information in plain loops: what a path of tokens adds to the logits behind its last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def bias(injector: Mapping[str, np.ndarray], path: Sequence[int], eps: float) -> np.ndarray:
    """W2 . r of the last token, r = RMSNorm(W1[token] + R r of the token before), from the root on.

    An injector without R knows the last token alone.
    """
    weights = {name: np.asarray(value, np.float64) for name, value in injector.items()}
    rank = len(weights["norm"])
    read = np.zeros(rank)
    for token in path:
        row = weights["previous"][token] + weights.get("path", np.zeros((rank, rank))) @ read
        read = row / np.sqrt((row * row).mean() + eps) * weights["norm"]
    return weights["bias"] @ read
