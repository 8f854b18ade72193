"""Claims of folders: what was begun with some settings is continued only with the same.

A folder of checkpoints keeps its settings in `recipe.json`. One without checkpoints holds nothing that another recipe
could damage, so any recipe may use it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hsd_jax
from hsd_jax.host.files import read_json, sha256, write_json

RECIPE, VERSIONS = "recipe.json", "versions"


def newest_checkpoint(out: Path) -> int | None:
    """The step of the newest complete checkpoint of a run. One that is being written has a longer name."""
    names = (path.name for path in (out / "checkpoints").glob("[0-9]*"))
    return max((int(name) for name in names if name.isdigit()), default=None)


def has_checkpoints(out: Path) -> bool:
    """Whether a run in this folder has written its first checkpoint."""
    return newest_checkpoint(out) is not None


def check(out: Path, force: bool, recipe: Any, **about: Any) -> dict[str, Any]:
    """Refuses to continue the run in a folder with another recipe, unless `force`. Returns the values for `write`."""
    values = json.loads(json.dumps({**about, **dataclasses.asdict(recipe)}))
    if not force and has_checkpoints(out):
        check_claim(out / RECIPE, values, f"{out} holds another run (--force)", is_recipe=True)
    return values


def check_claim(
    path: Path, here: dict[str, Any], what: str, is_recipe: bool = False, usual: dict[str, Any] | None = None
) -> None:
    """Raises a ValueError that begins with `what` and names the first value of `here` that differs in the file `path`.

    `here` may be some of the settings there; in a recipe all must be the same. What an earlier version had no name for
    has the value of `usual` there.
    """
    parts, here = here.keys(), flattened(json.loads(json.dumps(here)))
    there = read_json(path)
    if isinstance(there, dict):  # a dict there takes the place of a usual None
        there = json.loads(json.dumps(usual or {})) | there
    there = flattened(there)
    others = [x for x in there if (is_recipe and not x.startswith(VERSIONS)) or x.partition(".")[0] in parts]
    for name in (*here, *others):
        old, new = (values.get(name, "missing") for values in (there, here))
        if old != new:
            raise ValueError(f"{what}: {name} is {old!r} there and {new!r} here")


def write(out: Path, values: dict[str, Any]) -> None:
    """Stores a recipe in the folder, which makes the folder its own, with the versions that the run began with."""
    write_json(out / RECIPE, values | {VERSIONS: {"hsd_jax": hsd_jax.__version__, "jax": version("jax")}})


def fingerprints(files: Sequence[str | Path]) -> list[str]:
    """Name and hash of each file. So a folder may be moved, but its data may not change."""
    return [f"{Path(f).name} {sha256(Path(f).read_bytes())[:16]}" for f in files]


def flattened(value: Any, name: str = "") -> dict[str, Any]:
    """The values of nested dicts by their dotted paths."""
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, part in value.items() for k, v in flattened(part, f"{name}.{key}" if name else key).items()}
