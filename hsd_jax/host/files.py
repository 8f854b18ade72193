"""Reading and writing files. Readers expect any content; a written file appears completely or not at all.

A result is written to a temporary file in the same folder, which is then renamed. So after a full disk or a kill the
old file is still there. This module does not know what the files mean, and it imports no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from hsd_jax.validation import is_off, read

Record = TypeVar("Record")

_writes = True


def set_writer(is_one: bool) -> None:
    """Sets whether this process writes results. Of several processes only the first does (`host/distributed.py`)."""
    global _writes
    _writes = is_one


def is_writer() -> bool:
    """Whether this process writes results and prints progress and tables."""
    return _writes


def own_version() -> str:
    """The version of this package, for what is kept between processes."""
    try:
        return version("hsd_jax")
    except PackageNotFoundError:
        return "not installed"


def sha256(*parts: str | bytes) -> str:
    """The digest of the concatenated parts, in 64 hexadecimal digits. Text is encoded as UTF-8."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def parse_json(text: str | bytes, where: str) -> Any:
    """Parses a JSON text. A ValueError names `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{where}: not JSON ({error})") from error


def parse_yaml(text: str, where: str) -> Any:
    """Parses a YAML text. A ValueError names `where`."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:  # for example a day 99
        raise ValueError(f"{where}: not YAML ({' '.join(str(error).split())})") from error


def read_bytes(path: str | Path) -> bytes:
    """The content of a file. An OSError names it."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise type(error)(f"{path}: cannot be read ({error.strerror or error})") from error


def read_text(path: str | Path) -> str:
    """The text of a file, without the byte order mark that some editors write."""
    return decoded(read_bytes(path), str(path))


def decoded(content: bytes, where: str) -> str:
    """UTF-8 bytes as text, without a byte order mark. Raises a ValueError that names the first invalid byte."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def with_unix_lines(text: str) -> str:
    """The text with Unix line ends, also if it was written on Windows."""
    return text.replace("\r\n", "\n")


def read_json(path: str | Path) -> Any:
    """The content of a JSON file."""
    return parse_json(read_text(path), str(path))


def read_object(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file."""
    return parse_yaml(read_text(path), str(path))


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`. It replaces `path` when the block ends, and is removed if the block raises.

    If `path` is a device or a FIFO, for example /dev/stdout, the block gets `path` itself. A process that is no writer
    gets a path in a temporary folder, which is removed.
    """
    path = Path(path)
    if not is_writer():
        with tempfile.TemporaryDirectory(prefix="hsd-") as folder:
            yield Path(folder) / path.name
        return
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()  # writes to the target of a link, so that the link stays
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
    """Writes a text completely or not at all; raises as `replacing`."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Writes JSON completely or not at all; raises as `replacing`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Replaces `folder` by one that `write` fills. After a kill the old folder, the new one, or both are there.

    If `write` raises, its files are removed. A process that is no writer does nothing.
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
    """Checks, before the work starts, that a file can be written, and returns its path."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    if not path.exists() or path.is_file():  # a device or a FIFO shows its fault when it is written
        _try_to_write(path.resolve().parent, path)
    return path


def check_new_folder(path: str | Path) -> Path:
    """Checks that files can be written into a folder, and returns its path. The folder need not exist yet."""
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


def kept_file(variable: str, name: str, kind: type, *about: str) -> Path | None:
    """The file in which a record is kept for this user. It is named after the texts that say what the record is about,
    and after the fields of the dataclass `kind`: another version of the library, with others, does not read it.

    The environment variable `variable` names its folder. If the variable is empty, it is the folder `name` in
    `user_cache`. None if the variable is "off", or if there is no such folder.
    """
    setting = os.environ.get(variable, "")
    if is_off(setting):
        return None
    file = f"{sha256(*about, *(field.name for field in dataclasses.fields(kind)))[:16]}.json"
    try:
        if setting:
            return Path(setting).expanduser() / file
        with contextlib.suppress(OSError):
            if os.path.isfile(there := home_cache() / name / file):  # also if that folder is read-only
                return there
        return user_cache() / name / file
    except (OSError, RuntimeError):  # no temporary folder either; or "~", and this user has no home directory
        return None


def keep(path: Path, record: Any) -> None:
    """Writes a `validation.dataclass` to a file of `kept_file`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(record))


_read_before: dict[Path, tuple[tuple[int, int], Any]] = {}
"""For every file that `kept` has read: its modification time and size at that moment, and its content."""


def kept(kind: type[Record], path: Path | None) -> Record | None:
    """The record that `keep` wrote, or None. A new one is found at once. A damaged file gives a warning, once."""
    try:
        about = None if path is None else path.stat()
    except OSError:
        about = None
    if path is None or about is None:
        return None
    now = about.st_mtime_ns, about.st_size
    if _read_before.get(path, (None,))[0] != now:
        found = None
        try:
            found = read(kind, read_json(path), str(path))
        except (OSError, ValueError) as error:
            warnings.warn(f"{error}; it is ignored until it is made again", stacklevel=2)
        _read_before[path] = now, found
    return _read_before[path][1]


def cpu_lines() -> dict[str, str]:
    """The lines of /proc/cpuinfo about the first processor, by what stands before the colon. Only Linux has it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    return {line.partition(":")[0].strip(): line for line in text.partition("\n\n")[0].splitlines()}


def home_cache() -> Path:
    """The folder in this user's home directory. It may be missing or read-only."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsd_jax"
    except RuntimeError as error:  # HOME is not set, and the user database has no entry
        raise FileNotFoundError("this user has no home directory") from error


def user_cache() -> Path:
    """This user's folder for files that can be made again: compiled programs and kernels, rates, and races.

    It can be written. It is `home_cache`, or else, as in a container without a home, `own_temporary_folder`.
    """
    with contextlib.suppress(OSError):
        folder = home_cache()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return own_temporary_folder()


@functools.cache
def own_temporary_folder() -> Path:
    """A temporary folder that no other user can write, because what is in it may be executed."""
    place = tempfile.gettempdir()
    folder = Path(place) / f"hsd_jax-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="hsd_jax-", dir=place))  # another user made the first one, or can write it
