"""A time limit for work that may never end, such as a chat template of a checkpoint or a request to a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread of its own, and returns or raises what it does.

    Python cannot end a thread. So work that takes longer continues in the background until the process ends.

    Raises:
      TimeoutError: if the work takes longer than `seconds`.
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
            return done.result()  # the work ended this moment, or it raised the TimeoutError itself
        raise TimeoutError(f"it runs for more than {seconds:g} seconds") from None
