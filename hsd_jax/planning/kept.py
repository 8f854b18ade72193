"""Records that are kept for this user: the measured rates of processors, and the choices of `tune`."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from hsd_jax import settings
from hsd_jax.host.files import read_json, write_json


def keep(path: Path, record: Any) -> None:
    """Writes a `settings.dataclass`. Raises an OSError if the folder is not writable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(record))


def read_kept(kind: type, path: Path, remedy: str) -> Any:
    """The record in a file. None if there is none, or, with a warning that ends in `remedy`, if it is damaged."""
    try:
        return settings.read(kind, read_json(path), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        warnings.warn(f"{error}; {remedy}", stacklevel=2)
        return None
