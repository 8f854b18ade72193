"""The keys of a recipe as help text: name, type, default and what stands below the field in the code."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from typing import Any

WIDTH = 110


def recipe_help(kind: type, leave_out: tuple[str, ...] = ()) -> str:
    """All keys of a recipe dataclass, one section after the other, as `section.key (type, default): what it is`."""
    lines = ["recipe keys, in the YAML file or by --set (section `paths` holds what the arguments of that name give):"]
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
    """The string that stands below each field."""
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
    notes = {}
    for field, below in itertools.pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            notes[field.target.id] = " ".join(str(below.value.value).split())
    return notes
