"""Reads a recipe as the user gives it, the YAML file and the changes of --set, and writes its keys as help text.

The keys themselves are fields of the records of each section: `drafter.py`, `distill.py`, `pretrain.py`, `data.py`,
`features.py`, `loop.py`, `own_text.py`, and `HeldOut` here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter

from hsd_jax import settings
from hsd_jax.host.files import parse_yaml, read_yaml
from hsd_jax.settings import HOTTEST, AtLeastTwo, Count, Whole

WIDTH = 110


class Recipe:
    """Base class of the recipes. Each recipe is a frozen dataclass of sections, as in `configs/`."""

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None, where: str) -> Self:
        """Builds a recipe from the values of a YAML file; None is an empty file."""
        return settings.read(cls, {} if values is None else values, where)


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
    lines = [f"recipe keys of {name or kind.__name__}, in the YAML file or by --set:"]
    schema = TypeAdapter(kind).json_schema()
    for section, part in schema["properties"].items():
        keys = schema["$defs"][part["$ref"].rpartition("/")[2]]["properties"] if "$ref" in part else {"": part}
        for key, field in keys.items():
            if (full := f"{section}.{key}".rstrip(".")) not in leave_out:
                lines += _key(full, field)
    return "\n".join(lines)


def _key(name: str, field: dict[str, Any]) -> list[str]:
    default = "required" if "default" not in field and "$ref" not in field else field.get("default", "")
    shown = [_type_name(field)] + ([] if default == "" or isinstance(default, dict) else [str(default)])
    note = " ".join(field.get("description", "").split())
    text = f"{name} ({', '.join(shown).replace('None', 'null')})" + (f": {note}" if note else "")
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False)


def _type_name(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type_name(part) for part in field["anyOf"] if part.get("type") != "null")
    if field.get("type") == "array":
        return f"list of {_type_name(field['items'])}"
    return field.get("type", "section")


def read_recipe(path: str | None, changes: Sequence[str]) -> dict[str, Any]:
    """The values of a YAML file with the changes of --set. The recipe's class checks the keys later."""
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
