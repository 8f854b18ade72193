"""The ownership of a run's folder: it belongs to one process at a time, and to one recipe, stored in `recipe.json`.

A folder without checkpoints holds nothing that another recipe could damage, so any recipe may use it. Read next:
`run.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hsd_jax.host import lock
from hsd_jax.host.files import is_writer, read_json, sha256, write_json

RECIPE = "recipe.json"


def alone(
    lock_of: Callable[[str | Path], Path], is_new: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a decorator: the function holds the lock `lock_of(out)` while it runs. `out` is one of its arguments.

    If a run has several processes, the first one holds the lock. The function also raises the ValueError of `lock.held`
    and, with `is_new`, a ValueError if `out` exists.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            out = signature.bind(*args, **kwargs).arguments["out"]
            with lock.held(lock_of(out)) if is_writer() else contextlib.nullcontext():
                if is_new and Path(out).exists():
                    raise ValueError(f"{out}: exists already; choose another folder")
                return function(*args, **kwargs)

        return locked

    return wrap


def has_checkpoints(out: Path) -> bool:
    """Whether a run in this folder has written its first checkpoint."""
    return any((out / "checkpoints").glob("[0-9]*"))


def claimed(out: Path) -> dict[str, Any]:
    """The values that `write` stored in the folder of a run; an empty dict if there are none that can be read."""
    try:
        return dict(read_json(out / RECIPE))
    except (OSError, ValueError, TypeError):
        return {}


def check(out: Path, force: bool, recipe: Any, **about: Any) -> dict[str, Any]:
    """Refuses to continue the run in a folder with another recipe, unless `force` is True. Writes nothing.

    Returns:
      The values for `write`: `about` and the recipe.
    Raises:
      ValueError: naming the first key that differs, or if the folder has checkpoints but no recipe.
    """
    values = json.loads(json.dumps({**about, **dataclasses.asdict(recipe)}))
    path = out / RECIPE
    if force or not has_checkpoints(out):
        return values
    if not path.is_file():
        raise ValueError(f"{out} holds checkpoints without a {RECIPE}; choose another folder, or --force")
    try:
        there = flattened(read_json(path))
    except ValueError as error:
        raise ValueError(f"{error}; choose another folder") from error
    here = flattened(values)
    for key in here | there:
        old = there.get(key, _default(recipe, key))
        if key not in here or here[key] != old:
            raise ValueError(
                f"{out} holds a run with another recipe: {key} is {old!r} there and"
                f" {here.get(key, 'missing')!r} here; choose another folder, the same recipe to"
                " continue, or --force to continue with this one"
            )
    return values


def write(out: Path, values: dict[str, Any]) -> None:
    """Stores a recipe in the folder, which makes the folder its own."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RECIPE, values)


def note(values: dict[str, Any], rows: str) -> dict[str, Any]:
    """The note of every checkpoint about its run. `rows` is the fingerprint of the data."""
    return {"recipe": values, "revision": _revision(), "rows": rows}


def fingerprints(files: Sequence[str | Path]) -> list[str]:
    """Name and hash of each file. So a folder may be moved, but its data may not change."""
    return [f"{Path(f).name} {sha256(Path(f).read_bytes())[:16]}" for f in files]


def _revision() -> str:
    """The git revision of this package, `-dirty` if its files differ; "unknown" outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        run = lambda *args: subprocess.run(  # noqa: E731
            ["git", *args], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        return run("rev-parse", "HEAD") + ("-dirty" if run("status", "--porcelain", "--", str(here.parent)) else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def flattened(value: Any, name: str = "") -> dict[str, Any]:
    """The values of nested dicts and lists by their dotted paths."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {name: value}
    return {k: v for key, part in items for k, v in flattened(part, f"{name}.{key}" if name else str(key)).items()}


def _default(recipe: Any, key: str) -> Any:
    """The default of `section.key`, which holds for a recipe stored before the key existed; "missing" if there is
    none."""
    section, _, name = key.partition(".")
    config = getattr(recipe, section, None)
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return {field.name: field.default for field in fields}.get(name, "missing")
