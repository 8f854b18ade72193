"""Reading and writing of files: JSON and YAML that may hold anything, results that appear whole or not at all.

A result is written to a temporary file beside its place and renamed, so a full disk or a kill leaves what was there
before. Knows nothing about what the files mean, and imports no jax. Read next: `host/lock.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hsd_jax.settings import is_off

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
    except (ValueError, RecursionError) as error:  # what is no UTF-8 included
        raise ValueError(f"{where}: not JSON ({error})") from error


def parse_yaml(text: str, where: str) -> Any:
    """What a YAML text holds.

    Raises:
      ValueError: naming `where`, if it is no YAML or is nested deeper than Python reads.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:  # a date of day 99
        raise ValueError(f"{where}: not YAML ({' '.join(str(error).split())})") from error


def read_bytes(path: str | Path) -> bytes:
    """The content of a file.

    Raises:
      FileNotFoundError: if there is no such file.
      OSError: naming the file, if it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise type(error)(f"{path}: cannot be read ({error.strerror or error})") from error


def read_text(path: str | Path) -> str:
    """The text of a file, without the byte order mark that some editors write.

    Raises:
      FileNotFoundError, OSError: as `read_bytes`.
      ValueError: if it is no UTF-8; names the byte.
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

    A device or a FIFO, /dev/stdout for example, is given as it is. A process that is no writer gets a path elsewhere,
    which is removed.

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
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise type(error)(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


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
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise type(error)(f"{wanted}: cannot be written ({error.strerror or error})") from error


def kept_folder(variable: str, name: str) -> Path | None:
    """Where records of a kind are kept for this user: the folder that an environment variable names, or one of this
    name in `user_cache`; None where the variable is off, or the user has no home directory.
    """
    setting = os.environ.get(variable, "")
    if is_off(setting):
        return None
    try:
        return Path(setting).expanduser() if setting else user_cache() / name
    except RuntimeError:  # neither HOME nor an entry of this user
        return None


def user_cache() -> Path:
    """This user's folder for what can be made again: compiled programs and kernels, and records of `tune`.

    Raises:
      RuntimeError: if this user has no home directory.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsd_jax"
