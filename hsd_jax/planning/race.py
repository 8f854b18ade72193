"""Races: rounds with drafts against plain rounds, timed where they run.

The model of costs (`costs.py`) chooses a tree from the rates of a processor. The first calls of a kind then run some
rounds with drafts and some without, in turns, and the host times these laps. The program is that of the loop, and the
tokens count where both kinds of rounds have the same bits. The outcome corrects the model, decides whether such calls
draft, and is kept for this user. A race measures only seconds. How many drafts are accepted depends on the text, which
the loop judges (`infer/adapt.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from hsd_jax import validation
from hsd_jax.host import files
from hsd_jax.host.distributed import of_first
from hsd_jax.planning.device import device_name
from hsd_jax.validation import Positive

FOLDER_VARIABLE = "HSD_RACE"
"""Environment variable: the folder of outcomes. Empty: ~/.cache/hsd_jax/races. "off": the model of costs decides
alone."""
LAP = 10.0
"""A lap should last this many times as long as a call of the loop that runs no round."""
LONG_ENOUGH = 0.7
"""A lap that lasts less than this share of that does not count. It only shows how long rounds last."""
FEWEST_ROUNDS = 2
"""Rounds of a lap. The first lap has so many and does not count: the rounds after a prefill are slow."""
MOST_ROUNDS = 32
"""Rounds of a lap at most, even if it then lasts less long."""
MOST_LOST = 8
"""So many laps in a row that do not count end a race: these calls are too short to be timed."""
MOST_PAIRS = 4
"""Pairs of laps after which a race ends in any case."""
LIKELY = 1.5
"""A correction by more than this factor needs a second pair of laps: the first plain rounds may be slow."""
CLEAR = 1.12
"""After a pair of laps a race ends if the gain is this factor from 1; after the first one, the square of it."""


@validation.dataclass
class Outcome:
    """What a race has measured."""

    drafted_seconds: Positive
    """Seconds of a round with drafts."""
    plain_seconds: Positive
    """Seconds of a plain round."""
    correction: Positive
    """The ratio of the two, divided by the ratio that the model of costs had predicted for the same rounds."""

    def __str__(self) -> str:
        return f"rounds take {1e3 * self.drafted_seconds:.2f} ms with drafts, {1e3 * self.plain_seconds:.2f} ms without"


class Lap(NamedTuple):
    """Rounds of one kind."""

    round_seconds: float
    ratio: float
    """The predicted seconds of a round over those of a plain round."""


class Race:
    """The laps of the calls of one kind, until there is an outcome.

    Args:
      gain: the speed of the tree over that of plain decoding, as predicted.
      path: the file of the outcome; None: it is not kept.
    """

    def __init__(self, gain: float, path: Path | None = None):
        self.gain, self.path = gain, path
        self.outcome = files.kept(Outcome, path)
        self._lock = threading.Lock()
        self._laps: dict[bool, list[Lap]] = {True: [], False: []}
        self._load = self._num_lost = 0
        """The number of rows of these laps; laps in a row that did not count."""
        self._idle_seconds = self._expected = 0.0
        """Seconds of a call of the loop that runs no round; those expected of a round of the next lap."""

    @property
    def _num_rounds(self) -> int:
        """The number of rounds of the next lap."""
        enough = math.ceil(LAP * self._idle_seconds / self._expected) if self._expected else 0
        return min(max(enough, FEWEST_ROUNDS), MOST_ROUNDS)

    def goes_on(self, num_rounds: int) -> bool:
        """Whether a lap is due, and so many rounds would last for it."""
        return self.outcome is None and not self.gave_up and self._num_rounds <= num_rounds

    @property
    def gave_up(self) -> bool:
        """Whether there will be no outcome."""
        return self.outcome is None and self._num_lost >= MOST_LOST

    def give_up(self) -> None:
        """Ends the race without an outcome."""
        self._num_lost = MOST_LOST

    def run(self, lap: Callable[[int, bool], float | None], most: int, load: int, prepare: Callable[[], None]) -> int:
        """Runs laps until there is an outcome, or until `most` rounds would not last for another lap.

        Args:
          lap: `lap(num_rounds, has_drafts)` runs rounds with or without drafts and waits for them. It returns their
            mean predicted seconds over those of plain rounds; None if it ran fewer. The race then goes on in the next
            call of `run`.
          load: the number of rows. Laps of another number do not compare.
          prepare: what comes before each lap and is not timed.
        Returns:
          The number of rounds that were asked for.
        """
        if not self._lock.acquire(blocking=False):  # another thread times its own rounds
            return 0
        try:
            return self._run(lap, most, load, prepare)
        finally:
            self._lock.release()

    def _run(self, lap: Callable[[int, bool], float | None], most: int, load: int, prepare: Callable[[], None]) -> int:
        num_done, ratio = 0, 1.0
        if load != self._load:
            self._load, self._laps = load, {True: [], False: []}
        if not self._idle_seconds:
            idle = []
            for _ in range(3):  # the first one compiles
                prepare()
                idle.append(_timed(lap, 0, True)[0])
            self._idle_seconds = min(idle)
        while ratio is not None and self.goes_on(most - num_done):
            has_drafts, num = len(self._laps[True]) <= len(self._laps[False]), self._num_rounds
            prepare()
            seconds, ratio = _timed(lap, num, has_drafts)
            num_done += num
            self._num_lost += 1
            if ratio is not None and seconds > 2 * self._idle_seconds:
                self._add(num, Lap((seconds - self._idle_seconds) / num, ratio), has_drafts)
        return num_done

    def _add(self, num_rounds: int, lap: Lap, has_drafts: bool) -> None:
        least = LONG_ENOUGH * LAP * self._idle_seconds
        counts = self._expected and (num_rounds == MOST_ROUNDS or num_rounds * lap.round_seconds > least)
        self._expected = lap.round_seconds
        if not counts:
            return
        self._num_lost = 0
        self._laps[has_drafts].append(lap)
        if has_drafts:
            self._expected = lap.round_seconds / lap.ratio
        else:
            self._expected = self._laps[True][-1].round_seconds
            self._judge()

    def _judge(self) -> None:
        """Ends the race if the laps so far are clear. Other work only slows laps, so the fastest ones count."""
        drafted = min(self._laps[True], key=lambda lap: lap.round_seconds / lap.ratio)
        plain, pairs = min(lap.round_seconds for lap in self._laps[False]), len(self._laps[False])
        correction = drafted.round_seconds / drafted.ratio / plain
        is_clear = abs(math.log(self.gain / correction)) > math.log(CLEAR) * (2 if pairs == 1 else 1)
        is_likely = abs(math.log(correction)) < math.log(LIKELY) or pairs > 1
        if pairs < MOST_PAIRS and not (is_clear and is_likely):
            return
        self.outcome = Outcome(drafted.round_seconds, plain, correction)
        if self.path is not None:
            with contextlib.suppress(OSError):  # then the next process races, too
                files.keep(self.path, self.outcome)


_races: dict[tuple, Race] = {}


def race_of(gain: float, *about: Any) -> Race:
    """The race of the calls that `about` describes. A new one knows the outcome that an earlier process has kept.

    Several processes keep nothing: their files may differ.
    """
    if about not in _races:  # every call asks, so what follows is done once
        about_all = device_name(), jax.__version__, files.own_version(), about
        what, alone = repr(about_all), jax.process_count() == 1
        path = files.kept_file(FOLDER_VARIABLE, "races", Outcome, what) if alone else None
        _races.setdefault(about, Race(gain, path))  # of two threads one finds that of the other
    return _races[about]


def is_off() -> bool:
    """Whether the environment forbids races."""
    return files.is_off(os.environ.get(FOLDER_VARIABLE, ""))


def _timed(lap: Callable[[int, bool], float | None], num_rounds: int, has_drafts: bool) -> tuple[float, float | None]:
    """The seconds of a lap that process 0 measured, and what the lap returns."""
    start = time.perf_counter()
    ratio = lap(num_rounds, has_drafts)
    return 1e-6 * of_first(max(round(1e6 * (time.perf_counter() - start)), 1)), ratio
