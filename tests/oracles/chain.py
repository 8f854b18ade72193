"""Standard speculative sampling of a chain, for two Markov tables, in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def accepted_distribution(target: Sequence[float], draft: Sequence[float], depth: int) -> np.ndarray:
    """P(0), ..., P(depth) accepted tokens where every node has these two distributions, up to the order of the tokens.

    A draft survives with probability alpha = sum of min(p, q), independent of those before it, so the count is a
    geometric distribution cut off at `depth`, and tau = (1 - alpha^(depth + 1)) / (1 - alpha) (Leviathan et al.,
    equation 1).
    """
    alpha = float(np.minimum(target, draft).sum())
    distribution = [alpha**k * (1 - alpha) for k in range(depth)] + [alpha**depth]
    assert np.isclose(sum((k + 1) * p for k, p in enumerate(distribution)), (1 - alpha ** (depth + 1)) / (1 - alpha))
    return np.array(distribution)
