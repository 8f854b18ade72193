"""Ctrl-C: the first one ends a command in an orderly way, the second one ends the process at once.

Python handles a signal only between two of its own instructions. In a long compilation a second Ctrl-C would have no
effect until the compilation ends, so another thread waits for it. This module imports nothing slow, because it must be
active before the slow imports begin.
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
    """A context manager that handles SIGINT as described above. It does nothing outside the main thread."""

    def __init__(self) -> None:
        self.seen = False
        """Whether Ctrl-C was pressed. True also if a callback of jax has swallowed the KeyboardInterrupt."""
        self.is_over = False
        """The caller sets this when there is nothing left to interrupt."""
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # a shell does so for background jobs
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
        if is_first and not self.is_over:  # `_watch` handles the second one
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
