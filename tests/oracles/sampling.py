"""Temperature, top-k and top-p by sorting, in float64."""

from __future__ import annotations

import numpy as np


def warp(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    """Warped logits of one row, -inf where a filter removed the token.

    Top-k keeps what is tied with the k-th. Top-p then keeps the most likely tokens up to the one at which their mass
    reaches p, and what is tied with it.
    """
    logits = np.asarray(logits, np.float64)
    if temperature == 0.0:
        return logits
    scaled = logits / temperature
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    keep = np.ones(len(scaled), bool)
    if top_k is not None and top_k < len(scaled):
        keep &= scaled >= scaled[order[top_k - 1]]
    if top_p is not None and top_p < 1.0:
        weight = np.where(keep, np.exp(scaled - scaled.max()), 0.0)
        weight /= weight.sum()
        mass = 0.0
        for token in order:
            mass += weight[token]
            if mass >= top_p:
                break
        keep &= scaled >= scaled[token]
    return np.where(keep, scaled, -np.inf)


def distribution(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    """Probabilities of the draw; a point mass at the first largest logit for temperature 0."""
    warped = warp(logits, temperature, top_k, top_p)
    if temperature == 0.0:
        point = np.zeros(len(warped))
        point[int(np.argmax(warped))] = 1.0
        return point
    weight = np.exp(warped - warped.max())
    return weight / weight.sum()
