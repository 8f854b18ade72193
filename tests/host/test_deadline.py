"""A limit of time: what the work gives in time is given, whatever it is; what takes longer is named."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from hsd_jax.host import deadline


def test_what_is_done_in_time_is_returned_or_raised():
    assert deadline.within(20, lambda: 3) == 3
    for error in (KeyError("own"), TimeoutError("own")):
        with pytest.raises(type(error), match="own"):
            deadline.within(20, lambda error=error: (_ for _ in ()).throw(error))


def test_what_takes_longer_is_left_to_itself():
    end = threading.Event()
    with pytest.raises(TimeoutError, match=r"0\.05 seconds"):
        deadline.within(0.05, end.wait)
    end.set()


def test_what_ends_as_the_time_does_is_not_lost(monkeypatch):
    class Late(Future):
        def result(self, timeout=None):
            if timeout is None:
                return super().result()
            super().result()
            raise TimeoutError

    monkeypatch.setattr(deadline, "Future", Late)
    assert deadline.within(0.05, lambda: 3) == 3
