"""Ctrl-C: one ends a command in an orderly way, a second one ends the process at once.

Python handles a signal between two of its own instructions, so a second Ctrl-C in a long compilation would wait for the
end of it: another thread looks for that one. Imports nothing that takes time: it is in place before what does.
"""

from __future__ import annotations

import os
import signal
import threading

TYPE_CHECKING = False  # as in `hsd_jax/__init__.py`
if TYPE_CHECKING:
    from typing import Any

EXIT_CODE = 130
LINE = "\nhsd: interrupted"


class Interrupts:
    """While entered, from the main thread, SIGINT is handled as said above; elsewhere nothing changes."""

    def __init__(self) -> None:
        self.seen = False
        """Whether Ctrl-C was pressed, also where a callback of jax's has swallowed the KeyboardInterrupt."""
        self.is_over = False
        """Set by whoever entered, when there is nothing left to interrupt."""
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # by whoever started it, in the background
        if not is_main or is_ignored or os.name != "posix":
            return self
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        threading.Thread(target=_watch, args=(read,), daemon=True, name="hsd-interrupts").start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._write)  # the watcher ends

    def _interrupt(self, *_: object) -> None:
        is_first, self.seen = not self.seen, True
        if is_first and not self.is_over:  # the watcher sees to the second
            raise KeyboardInterrupt


def _watch(read: int) -> None:
    """Ends the process at the second SIGINT."""
    seen = 0
    while numbers := os.read(read, 64):
        seen += numbers.count(signal.SIGINT)
        if seen > 1:
            os.write(2, f"{LINE}\n".encode())
            os._exit(EXIT_CODE)
    os.close(read)
