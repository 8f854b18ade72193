"""PEARL's two phases (arXiv:2408.11850, algorithm 2) in exact arithmetic, for Markov tables; and a decoder that drafts
and tests one token at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

Table = Sequence[Sequence[Fraction]]
"""[token before, token]: how likely each token is behind each."""


def residual(p: Sequence[Fraction], q: Sequence[Fraction]) -> list[Fraction]:
    left = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    total = sum(left)
    return [x / total for x in left] if total else list(p)


def chains(q: Table, root: int, gamma: int) -> list[tuple[tuple[int, ...], Fraction]]:
    """Every chain of drafts behind a token, and how likely it is."""
    found = [((), Fraction(1))]
    for _ in range(gamma):
        found = [
            ((*chain, token), mass * q[chain[-1] if chain else root][token])
            for chain, mass in found
            for token in range(len(q))
            if q[chain[-1] if chain else root][token]
        ]
    return found


def law(p: Table, q: Table, root: int, gamma: int, num_tokens: int, mutant: str = "") -> dict[tuple, Fraction]:
    """How likely each text of so many tokens is, enumerated round by round through both phases.

    Args:
      mutant: "no test": the tip goes on untested. "bonus": where all were accepted, a token of the target's goes behind
        the tip, and the drafts behind the tip stay pending. "equal": the tip is accepted if the target draws it, and
        if not, what the target drew is judged again, as a rejection of the chain rule.
    """
    found: dict[tuple, Fraction] = defaultdict(Fraction)

    def walk(text: tuple[int, ...], pending: tuple[int, ...], mass: Fraction) -> None:
        if len(text) >= num_tokens:
            found[text[:num_tokens]] += mass
            return
        believed = pending[-1] if pending else (text[-1] if text else root)
        for fresh, chance in chains(q, believed, gamma):
            judge(text, pending + fresh[:1], fresh[1:], mass * chance)

    def judge(text: tuple[int, ...], drafts: tuple[int, ...], behind: tuple[int, ...], mass: Fraction) -> None:
        if not mass:
            return
        if not drafts:
            if mutant == "bonus":
                for token, chance in enumerate(p[text[-1]]):
                    walk((*text, token), behind, mass * chance)
                return
            walk(text, behind, mass)
            return
        before, draft, is_tip = text[-1] if text else root, drafts[0], len(drafts) == 1
        accept = min(Fraction(1), p[before][draft] / q[before][draft])
        if is_tip and mutant:
            accept = {"no test": Fraction(1), "equal": p[before][draft]}.get(mutant, accept)
        judge((*text, draft), drafts[1:], behind, mass * accept)
        for token, chance in enumerate(residual(p[before], q[before])):
            walk((*text, token), (), mass * (1 - accept) * chance)

    walk((), (), Fraction(1))
    return found


def of_target(p: Table, root: int, num_tokens: int) -> dict[tuple, Fraction]:
    return dict(chains(p, root, num_tokens))


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
