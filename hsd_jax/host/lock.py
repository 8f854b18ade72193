"""One writer at a time: a lock on a folder or file that a run writes to. The library filelock does the locking.

The system releases the lock when its process ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from hsd_jax.host.files import check_new_folder

NAME = ".lock"


@contextlib.contextmanager
def held(folder: str | Path, name: str = NAME) -> Iterator[None]:
    """Holds a lock file in a folder until the end of the block, and then removes it. A ValueError if another run holds
    it.

    If the folder did not exist, it is made, and it is removed again if the block leaves it empty.
    """
    folder = check_new_folder(folder)
    lock = folder / name
    was_there = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    file = filelock.FileLock(lock, timeout=0)
    try:
        file.acquire()
    except filelock.Timeout:
        raise ValueError(f"{lock}: another process holds this lock, and writes there") from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        file.release()
        if not was_there:
            with contextlib.suppress(OSError):  # not empty: what the block wrote stays
                folder.rmdir()
