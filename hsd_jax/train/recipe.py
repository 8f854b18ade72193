"""Reads a recipe as the user gives it, the YAML file and the changes of --set, and writes its keys as help text.

The keys themselves are fields of the records of each section: `drafter.py`, `distill.py`, `pretrain.py`, `data.py`,
`features.py`, `loop.py`, `own_text.py`, and `HeldOut` here.
"""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field
from pydantic_core import PydanticUndefined

from hsd_jax import validation
from hsd_jax.host.files import parse_yaml, read_yaml
from hsd_jax.validation import HOTTEST, AtLeastTwo, Count, Whole

WIDTH = 110


class Recipe:
    """Base class of the recipes. Each recipe is a frozen dataclass of sections, as in `configs/`."""

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None, where: str) -> Self:
        """Builds a recipe from the values of a YAML file; None is an empty file."""
        return validation.read(cls, {} if values is None else values, where)


@validation.dataclass
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


def refuse_settings(model: Any, names: set[str]) -> None:
    """Raises a ValueError if the section `model` has one of the settings `names`, which its kind does not have."""
    for field in dataclasses.fields(model):
        if field.name in names and (value := getattr(model, field.name)) != field.default:
            raise ValueError(f"model.{field.name}={value!r}: kind {model.kind!r} has no such setting")


def recipe_help(kind: type, leave_out: tuple[str, ...] = (), name: str = "") -> str:
    """All keys of a recipe dataclass, section by section, as `section.key (type, default): description`."""
    lines = [f"recipe keys of {name or kind.__name__}, in the YAML file or by --set:"]
    how = {"initial_indent": "  ", "subsequent_indent": "      ", "break_long_words": False}
    for section, part in validation.parts_of(kind).items():
        keys = validation.parts_of(part.hint) if dataclasses.is_dataclass(part.hint) else {"": part}
        for key, field in keys.items():
            if (full := f"{section}.{key}".rstrip(".")) not in leave_out:
                default = "required" if field.default is PydanticUndefined else field.default
                default = list(default) if isinstance(default, tuple) else default
                shown = _type_name(field.hint) + ("" if dataclasses.is_dataclass(default) else f", {default}")
                text = f"{full} ({shown.replace('None', 'null')}): {field.description}".removesuffix(": ")
                lines += textwrap.wrap(text, WIDTH, **how)
    return "\n".join(lines)


def _type_name(hint: Any) -> str:
    kind, *others = validation.kinds_of(hint)
    if others:
        return " or ".join(map(_type_name, (kind, *others)))
    if typing.get_origin(kind) is tuple:
        return f"list of {_type_name(typing.get_args(kind)[0])}"
    names = {int: "integer", float: "number", bool: "boolean"}
    return "section" if dataclasses.is_dataclass(kind) else names.get(kind, "string")


def read_recipe(path: str | None, changes: Sequence[str]) -> dict[str, Any]:
    """The values of a YAML file with the changes of --set. The recipe's class checks the keys later."""
    values: Any = {} if path is None else read_yaml(path) or {}
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
