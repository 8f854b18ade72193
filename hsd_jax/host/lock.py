"""One writer at a time: a lock on a folder or file that a run writes to.

The lock is the kernel's (`flock`), so it ends with its process however that ends; the file says who holds it. Where
the system or the disk has no such locks, nothing is locked. Read first: `host/files.py`.
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
from typing import Any

from hsd_jax.host.files import check_new_folder, parse_json

try:
    import fcntl
except ImportError:  # no Unix
    fcntl = None

NAME = ".lock"


def of_folder(folder: str | Path) -> Path:
    """The lock file of a folder that a run fills."""
    return Path(folder) / NAME


def beside(path: str | Path) -> Path:
    """The lock file of a file, or of a folder that must not be there yet."""
    path = Path(path)
    return path.with_name(f".{path.name}{NAME}")


@contextlib.contextmanager
def held(lock: Path) -> Iterator[None]:
    """Holds a lock file, which is removed with the end of the block, like its folder if that was missing and is empty.

    A file that a dead process left is taken over.

    Raises:
      ValueError: naming process, host, command and time of the holder, if another run holds it.
      OSError: if the lock file cannot be written.
    """
    check_new_folder(lock.parent)
    was_there = lock.parent.is_dir()
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = _locked(lock)
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                lock.unlink(missing_ok=True)  # while it is locked: whoever waits for this file finds it gone
            os.close(file)
        if not was_there:
            with contextlib.suppress(OSError):  # not empty: what the block wrote stays
                lock.parent.rmdir()


def check_free(lock: Path) -> None:
    """Raises the ValueError of `held` if another run holds the lock; makes and keeps nothing."""
    if fcntl is None or not lock.is_file():
        return
    file = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(lock, file) from None
    except OSError:  # a disk without locks
        pass
    finally:
        os.close(file)


def _locked(lock: Path) -> int | None:
    """The open, locked file; None on a disk without locks."""
    if fcntl is None:
        return None
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, lock):
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(_about()).encode(), 0)
                return file
        except BlockingIOError:
            error = _in_use(lock, file)
            os.close(file)
            raise error from None
        except OSError:
            os.close(file)
            return None
        os.close(file)  # its holder has just removed it


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _about() -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"pid": os.getpid(), "host": platform.node(), "command": command, "since": f"{now:%Y-%m-%d %H:%M:%S} UTC"}


def _in_use(lock: Path, file: int) -> ValueError:
    what = lock.parent if lock.name == NAME else lock.with_name(lock.name[1 : -len(NAME)])
    try:
        about = parse_json(os.pread(file, 10_000, 0), str(lock))
        holder = f"process {about['pid']} on {about['host']} since {about['since']} ({about['command']})"
    except (ValueError, TypeError, KeyError):  # it has not said yet
        holder = "another process"
    return ValueError(f"{what}: is being written by {holder}; wait for it, end it, or choose another name")
