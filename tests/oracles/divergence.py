"""Distances between two distributions of one node, in float64 NumPy, written from methods.md 7.2 (DistillSpec)."""

from __future__ import annotations

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """sum p log(p / q) over the tokens that p can say."""
    one, other = np.where(p > 0, p, 1.0), np.where(p > 0, q, 1.0)
    return (p * (np.log(one) - np.log(other))).sum(-1)


def jensen_shannon(p: np.ndarray, q: np.ndarray, beta: float) -> np.ndarray:
    mixed = beta * p + (1 - beta) * q
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


def total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.abs(p - q).sum(-1) / 2


def cross_entropy(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return -(p * np.log(q)).sum(-1)


def divergence(name: str, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """By the name it has in a recipe."""
    return {
        "fkl": lambda: kl(p, q),
        "kl": lambda: kl(p, q),
        "rkl": lambda: kl(q, p),
        "jsd": lambda: jensen_shannon(p, q, 0.5),
        "tvd": lambda: total_variation(p, q),
        "tv": lambda: total_variation(p, q),
        "ce": lambda: cross_entropy(p, q),
        "ce_tv": lambda: 0.1 * cross_entropy(p, q) + 0.9 * total_variation(p, q),
    }[name]()
