"""Where a text ends that may hold none of some strings, in a plain loop over its characters."""

from __future__ import annotations


def before(text: str, stops: list[str], is_kept: bool, exempt: int = 0) -> tuple[str, str | None]:
    """The text up to the string that is complete first, and this string; the whole text if there is none.

    A string that ends in the first `exempt` characters does not count.
    """
    for end in range(exempt + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if is_kept else end - len(stop)], stop
    return text, None
