"""Reading and writing of files: JSON and YAML that may hold anything, results that appear whole or not at all.

A result is written to a temporary file beside its place and renamed, so a full disk or a kill leaves what was there
before. Knows nothing about what the files mean, and imports no jax. Read next: `host/lock.py`.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_writes = True


def set_writer(is_one: bool) -> None:
    """Lets this process write results, or not: of several processes of a run the first does (`host/distributed.py`)."""
    global _writes
    _writes = is_one


def is_writer() -> bool:
    """Whether this process writes results, says what it does and prints tables."""
    return _writes


def sha256(*parts: str | bytes) -> str:
    """The digest of these parts one after another, in 64 hexadecimal digits; text counts as UTF-8."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def parse_json(text: str | bytes, where: str) -> Any:
    """What a JSON text holds.

    Raises:
      ValueError: naming `where`, if it is no JSON, is no UTF-8 or is nested deeper than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: not JSON that can be read (nested too deeply)") from None
    except ValueError as error:  # what is no UTF-8 included
        raise ValueError(f"{where}: not JSON ({error})") from error


def parse_yaml(text: str, where: str) -> Any:
    """What a YAML text holds.

    Raises:
      ValueError: naming `where`, if it is no YAML or is nested deeper than Python reads.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError(f"{where}: not YAML that can be read (nested too deeply)") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:  # a date of day 99, a list as a key
        raise ValueError(f"{where}: not YAML ({' '.join(str(error).split())})") from error


def read_bytes(path: str | Path) -> bytes:
    """The content of a regular file; a FIFO is not waited for.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is a folder, a FIFO or a device.
      OSError: naming the file, if it cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    check_regular(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise type(error)(f"{path}: cannot be read ({error.strerror or error})") from error


def check_regular(path: Path) -> None:
    """Raises a ValueError for what is there and is no regular file: reading a FIFO would wait for a writer."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise ValueError(f"{path}: {names.get(kind, 'a device')}; expected a regular file")


def read_text(path: str | Path) -> str:
    """The text of a file, without the byte order mark that some editors write.

    Raises:
      FileNotFoundError, OSError: as `read_bytes`.
      ValueError: as `read_bytes`, and if it is no UTF-8; names the byte.
    """
    return decoded(read_bytes(path), str(path))


def decoded(content: bytes, where: str) -> str:
    """UTF-8 bytes as text, without a byte order mark; a ValueError names the byte that is none."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def with_unix_lines(text: str) -> str:
    """Text whose lines end as they do here, wherever it was written."""
    return text.replace("\r\n", "\n")


def read_json(path: str | Path) -> Any:
    """What a JSON file holds; raises as `read_text` and `parse_json`."""
    return parse_json(read_text(path), str(path))


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds; raises as `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path), str(path))


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`: put in its place if the block ends well, removed if not.

    What a killed process left of its own is removed, too. A device or a FIFO, /dev/stdout for example, is given as it
    is. A process that is no writer gets a path elsewhere, which is removed.

    Raises:
      OSError: of the block's kind, naming `path`, if it cannot be written.
    """
    path = Path(path)
    if not is_writer():
        with tempfile.TemporaryDirectory(prefix="hsd-") as folder:
            yield Path(folder) / path.name
        return
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()  # a link stays a link
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _drop_leftovers(path)
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise type(error)(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _drop_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = leftover.name.split(".")[-2]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not _is_alive(int(pid)):
                leftover.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def write_text(path: str | Path, text: str) -> None:
    """Writes a text whole or not at all; raises as `replacing`."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Writes JSON whole or not at all; raises as `replacing`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Puts a freshly written folder in the place of `folder`; a kill leaves the old one, the new one, or both.

    What `write` leaves where it fails is removed. A process that is no writer does nothing.
    """
    if not is_writer():
        return
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        write(new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def check_new_file(path: str | Path) -> Path:
    """The path, if a file can be written there: found out before the work that fills it.

    Raises:
      FileNotFoundError: if its folder is missing.
      OSError, ValueError: if the folder takes no file, or the path is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    if not path.exists() or path.is_file():
        _try_to_write(path.resolve().parent, path)
    elif not os.access(path, os.W_OK):
        raise PermissionError(f"{path}: cannot be written (Permission denied)")
    return path


def check_new_folder(path: str | Path) -> Path:
    """The path, if files can be written into a folder there, which may have to be made with those above it.

    Raises:
      ValueError, OSError: if it, or one above it, is a file or takes none.
    """
    path = Path(path)
    there = path.resolve()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"{path}: {there} is a file; name a folder")
    _try_to_write(there, path)
    return path


def _try_to_write(folder: Path, wanted: Path) -> None:
    trial = folder / f".{os.getpid()}.trial"
    try:
        trial.touch()
    except OSError as error:
        raise type(error)(f"{wanted}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            trial.unlink(missing_ok=True)


def user_cache() -> Path:
    """This user's folder for what can be made again: compiled programs and kernels, and records of `tune`.

    Raises:
      RuntimeError: if this user has no home directory.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsd_jax"


def drop_empty(folder: Path, pattern: str) -> int:
    """Removes the files of no bytes that a full disk has left in a cache, and returns their number."""
    dropped = 0
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # another process may have been faster
            if path.is_file() and path.stat().st_size == 0:
                path.unlink()
                dropped += 1
    return dropped
