"""Prompt lookup in plain loops."""

from __future__ import annotations

from collections.abc import Sequence


def draft(context: Sequence[int], max_ngram: int, min_ngram: int, depth: int) -> list[int] | None:
    """The `depth` tokens behind the latest earlier occurrence of the longest repeated end, or None without one.

    Lengths from `max_ngram` down to `min_ngram`; what is copied is itself copied on.
    """
    num = len(context)
    for length in range(max_ngram, min_ngram - 1, -1):
        for end in range(num - 1, length - 1, -1):
            if num >= length and list(context[end - length : end]) == list(context[num - length :]):
                text = list(context)
                for place in range(end, end + depth):
                    text.append(text[place])
                return text[num:]
    return None
