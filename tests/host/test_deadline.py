"""A limit of time: what the work gives in time is given, whatever it is; what takes longer is named."""

from __future__ import annotations

import contextlib
import threading

import pytest

from hsd_jax.host import deadline


def test_what_is_done_in_time_is_returned_or_raised():
    assert deadline.within(20, lambda: 3) == 3
    for error in (KeyError("own"), TimeoutError("own")):
        with pytest.raises(type(error), match="own"):
            deadline.within(20, lambda error=error: (_ for _ in ()).throw(error))


def test_what_takes_longer_is_named_and_ended():
    """Two threads without end made the rest of a suite three times slower: each kept its share of the interpreter."""
    running = threading.Event()
    threads = []

    def never_ends():
        threads.append(threading.current_thread())
        while True:
            with contextlib.suppress(Exception):  # as work may do that catches its own errors
                running.set()

    with pytest.raises(TimeoutError, match=r"0\.2 seconds"):
        deadline.within(0.2, never_ends)
    assert running.is_set()
    threads[0].join(10)
    assert not threads[0].is_alive()
