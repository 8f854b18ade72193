"""The ownership of a run's folder: it belongs to one process at a time, and to one recipe, stored in `recipe.json`.

A folder without checkpoints holds nothing that another recipe could damage, so any recipe may use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import hsd_jax
from hsd_jax.host import lock
from hsd_jax.host.files import is_writer, read_json, sha256, write_json

RECIPE, VERSIONS = "recipe.json", "versions"


@contextlib.contextmanager
def alone(lock_file: Path) -> Iterator[None]:
    """Holds a lock file. If a run has several processes, the one that writes holds it. Raises as `lock.held`."""
    with lock.held(lock_file) if is_writer() else contextlib.nullcontext():
        yield


def check_new(out: str | Path) -> None:
    """Raises a ValueError if there is something at this path."""
    if Path(out).exists():
        raise ValueError(f"{out}: exists already; choose another folder")


def has_checkpoints(out: Path) -> bool:
    """Whether a run in this folder has written its first checkpoint."""
    return any((out / "checkpoints").glob("[0-9]*"))


def check(out: Path, force: bool, recipe: Any, **about: Any) -> dict[str, Any]:
    """Refuses to continue the run in a folder with another recipe, unless `force` is True. Writes nothing.

    Returns:
      The values for `write`: `about` and the recipe.
    Raises:
      FileNotFoundError: if the folder has checkpoints but no recipe.
      ValueError: naming the first key that differs, or if the stored recipe cannot be read.
    """
    values = json.loads(json.dumps({**about, **dataclasses.asdict(recipe)}))
    if not force and has_checkpoints(out):
        there, here = flattened(read_json(out / RECIPE)), flattened(values)
        for key in here | there:
            old, new = there.get(key, "missing"), here.get(key, "missing")
            if old != new and not key.startswith(f"{VERSIONS}."):
                raise ValueError(f"{out} holds another run (--force): {key} is {old!r} there and {new!r} here")
    return values


def write(out: Path, values: dict[str, Any]) -> None:
    """Stores a recipe in the folder, which makes the folder its own, with the versions that the run began with."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RECIPE, values | {VERSIONS: {"hsd_jax": hsd_jax.__version__, "jax": jax.__version__}})


def fingerprints(files: Sequence[str | Path]) -> list[str]:
    """Name and hash of each file. So a folder may be moved, but its data may not change."""
    return [f"{Path(f).name} {sha256(Path(f).read_bytes())[:16]}" for f in files]


def flattened(value: Any, name: str = "") -> dict[str, Any]:
    """The values of nested dicts and lists by their dotted paths."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {name: value}
    return {k: v for key, part in items for k, v in flattened(part, f"{name}.{key}" if name else str(key)).items()}
