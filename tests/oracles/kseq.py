"""K-SEQ and block verification in plain loops and rational arithmetic.

Written from SpecTr (arXiv:2310.15141, algorithm 3) and Sun et al. (arXiv:2403.10444, algorithm 2); methods.md 6.4, 6.7.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from oracles.recursive import Distribution


def common_part(target: Distribution, draft: Distribution, rho) -> list:
    return [min(q, p / rho) for p, q in zip(target, draft, strict=True)]


def is_admissible(target: Distribution, draft: Distribution, count: int, rho) -> bool:
    """Whether what is accepted stays below the target everywhere: 1 - (1 - beta)^k <= rho beta."""
    beta = sum(common_part(target, draft, rho))
    return 1 - (1 - beta) ** count <= rho * beta


def least_rho(target: Distribution, draft: Distribution, count: int, halvings: int = 20):
    """From above, by halving: admissible, and above the least by at most (k - 1) / 2^halvings."""
    one = target[0] * 0 + 1
    low, high = one, one * count
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (low, middle) if is_admissible(target, draft, count, middle) else (middle, high)
    return high


def kseq_node(target: Distribution, draft: Distribution, children: Sequence[int], rho) -> tuple[list, list]:
    """The odds of each child, and the distribution once all are refused."""
    odds = [min(1, target[x] / (rho * draft[x])) if draft[x] > 0 else 0 for x in children]
    common = common_part(target, draft, rho)
    refused = 1 - sum(common)
    total = sum(refused**i for i in range(len(children)))
    residual = [p - total * m for p, m in zip(target, common, strict=True)]
    assert min(residual) >= 0, "rho is too small"
    mass = sum(residual)
    return odds, [r / mass for r in residual] if mass > 0 else list(target)


def positive_part(one: Distribution, other: Distribution) -> list:
    return [max(a - b, 0 * a) for a, b in zip(one, other, strict=True)]


def block_chain(
    target: Sequence[Distribution], draft: Sequence[Distribution], drawn: Sequence[int]
) -> tuple[list, list[list]]:
    """The chance of each draft to end the chain, and the distributions of the next token behind every node.

    Args:
      target, draft: behind the root, behind the first draft, ...; `target` has one more.
    """
    weights = [target[0][0] * 0 + 1]
    for p, q, x in zip(target, draft, drawn, strict=False):
        weights.append(min(weights[-1] * p[x] / q[x], 1))
    chances, residuals = [], []
    for i, weight in enumerate(weights):
        if i == len(drawn):
            chances.append(weight)
            residuals.append(list(target[i]))
            continue
        rest = positive_part([weight * p for p in target[i]], draft[i])
        mass = sum(rest)
        chances.append(mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 0 * mass)
        residuals.append([r / mass for r in rest] if mass > 0 else list(target[i]))
    return chances[1:], residuals


def deepest_wins(drawn: Sequence[int], chances: Sequence, residuals: Sequence[Distribution]) -> dict:
    """Distribution of what is emitted if the deepest draft whose coin falls ends the chain."""
    emitted: dict = defaultdict(int)
    for num in range(len(drawn) + 1):
        mass = chances[num - 1] if num else 1
        for later in chances[num:]:
            mass = mass * (1 - later)
        for token, p in enumerate(residuals[num]):
            if mass * p > 0:
                emitted[(*drawn[:num], token)] += mass * p
    return emitted
