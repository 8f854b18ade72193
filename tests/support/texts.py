"""Where two texts part."""

from __future__ import annotations


def first_difference(found: list[list[int]], wanted: list[list[int]]) -> str | None:
    """The first row and place where two batches of texts differ, or None."""
    for row, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one != other:
            place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            return f"row {row}, place {place}: {one} is not {other}"
    return None
