"""Ctrl-C: one ends a command in an orderly way, whatever swallows it; a second one ends the process at once.

Python turns SIGINT into a KeyboardInterrupt wherever the main thread happens to be. If that is a callback of jax's (the
garbage collector's, for example), the exception is dropped and the command would run on. So the interrupt is recorded,
and raised again while nobody is unwinding it. Imports nothing that takes time: it is in place before what does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

TYPE_CHECKING = False  # as in `hsd_jax/__init__.py`
if TYPE_CHECKING:
    from typing import Any

EXIT_CODE = 130
AGAIN_SECONDS = 0.3
LINE = "\nhsd: interrupted"
_ending = threading.RLock()


class Interrupts:
    """While entered, from the main thread, SIGINT is handled as said above; elsewhere nothing changes."""

    def __init__(self) -> None:
        self.seen = False
        """Whether Ctrl-C was pressed."""
        self.is_over = False
        """Set by whoever entered, when there is nothing left to interrupt."""
        self._is_on = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # by whoever started it, in the background
        if not is_main or is_ignored or not hasattr(signal, "SIGALRM"):
            return self
        self._is_on = True
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._swallowed
        handlers = {signal.SIGINT: self._interrupt, signal.SIGALRM: self._interrupt_again}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        threading.Thread(target=_watch, args=(read,), daemon=True, name="hsd-interrupts").start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_on:
            return
        self._is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        sys.unraisablehook = self._unraisable
        os.close(self._write)  # the watcher ends

    def _interrupt(self, *_: object) -> None:
        if self.seen:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _end()
        self.seen = True
        if not self.is_over:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS, AGAIN_SECONDS)
            raise KeyboardInterrupt

    def _interrupt_again(self, *_: object) -> None:
        """Raises it again unless it is on its way: a `finally` may be writing a checkpoint."""
        error = sys.exc_info()[1]
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__context__
        if error is None and not self.is_over:
            raise KeyboardInterrupt

    def _swallowed(self, unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):  # of that nothing need be said
            self._unraisable(unraisable)


def _watch(read: int) -> None:
    """Ends the process at the second SIGINT, even while the main thread is in a long compilation."""
    seen = 0
    while numbers := os.read(read, 64):
        seen += numbers.count(signal.SIGINT)
        if seen > 1:
            _end()
    os.close(read)


def _end() -> None:
    """Never returns. The handler and the watcher both see the second SIGINT: whoever is late waits here for the end."""
    _ending.acquire()  # for good; a thread that is interrupted here once more does not wait for itself
    os.write(2, f"{LINE}\n".encode())
    os._exit(EXIT_CODE)
