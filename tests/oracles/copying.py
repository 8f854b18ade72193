"""What a copying drafter proposes, token by token."""

from __future__ import annotations


def draft(tokens: list[int], length: int, depth: int) -> list[int]:
    """The token `length` places back, again and again."""
    text = list(tokens)
    for _ in range(depth):
        text.append(text[-length])
    return text[len(tokens) :]
