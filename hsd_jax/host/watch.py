"""What ends the processes of one run together: signs of life in jax's store of keys, and who stopped giving them.

A collective that waits for a dead process may wait for ever, and what jax says of it names nobody. Read first:
`host/distributed.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import platform
import signal
import socket
import sys
import threading
import time

import jax

BEAT_SECONDS = 2.0
"""Between two signs of life."""
SILENCE_SECONDS = 30.0
"""Without a sign of life after which a process counts as dead."""
FAILED = 2
"""Exit status of a process that others have ended, or that ends others."""
KEY, GONE = "hsd/alive/", -1
"""Before the number of a process: the key under which it writes signs of life, a number that grows; and the number that
it writes last when it ends."""


def fail(error: BaseException) -> None:
    """Ends this process, whose error has been shown, and with it the others; without others it returns."""
    if Watch.here is not None:
        Watch.here.await_verdict(error)
        Watch.here.end_with(error)


class Watch(threading.Thread):
    """Writes signs of life to jax's store of keys, reads those of the others, and ends with the first that ends.

    The store is process 0's: where it does not answer, process 0 has died.
    """

    here: Watch | None = None
    """Of this process, while it is one of several."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="hsd-watch")
        from jax._src.distributed import global_state  # jax shows its store nowhere else

        assert global_state.client is not None and global_state.coordinator_address is not None
        self.process, self.num_processes = global_state.process_id, global_state.num_processes
        self._client, self._coordinator = global_state.client, global_state.coordinator_address
        self._about, self._is_over = f"process {self.process} (pid {os.getpid()} on {platform.node()})", False

    def begin(self, timeout_seconds: int) -> None:
        """Watches from here on, until the interpreter ends."""
        self._tell(0)
        self._client.wait_at_barrier("hsd/begin", 1000 * timeout_seconds)
        self._seen = {process: (told[1], time.monotonic()) for process, told in self._others().items()}
        self._first = self._others().get(0, ("process 0",))[0]
        Watch.here = self
        self.start()
        self._speak_before_abort()
        atexit.register(self._leave)  # before jax's own function, in which the processes wait for each other
        plain = sys.excepthook

        def excepthook(kind, error, trace):
            self.await_verdict(error)
            plain(kind, error, trace)
            self.end_with(error)

        sys.excepthook = excepthook

    def run(self) -> None:
        for count in itertools.count(1):
            time.sleep(BEAT_SECONDS)
            if self._is_over:
                return
            try:
                self._tell(count)
                others = self._others()
            except jax.errors.JaxRuntimeError:
                self._end_without_first()
            for process, (about, count_there, failure) in others.items():
                before, since = self._seen[process]
                if failure:
                    self._end(failure)
                if count_there == GONE or count_there != before:
                    self._seen[process] = count_there, time.monotonic()
                elif time.monotonic() - since > SILENCE_SECONDS:
                    self._end(f"{about} has died: no sign of life for {SILENCE_SECONDS:g} s")

    def _tell(self, count: int, failure: str = "") -> None:
        value = json.dumps([self._about, count, failure])
        self._client.key_value_set(f"{KEY}{self.process}", value, allow_overwrite=True)

    def _others(self) -> dict[int, tuple[str, int, str]]:
        """Of each other process its name, its last sign of life, and why it failed if it did."""
        found = {int(key.rpartition("/")[2]): value for key, value in self._client.key_value_dir_get(KEY)}
        return {process: json.loads(value) for process, value in found.items() if process != self.process}

    def _leave(self) -> None:
        self._is_over = True
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._tell(GONE)

    def await_verdict(self, error: BaseException | None) -> None:
        """Where a collective may have failed, waits as long as it takes to see whose end it was."""
        # What Gloo's connections to a dead process fail with is a plain ValueError where arrays are gathered.
        while error is not None and not isinstance(error, jax.errors.JaxRuntimeError) and "Gloo" not in str(error):
            error = error.__cause__ or error.__context__
        if error is not None:
            self.join(SILENCE_SECONDS + 2 * BEAT_SECONDS)

    def _end(self, reason: str) -> None:
        """Never returns."""
        os.write(2, f"hsd: error: {reason}; this process, {self.process}, ends\n".encode())
        self.exit(reason)

    def _end_without_first(self) -> None:
        """Never returns; says nothing to the others, whom there is no way to reach."""
        reason = f"{self._first} has died: {self._coordinator} does not answer"
        os.write(2, f"hsd: error: {reason}; this process, {self.process}, ends\n".encode())
        os._exit(FAILED)

    def end_with(self, error: BaseException) -> None:
        """Never returns: this process has failed."""
        self.exit(f"{self._about} failed: {type(error).__name__}: {error}")

    def exit(self, reason: str) -> None:
        """Never returns: says why this process ends to those that still listen."""
        self._is_over = True
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._tell(GONE, reason)
            if self.process == 0:  # the store ends with this process
                time.sleep(3 * BEAT_SECONDS)
        os._exit(FAILED)

    def _speak_before_abort(self) -> None:
        """Names process 0 where jax's own client, which loses it first, ends this process by abort()."""

        def on_abort(_) -> None:
            host, _, port = self._coordinator.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), 5).close()
            except OSError:
                self._end_without_first()

        if self.process and os.name == "posix":
            self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)  # Python's own handlers would come too late
            ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)
