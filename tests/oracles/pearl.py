"""PEARL's two phases (arXiv:2408.11850, algorithm 2) in exact arithmetic, for Markov tables; and a decoder that drafts
and tests one token at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from oracles.distribution import Table, text_distribution
from oracles.recursive import rest_of


def law(p: Table, q: Table, root: int, gamma: int, num_tokens: int, is_tested: bool = True) -> dict[tuple, Fraction]:
    """How likely each text of so many tokens is, enumerated round by round through both phases.

    Args:
      is_tested: whether the tip is tested. The mutant accepts it.
    """
    found: dict[tuple, Fraction] = defaultdict(Fraction)

    def walk(text: tuple[int, ...], pending: tuple[int, ...], mass: Fraction) -> None:
        if len(text) >= num_tokens:
            found[text[:num_tokens]] += mass
            return
        believed = pending[-1] if pending else (text[-1] if text else root)
        for fresh, chance in text_distribution(q, believed, gamma).items():
            judge(text, pending + fresh[:1], fresh[1:], mass * chance)

    def judge(text: tuple[int, ...], drafts: tuple[int, ...], behind: tuple[int, ...], mass: Fraction) -> None:
        if not mass:
            return
        if not drafts:
            walk(text, behind, mass)
            return
        before, draft, is_tip = text[-1] if text else root, drafts[0], len(drafts) == 1
        accept = min(Fraction(1), p[before][draft] / q[before][draft])
        if is_tip and not is_tested:
            accept = Fraction(1)
        judge((*text, draft), drafts[1:], behind, mass * accept)
        for token, chance in enumerate(rest_of(p[before], q[before])):
            walk((*text, token), (), mass * (1 - accept) * chance)

    walk((), (), Fraction(1))
    return found


def one_by_one(
    target: Callable[[list[int]], np.ndarray],
    draft: Callable[[list[int]], np.ndarray],
    noises: Callable[[int], tuple[np.ndarray, float, np.ndarray]],
    prompt: Sequence[int],
    num_tokens: int,
) -> list[int]:
    """A chain decoder that takes no bonus token, a draft at a time.

    Args:
      target, draft: the distribution behind a text.
      noises: of an absolute position: noise of the draft, coin, noise of the target.
    """
    text = list(prompt)
    with np.errstate(divide="ignore"):
        while len(text) < len(prompt) + num_tokens:
            p, q = target(text), draft(text)
            of_draft, coin, of_target = noises(len(text))
            token = int(np.argmax(np.log(q) + of_draft))
            if coin >= min(1.0, p[token] / q[token]):
                left = np.maximum(p - q, 0.0)
                token = int(np.argmax(np.log(left / left.sum()) + of_target))
            text.append(token)
    return text[len(prompt) :]
