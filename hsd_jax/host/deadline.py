"""A limit of time for work that may never end: what came with a checkpoint, or an answer from elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, done in a thread of its own.

    Work that takes longer is left to itself, and ends with the process at the latest: Python ends no thread.

    Raises:
      TimeoutError: if it takes longer.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="hsd-deadline").start()
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():
            return done.result()  # it ended this moment, or the error is its own
        raise TimeoutError(f"it runs for more than {seconds:g} seconds") from None
