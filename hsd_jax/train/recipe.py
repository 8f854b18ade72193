"""Reads a recipe as the user gives it: the YAML file, the changes of --set and the section `paths`.

It also writes the keys of a recipe as help text. The keys themselves are fields of the records of each section:
`drafter.py`, `distill.py`, `target.py`, `data.py`, `features.py`, `loop.py`, `own_text.py`, and `HeldOut` here. Read
next: `run.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from hsd_jax import settings
from hsd_jax.host.files import parse_yaml, read_yaml
from hsd_jax.settings import HOTTEST, AtLeastTwo, Count, Whole

WIDTH = 110


class Recipe:
    """Base class of the recipes. Each recipe is a frozen dataclass of sections, as in `configs/`."""

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None, where: str) -> Self:
        """Builds a recipe from the values of a YAML file; None is an empty file.

        Raises:
          ValueError: naming the wrong key or value and the allowed ones.
        """
        return settings.read(cls, {} if values is None else values, where)


_ARGUMENTS = {"target": "source", "data": "data_files", "tokenizer": "source", "start": "start_dir"}


@settings.dataclass
class HeldOut:
    """Section `eval` of a recipe: how a drafter is evaluated during its training."""

    every: Whole = 100
    """Steps between evaluations; 0: never."""
    prompts: Count = 16
    """The number of held-out rows. They are the last rows of the data. Their beginnings are the prompts."""
    prompt_tokens: AtLeastTwo = 48
    max_new_tokens: AtLeastTwo = 96
    temperature: Annotated[float, Field(gt=0, le=HOTTEST)] = 1.0
    """Temperature of the sampled texts; greedy texts are evaluated, too. In distillation it is also the temperature of
    both distributions in the divergences."""


def recipe_help(kind: type, leave_out: tuple[str, ...] = (), name: str = "") -> str:
    """All keys of a recipe dataclass, section by section, as `section.key (type, default): description`."""
    of = f" of {name}" if name else ""
    where = "in the YAML file or by --set (section `paths` may hold --target, --data, --out, ...)"
    lines = [f"recipe keys{of}, {where}:"]
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            lines += _section(typing.cast(type, hints[field.name]), field.name, leave_out)
        else:
            lines += _key(field.name, hints[field.name], field.default, "")
    return "\n".join(lines)


def _section(kind: type, section: str, leave_out: tuple[str, ...]) -> list[str]:
    hints, notes, lines = typing.get_type_hints(kind), _notes(kind), []
    for field in dataclasses.fields(kind):
        name = f"{section}.{field.name}"
        if name not in leave_out:
            lines += _key(name, hints[field.name], field.default, notes.get(field.name, ""))
    return lines


def _key(name: str, hint: Any, default: Any, note: str) -> list[str]:
    parts = [_type_name(hint)]
    if default is dataclasses.MISSING:
        parts.append("required")
    elif not dataclasses.is_dataclass(default):
        parts.append("null" if default is None else str(list(default) if isinstance(default, tuple) else default))
    text = f"{name} ({', '.join(parts)})" + (f": {note}" if note else "")
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False)


def _type_name(hint: Any) -> str:
    arguments = [a for a in typing.get_args(hint) if a is not type(None) and a is not Ellipsis]
    if typing.get_origin(hint) is tuple:
        return f"list of {_type_name(arguments[0])}"
    if arguments:
        return " or ".join(_type_name(a) for a in arguments)
    return "section" if dataclasses.is_dataclass(hint) else getattr(hint, "__name__", str(hint))


def _notes(kind: type) -> dict[str, str]:
    """The string below each field."""
    notes = {name: note for base in kind.__bases__ if base is not object for name, note in _notes(base).items()}
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
    for field, below in itertools.pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            notes[field.target.id] = " ".join(str(below.value.value).split())
    return notes


def take_paths(values: dict[str, Any], args: Any, *required: str, optional: Sequence[str] = ()) -> dict[str, Any]:
    """Removes the section `paths` from a recipe's values and returns the paths. The command line overrides the section.

    Paths are not part of a stored recipe. A run may move to another folder, and its manifest identifies files and
    target by content.

    Returns:
      The arguments `source`, `data_files`, `out` and `start_dir` of `train`.
    Raises:
      ValueError: naming an unknown key, or a missing path and how to give it.
    """
    section = values.pop("paths", None) or {}
    allowed = (*required, *optional)
    if not isinstance(section, dict) or not set(section) <= set(allowed):
        raise ValueError(f"paths: {section!r}: allowed are the keys {', '.join(allowed)}")
    found = {}
    for name in allowed:
        value = section.get(name) if getattr(args, name) is None else getattr(args, name)
        is_path = isinstance(value, str) or (
            name == "data" and isinstance(value, list) and all(isinstance(v, str) for v in value)
        )
        if value is None and name in optional:
            continue
        if not (is_path and value):
            wanted = "missing" if value is None else f"{value!r} is no path"
            raise ValueError(f"paths.{name}: {wanted}; give --{name}, or paths: {{{name}: ...}} in the recipe")
        found[_ARGUMENTS.get(name, name)] = [value] if name == "data" and isinstance(value, str) else value
    return found


def read_recipe(path: str | None, changes: Sequence[str]) -> dict[str, Any]:
    """The values of a YAML file with the changes of --set. The recipe's class checks the keys later.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is no YAML mapping, or a change is not KEY=VALUE.
    """
    values: Any = {}
    if path is not None:
        if not Path(path).exists():
            raise FileNotFoundError(f"{path}: no such recipe")
        values = read_yaml(path)
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected sections with keys and values")
    for change in changes:
        key, equals, text = change.partition("=")
        if not (equals and key):
            raise ValueError(f"--set {change!r}: expected KEY=VALUE, for example train.steps=100")
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"--set {change!r}: {section!r} is a value, not a section")
        place[last] = parse_yaml(text, f"--set {change!r}: {text!r}")
    return values
