"""Cases of a test, those marked that take long."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(every: Iterable[Any], slow: Collection[Any] = ()) -> list[Any]:
    """What `pytest.mark.parametrize` takes: each case once. Those in `slow` are left to `make test-slow`.

    So what a table gains runs in `make test` until it is called slow.
    """
    found: list[Any] = []
    for case in every:
        if case not in found:
            found.append(case)
    if unknown := [case for case in slow if case not in found]:
        raise ValueError(f"slow={unknown}: no such case, known are {found}")
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.slow] * (case in slow))
        for case in found
    ]
