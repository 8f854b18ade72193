"""Types and ranges of settings from files, recipes, calls and the command line. pydantic checks them in strict mode.

The annotation of a field gives its allowed values: `steps: Count = 1000`, `trunk: Annotated[str, OneOf(TRUNKS)]`. A
class of settings is a `dataclass` of this module, and its fields are checked when an instance is made. `read` makes one
from the contents of a file. `take` checks an argument that is not a field. `__post_init__` checks only conditions on
two or more fields. This module defines no particular setting and does not import jax.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator, core_schema

MOST = 2**31 - 1
"""The largest integer setting: the largest int32."""
LARGEST = 3.4e38
"""The largest number of a setting: about the largest finite float32."""
HOTTEST = 1e30
"""The highest temperature. From 1e38 on, logits divided by the temperature are too small for float32, and top-k would
keep every token."""
_CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
Kind = TypeVar("Kind", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Allows only the given strings, usually the keys of a table of the library."""

    names: tuple[str, ...] | Callable[[], tuple[str, ...]]

    @classmethod
    def of(cls, module: str, names: Callable[[Any], tuple[str, ...]]) -> OneOf:
        """Names from a table of a module of the library, which is imported when it is needed, perhaps with jax."""
        return cls(lambda: names(importlib.import_module(f"hsd_jax.{module}")))

    @property
    def allowed(self) -> tuple[str, ...]:
        return self.names() if callable(self.names) else self.names

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        if not callable(self.names):
            return core_schema.literal_schema(list(self.names))
        schemas = functools.cache(lambda: SchemaValidator(core_schema.literal_schema(list(self.allowed))))
        return core_schema.no_info_plain_validator_function(lambda value: schemas().validate_python(value))


@dataclasses.dataclass(frozen=True)
class Default:
    """The default of a key of a TypedDict, which has no other place for it."""

    value: Any


Value = TypeVar("Value")
PerRow = Value | Sequence[Value]
"""One value, or one value per row. `row_hint` gives the annotation of the value."""


Count = Annotated[int, Field(ge=1, le=MOST)]
AtLeastTwo = Annotated[int, Field(ge=2, le=MOST)]
Whole = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
ProperShare = Annotated[float, Field(gt=0, lt=1)]
TopK = Annotated[int, Field(ge=-1)]
TopP = PositiveShare
Temperature = Annotated[float, Field(ge=0, le=HOTTEST)]
Flag = Annotated[bool, BeforeValidator(lambda value: bool(value) if isinstance(value, np.bool_) else value)]
"""A bool, numpy's included."""


def is_off(variable: str) -> bool:
    """Whether this value of an environment variable means "off"."""
    return variable.lower() in ("off", "0", "no")


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def dataclass(kind: Kind) -> Kind:
    """Makes a frozen dataclass whose fields are checked when an instance is made.

    A wrong value raises a ValueError that names the class, the field, the value and the allowed values.
    """
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=_CONFIG)(kind)
    plain, signature = made.__init__, inspect.signature(made)

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        named = signature.bind(*args, **values).arguments if args else values  # pydantic names a field by its position
        try:
            plain(self, **named)
        except ValidationError as error:
            raise ValueError(_text(error, made, made.__name__)) from None

    made.__init__ = __init__
    return made


class Part(NamedTuple):
    """A field of a `dataclass`, or a key of a TypedDict of settings."""

    hint: Any
    default: Any
    """pydantic's undefined if it must be given."""
    description: str


@functools.cache
def parts_of(kind: Any) -> dict[str, Part]:
    """The fields of a `dataclass`, or the keys of a TypedDict with a `Default`, and the docstrings below them.

    pydantic reads such docstrings too, but at every import, and not those of inherited fields or of a TypedDict.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = getattr(kind, "__pydantic_fields__", {})
    texts = {key: one.description for key, one in fields.items() if one.description}  # a `record` has no source
    for each in reversed(kind.__mro__):
        for pair in itertools.pairwise(_classes(each.__module__).get(each.__name__, ())):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[key] = text
    if fields:
        found = {key: one.default for key, one in fields.items()}
    else:
        found = {key: one.value for key in hints for one in hints[key].__metadata__ if isinstance(one, Default)}
    return {key: Part(hints[key], default, " ".join(texts.get(key, "").split())) for key, default in found.items()}


@functools.cache
def _classes(module: str) -> dict[str, list[Any]]:
    """The bodies of the classes of a module, as syntax trees."""
    body = [] if module == "builtins" else ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node.body for node in body if isinstance(node, ast.ClassDef)}


def row_hint(hint: Any) -> Any:
    """The annotation of one row's value if a `PerRow` is annotated, else None."""
    parts = typing.get_args(typing.get_args(hint)[0]) if typing.get_origin(hint) is Annotated else ()
    own = tuple(part for part in parts if typing.get_origin(part) is not Sequence)
    return typing.Union[own] if len(own) < len(parts) else None  # noqa: UP007


