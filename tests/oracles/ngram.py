"""Interpolated Kneser-Ney smoothing in plain dictionaries and fractions, counted n-gram by n-gram."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

LEAST, MOST = Fraction(1, 10), Fraction(9, 10)


class Ngrams:
    """`p(w, h)` of a model of `order`: documents are pairs of tokens and of which of them are counted."""

    def __init__(self, documents: Sequence[tuple[Sequence[int], Sequence[bool]]], order: int, vocab_size: int):
        self.order, self.vocab_size = order, vocab_size
        self.counts = [self._counted(documents, n) for n in range(1, order + 1)]
        self.discounts = [self._discount(counts) for counts in self.counts]

    def _counted(self, documents, n: int) -> dict[tuple[int, ...], int]:
        seen: dict[tuple[int, ...], list] = {}
        for tokens, counted in documents:
            for end in range(n, len(tokens) + 1):
                if counted[end - 1]:
                    gram, before = tuple(tokens[end - n : end]), tokens[end - n - 1] if end > n else "beginning"
                    seen.setdefault(gram, []).append(before)
        is_longest = n == self.order
        return {gram: len(before) if is_longest else len(set(before)) for gram, before in seen.items()}

    @staticmethod
    def _discount(counts) -> Fraction:
        once, twice = (sum(1 for count in counts.values() if count == times) for times in (1, 2))
        return min(max(Fraction(once, max(once + 2 * twice, 1)), LEAST), MOST)

    def p(self, token: int, context: tuple[int, ...]) -> Fraction:
        """The probability of a token after the last tokens of a context; too long a context is cut."""
        context = context[-(self.order - 1) :]
        counts, own = self.counts[len(context)], self.discounts[len(context)]
        lower = self.p(token, context[1:]) if context else Fraction(1, self.vocab_size)
        after = [counts.get((*context, w), 0) for w in range(self.vocab_size)]
        total, types = sum(after), sum(count > 0 for count in after)
        if not total:
            return lower
        return max(after[token] - own, Fraction(0)) / total + own * types / total * lower
