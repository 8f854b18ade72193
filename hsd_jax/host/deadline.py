"""A time limit for work that may never end, such as a chat template of a checkpoint or a request to a server."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread of its own, and returns or raises what it does.

    Work that takes longer raises a TimeoutError and is ended: SystemExit is raised in its thread, at the next line of
    Python that it runs. A template that never ends would otherwise take its share of the interpreter from everything
    that the process does later.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, daemon=True, name="hsd-deadline")
    thread.start()
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():
            return done.result()  # the work ended this moment, or it raised the TimeoutError itself
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise TimeoutError(f"it runs for more than {seconds:g} seconds") from None