def kinds_of(hint: Any, *notes: Any) -> dict[Any, tuple[Any, ...]]:
    """The members of an annotation but None, each with what `Annotated` says of it."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        return kinds_of(inner[0], *notes, *inner[1:])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {kind: own for part in inner for kind, own in kinds_of(part, *notes).items()}
    return {} if hint is types.NoneType else {hint: notes}


def record(name: str, *kinds: Any, names: Sequence[str] = (), is_of_row: bool = False) -> Any:
    """Makes the `dataclass` of TypedDicts of settings, or of those `names`.

    A value per row is checked with its row, or here if the record `is_of_row` and has a single value of each.
    """
    parts = {key: part for kind in kinds for key, part in parts_of(kind).items() if not names or key in names}
    body = {key: pydantic.Field(default=part.default, description=part.description) for key, part in parts.items()}
    of_rows = {key: hint for key, part in parts.items() if (hint := row_hint(part.hint))}
    hints = {key: part.hint for key, part in parts.items()} | (of_rows if is_of_row else dict.fromkeys(of_rows, Any))
    body |= {"__annotations__": hints, "__module__": kinds[0].__module__, "__doc__": kinds[-1].__doc__}
    return dataclass(type(name, (), body))


def takes(*kinds: Any) -> Callable[[Function], Function]:
    """Writes the keys of settings into the signature and the docstring of a function that takes them as keywords."""

    def explain(function: Function) -> Function:
        signature = inspect.signature(function)
        known = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        lines = [f"{function.__doc__}\n    Settings, as keywords:"]
        for name, part in {name: part for kind in kinds for name, part in parts_of(kind).items()}.items():
            known.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=part.default))
            lines.append(f"      {name}: {part.description}")
        function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
        function.__doc__ = "\n".join(lines)
        return function

    return explain


def read(kind: type, values: Any, where: str, section: str = "") -> Any:
    """Makes a `dataclass` from the contents of a file. Nested objects become the dataclasses of its fields.

    Args:
      values: an object of JSON or YAML. Lists become tuples.
      where: the file or recipe, for error messages.
      section: the place in that file, for error messages.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(values, default=str))  # YAML reads some texts as dates
    except ValidationError as error:
        raise ValueError(f"{where}: {_text(error, kind, section)}") from None
    except (TypeError, ValueError, RecursionError) as error:  # a wrong key, a circle, deep nesting
        raise ValueError(f"{where}: cannot be written as JSON ({error})") from error


def take(hint: Any, value: Any, name: str, **limits: Any) -> Any:
    """Checks an argument of a call against an annotation and returns it.

    Args:
      limits: bounds of a number: `ge`, `gt`, `le` and `lt`, as in pydantic's `Field`.
    """
    try:
        return _adapter(hint, **limits).validate_python(value)
    except ValidationError as error:
        raise ValueError(_text(error, hint, name)) from None


def parse(hint: Any, text: str, name: str = "") -> Any:
    """Converts a string, for example from the command line, to the annotated type. Raises errors as `take` does."""
    try:
        return _adapter(hint).validate_strings(text)
    except ValidationError as error:
        raise ValueError(_text(error, hint, name)) from None


def shown(value: Any) -> str:
    """Any value as an error message shows it, shortened to about 80 characters."""
    try:
        text = " ".join(repr(list(value) if isinstance(value, tuple) else value).split())
    except (ValueError, RecursionError):  # a number with thousands of digits, or very deep nesting
        return f"({type(value).__name__})"
    return text if len(text) <= 80 else f"{text[:80]}..."


@functools.lru_cache(maxsize=256)
def _adapter(hint: Any, **limits: Any) -> TypeAdapter[Any]:
    limited: Any = Annotated[hint, Field(**limits)]
    return TypeAdapter(limited if limits else hint, config=None if dataclasses.is_dataclass(hint) else _CONFIG)


def _text(error: ValidationError, hint: Any, place: str) -> str:
    """One line about the first error, in pydantic's words. An unknown key comes before all other errors.

    Args:
      hint: the annotation or the dataclass that the value was checked against.
      place: the place of its keys, for the message.
    """
    found: list[Any] = error.errors(include_url=False)  # type: ignore[assignment]
    wrong = min(found, key=lambda one: one["type"] != "unexpected_keyword_argument")
    if wrong["type"] == "value_error":  # raised by a `__post_init__`, whose message names the place
        return str(wrong["ctx"]["error"])
    keys, value = _keys(wrong["loc"]), wrong["input"]
    if wrong["type"] in ("unexpected_keyword_argument", "missing"):
        key, above = str(wrong["loc"][-1]), _keys(wrong["loc"][:-1])
        what = f"missing key {key!r}"
        if wrong["type"] != "missing":
            what = f"unknown key {key!r}; valid keys are {', '.join(sorted(_fields(hint, above)))}"
        return ": ".join(filter(None, [".".join(filter(None, [place, *above])), what]))
    at = ".".join(filter(None, [place, *keys]))
    allowed = dict.fromkeys(one["msg"].removeprefix("Input ") for one in found if _keys(one["loc"]) == keys)
    is_number = wrong["type"] == "float_type" and isinstance(value, str) and re.fullmatch(r"[+-]?\d+e[+-]?\d+", value)
    note = " (YAML reads 2e-3 as text: write 2.0e-3)" if is_number else ""
    return f"{at}{'=' if at else ''}{shown(value)}: {' or '.join(allowed)}{note}"


def _keys(place: tuple[int | str, ...]) -> list[str]:
    """The place of a pydantic error, without pydantic's names for the members of a union."""
    keys = [str(key) for key in place if re.fullmatch(r"[a-z_]\w*|\d+", str(key))]
    return [key for key in keys if key not in ("bool", "int", "float", "str", "callable")]


def _fields(hint: Any, keys: list[str]) -> dict[str, Any]:
    """The fields of the dataclass at a place in a hint. Those of a container also stand for its items."""
    for part in (hint, *typing.get_args(hint)):
        if fields := getattr(part, "__pydantic_fields__", {}) or (part is not hint and _fields(part, [])):
            inner = getattr(fields.get(keys[0]), "annotation", hint) if keys else None
            return _fields(inner, keys[1:]) if keys else fields
    return {}
