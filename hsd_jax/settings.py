"""Types and ranges of settings, checked by pydantic in strict mode: for files, recipes, calls and the command line.

A field says what it takes by its annotation: `steps: Count = 1000`, `trunk: Annotated[str, OneOf(TRUNKS)]`. A class of
settings is a `dataclass` of this module: one that is made is right. `read` makes it of what a file holds, `take` checks
an argument that is no field. Only what relates two fields is written out, in `__post_init__`. Knows no setting and
imports no jax. Read next: `config.py`, whose fields are declared so.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import typing
from typing import Annotated, Any, TypeVar

import pydantic.dataclasses
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import core_schema

MOST = 2**31 - 1
"""The largest whole number of a setting: what an int32 holds."""
LARGEST = 3.4e38
"""The largest number of a setting: what is finite in float32."""
HOTTEST = 1e30
"""From 1e38 on, logits over the temperature are too small for float32, and top-k would keep every token."""
_CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
Kind = TypeVar("Kind", bound=type)
_NUMBER = re.compile(r"[+-]?\d+e[+-]?\d+")


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A few texts, as a table of the library has them."""

    allowed: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.literal_schema(list(self.allowed))


Count = Annotated[int, Field(ge=1, le=MOST)]
Whole = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=1)]
TopP = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=HOTTEST)]


def is_off(variable: str) -> bool:
    """Whether this value of an environment variable switches something off."""
    return variable.lower() in ("off", "0", "no")


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def dataclass(kind: Kind) -> Kind:
    """Decorates a frozen dataclass whose fields are checked when it is made: a wrong one is a ValueError that names the
    class, the field, the value and the allowed ones."""
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=_CONFIG)(kind)
    plain, signature = made.__init__, inspect.signature(made)

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        named = signature.bind(*args, **values).arguments  # pydantic would call what has no name by its number
        try:
            plain(self, **named)
        except ValidationError as error:
            raise ValueError(_text(error, made, made.__name__)) from None

    made.__init__ = __init__
    return made


def read(kind: type, values: Any, where: str, section: str = "") -> Any:
    """Makes a `dataclass` of what a file holds; dataclasses among its fields are made of the objects below.

    Args:
      values: an object of JSON or YAML; lists become tuples.
      where: the file or recipe, for errors.
      section: the place in it.
    Raises:
      ValueError: naming the place and the unknown or missing key with the valid ones, the value that its field's
        annotation does not allow with those that it does, or what the dataclass itself refuses.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(values, default=str))  # YAML makes dates of some texts
    except ValidationError as error:
        raise ValueError(f"{where}: {_text(error, kind, section)}") from None
    except (TypeError, RecursionError) as error:  # a key that is no text, lists in lists in lists
        raise ValueError(f"{where}: holds what is no JSON ({error})") from error


def take(hint: Any, value: Any, name: str, **limits: Any) -> Any:
    """An argument of a call, if it is what an annotation declares.

    Args:
      limits: of a number: `ge`, `gt`, `le` and `lt`, as of pydantic's `Field`.
    Raises:
      ValueError: naming the argument, its value and the allowed ones.
    """
    try:
        return _adapter(hint, **limits).validate_python(value)
    except ValidationError as error:
        raise ValueError(_text(error, None, name)) from None


def parse(hint: Any, text: str, name: str = "") -> Any:
    """The value of a text, of the command line for example; raises as `take`."""
    try:
        return _adapter(hint).validate_strings(text)
    except ValidationError as error:
        raise ValueError(_text(error, None, name)) from None


def shown(value: Any) -> str:
    """A value as an error names it, not too long; whatever it is."""
    try:
        text = " ".join(repr(list(value) if isinstance(value, tuple) else value).split())
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists in lists
        return f"({type(value).__name__})"
    return text if len(text) <= 80 else f"{text[:80]}..."


@functools.lru_cache(maxsize=256)
def _adapter(hint: Any, **limits: Any) -> TypeAdapter[Any]:
    limited: Any = Annotated[hint, Field(**limits)]
    return TypeAdapter(limited if limits else hint, config=None if dataclasses.is_dataclass(hint) else _CONFIG)


def _text(error: ValidationError, kind: Any, place: str) -> str:
    """What is wrong first, in a line; an unknown key goes before all others.

    Args:
      kind: the dataclass that was to be made, if one was.
      place: where its keys are.
    """
    found: list[Any] = error.errors(include_url=False)  # type: ignore[assignment]
    wrong = min(found, key=lambda one: one["type"] != "unexpected_keyword_argument")
    if wrong["type"] == "value_error":  # of a `__post_init__`, which names the place itself
        return str(wrong["ctx"]["error"])
    keys = _keys(wrong)
    if wrong["type"] in ("unexpected_keyword_argument", "missing"):
        *above, key = keys
        what = f"missing key {key!r}"
        if wrong["type"] != "missing":
            what = f"unknown key {key!r}; valid keys are {', '.join(sorted(_fields(kind, above)))}"
        return ": ".join(filter(None, [".".join(filter(None, [place, *above])), what]))
    at, value = ".".join(filter(None, [place, *keys])), wrong["input"]
    allowed = dict.fromkeys(one["msg"].removeprefix("Input ") for one in found if _keys(one) == keys)
    is_number = wrong["type"] in ("int_type", "float_type") and isinstance(value, str) and _NUMBER.fullmatch(value)
    note = " (YAML reads 2e-3 as text: write 2.0e-3)" if is_number else ""
    return f"{at}{'=' if at else ''}{shown(value)}: {' or '.join(allowed)}{note}"


def _keys(wrong: Any) -> list[str]:
    """The place of an error of pydantic, without the names that it gives to the parts of a union."""
    return [str(key) for key in wrong["loc"] if re.fullmatch(r"\w+", str(key))]


def _fields(kind: Any, keys: list[str]) -> dict[str, Any]:
    """The fields of the dataclass at a place below another one."""
    for key in keys:
        if key in kind.__pydantic_fields__:
            kind = _dataclass_in(kind.__pydantic_fields__[key].annotation)
    return kind.__pydantic_fields__


def _dataclass_in(hint: Any) -> Any:
    found = (_dataclass_in(part) for part in typing.get_args(hint))
    return hint if dataclasses.is_dataclass(hint) else next(filter(None, found), None)
