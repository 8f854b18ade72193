"""One writer at a time: a lock on a folder or file that a run writes to.

The library filelock locks the file. The system releases the lock when its process ends. This module also writes into
the file which process holds the lock. On a disk that does not support locks nothing is locked. Read first:
`host/files.py`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock

from hsd_jax.host.files import check_new_folder, read_json

NAME = ".lock"


def of_folder(folder: str | Path) -> Path:
    """The lock file of a folder that a run fills."""
    return Path(folder) / NAME


def beside(path: str | Path) -> Path:
    """The lock file of a file, or of a folder that must not exist yet."""
    path = Path(path)
    return path.with_name(f".{path.name}{NAME}")


@contextlib.contextmanager
def held(lock: Path) -> Iterator[None]:
    """Holds a lock file until the end of the block, and then removes it.

    If its folder did not exist, it is made, and it is removed again if the block leaves it empty. A lock file that a
    dead process left is taken over.

    Raises:
      ValueError: naming process, host, command and time of the holder, if another run holds it.
      OSError: if the lock file cannot be written.
    """
    check_new_folder(lock.parent)
    was_there = lock.parent.is_dir()
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _acquired(lock):
            lock.write_text(json.dumps(_about()))
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)  # while still locked, so a process that waits for it finds no file
    finally:
        if not was_there:
            with contextlib.suppress(OSError):  # not empty: what the block wrote stays
                lock.parent.rmdir()


def check_free(lock: Path) -> None:
    """Raises the ValueError of `held` if another run holds the lock. Creates no file."""
    if lock.is_file():
        with _acquired(lock):
            pass


@contextlib.contextmanager
def _acquired(lock: Path) -> Iterator[None]:
    file = filelock.FileLock(lock, timeout=0, fallback_to_soft=False)
    try:
        try:
            file.acquire()
        except filelock.Timeout:
            file.acquire()  # the holder may just have ended and removed the file
    except filelock.Timeout:
        raise _in_use(lock) from None
    except OSError:  # the disk does not support locks
        pass
    try:
        yield
    finally:
        file.release()


def _about() -> dict[str, str | int]:
    now = datetime.datetime.now(datetime.UTC)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"pid": os.getpid(), "host": platform.node(), "command": command, "since": f"{now:%Y-%m-%d %H:%M:%S} UTC"}


def _in_use(lock: Path) -> ValueError:
    what = lock.parent if lock.name == NAME else lock.with_name(lock.name[1 : -len(NAME)])
    try:
        about = read_json(lock)
        holder = f"process {about['pid']} on {about['host']} since {about['since']} ({about['command']})"
    except (OSError, ValueError, TypeError, KeyError):  # the holder has not written its name yet
        holder = "another process"
    return ValueError(f"{what}: is being written by {holder}; wait for it, end it, or choose another name")
