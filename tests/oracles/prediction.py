"""Drafts from a prediction of the text in plain loops, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


def repetition(context: Sequence[int], before: Sequence[int], most: int) -> int:
    """The number of last tokens that two texts have in common, at most `most`."""
    num = 0
    while num < min(most, len(context), len(before)) and context[-1 - num] == before[-1 - num]:
        num += 1
    return num


@dataclasses.dataclass
class Follower:
    """A row's prediction: where the text is in it, and what was counted."""

    prediction: list[int]
    max_ngram: int
    min_ngram: int
    place: int = 0
    followed: int = 0
    accepted: int = 0
    rejected: int = 0

    def find(self, context: Sequence[int], longest_in_context: int) -> tuple[int, int] | None:
        """The place of the next token and the length of the repetition; None if the context has a longer one."""
        num = len(self.prediction)
        order = [*range(self.place, num), *range(min(self.place, num))]  # from the expected place on, then from 0
        places = [place for place in order if place > 0]
        runs = [repetition(context, self.prediction[:place], self.max_ngram) for place in places]
        best, run = (places[runs.index(max(runs))], max(runs)) if runs else (0, 0)
        if self.followed >= run and self.place < num:
            best, run = self.place, self.followed
        return (best, run) if run >= max(self.min_ngram, longest_in_context, 1) else None

    def drafts(self, place: int, depth: int) -> list[int]:
        """The tokens from a place on; those up to the end are repeated."""
        rest = self.prediction[place:]
        return [rest[i % len(rest)] for i in range(depth)]

    def add(self, found: tuple[int, int] | None, text: Sequence[int], num_drafts: int) -> None:
        """Follows a committed text, of which `num_drafts` tokens were drafted as `found`."""
        place, run = found or (0, 0)
        rest = [] if found is None else self.prediction[place:]
        num = 0
        while num < min(len(rest), len(text)) and rest[num] == text[num]:
            num += 1
        self.accepted += num
        if num:
            self.place = place + len(text)
        if num == len(text):
            self.followed = min(run + num, self.max_ngram)
        else:
            self.rejected += max(min(num_drafts, len(rest)) - num, 0)
            self.followed = self.min_ngram if self.place == 0 else 0
