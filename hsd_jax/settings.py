"""Types and ranges of settings: declared beside the fields of a dataclass, checked here, for files, recipes and calls.

A field says what it takes by its annotation: `steps: Count = 1000`, `trunk: Annotated[str, OneOf(TRUNKS)]`. `read`
makes a dataclass of what a file holds, `check` looks through one that a caller made. Knows no setting and imports no
jax. Read next: `config.py`, whose fields are declared so.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

MOST = 2**31 - 1
"""The largest whole number of a setting: what an int32 holds."""
_NUMBER = re.compile(r"[+-]?\d+e[+-]?\d+")
LARGEST = 3.4e38
"""The largest number of a setting: what is finite in float32."""


@dataclasses.dataclass(frozen=True)
class Within:
    """Numbers from `least` to `most`; `above` and `below` leave out the two themselves."""

    least: float = -LARGEST
    most: float = LARGEST
    above: bool = False
    below: bool = False

    def allows(self, value: Any) -> bool:
        """False for NaN too."""
        is_above = value > self.least if self.above else value >= self.least
        return is_above and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        parts = []
        if self.least > -LARGEST:
            parts.append(f"above {self.least:g}" if self.above else f"from {self.least:g}")
        if self.most < LARGEST:
            parts.append(f"{'and below' if self.below else 'to'} {self.most:.10g}")
        return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A few values."""

    allowed: tuple[str, ...]

    def allows(self, value: Any) -> bool:
        """Of texts only, so `in` compares what can be compared."""
        return value in self.allowed

    def __str__(self) -> str:
        return ", ".join(self.allowed)


Count = Annotated[int, Within(1, MOST)]
Whole = Annotated[int, Within(0, MOST)]
Seed = Annotated[int, Within(0, 2**32 - 1)]
Positive = Annotated[float, Within(0, above=True)]
NotNegative = Annotated[float, Within(0)]
Share = Annotated[float, Within(0, 1)]
TopP = Annotated[float, Within(0, 1, above=True)]
HOTTEST = 1e30
"""From 1e38 on, logits over the temperature are too small for float32, and top-k would keep every token."""
Temperature = Annotated[float, Within(0, HOTTEST)]


def is_off(variable: str) -> bool:
    """Whether this value of an environment variable switches something off."""
    return variable.lower() in ("off", "0", "no")


def fits(hint: Any, value: Any) -> bool:
    """Whether a value is of the type, and in the range, that an annotation declares. A bool is no number."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is Annotated:
        return fits(arguments[0], value) and all(rule.allows(value) for rule in arguments[1:])
    if kind in (typing.Union, types.UnionType):
        return any(fits(argument, value) for argument in arguments)
    if kind is tuple:
        items = arguments[:1] * len(value) if isinstance(value, tuple) and arguments[1:] == (...,) else arguments
        return isinstance(value, tuple) and len(items) == len(value) and all(map(fits, items, value))
    if kind is dict:
        is_dict = isinstance(value, dict)
        return is_dict and all(fits(arguments[0], k) and fits(arguments[1], v) for k, v in value.items())
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, types.NoneType if hint is None else hint)


def describe(hint: Any) -> str:
    """What an annotation allows, in the words that follow "allowed are"."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is Annotated:
        rules = " ".join(map(str, arguments[1:]))
        return rules if arguments[0] is str else f"{describe(arguments[0])} {rules}".strip()
    if kind in (typing.Union, types.UnionType):
        return ", and ".join(map(describe, arguments))
    if kind is tuple:
        return f"lists of {describe(arguments[0])}"
    if kind is dict or dataclasses.is_dataclass(hint):
        return "keys and values"
    names = {bool: "true and false", int: "whole numbers", float: "finite numbers", str: "texts"}
    return names.get(hint, "null")


def check(config: Any, section: str) -> None:
    """Refuses a dataclass with a field that is not what its annotation declares.

    Args:
      section: stands before the field's name in the error.
    Raises:
      ValueError: naming the first such field, its value and the allowed ones.
    """
    for name, hint in _hints(type(config)).items():
        _check_value(hint, getattr(config, name), f"{section}.{name}")


def read(kind: type, values: Any, where: str, section: str = "") -> Any:
    """Makes a dataclass of what a file holds; dataclasses among its fields are made of the objects below.

    Args:
      values: an object of JSON or YAML; lists become tuples.
      where: the file or recipe, for errors.
      section: the place in it.
    Raises:
      ValueError: naming the place and the unknown or missing key with the valid ones, the value that its field's
        annotation does not allow with those that it does, or what the dataclass itself refuses.
    """
    place = f"{where}: {section}" if section else where
    if not isinstance(values, Mapping):
        at = f"{where}: {section}={shown(values)}" if section else where
        raise ValueError(f"{at}: expected keys and values, found {shown(values)}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [key for key in values if key not in fields]
    if unknown:
        raise ValueError(f"{place}: unknown key {shown(unknown[0])}; valid keys are {', '.join(sorted(fields))}")
    none = dataclasses.MISSING
    missing = [n for n, f in fields.items() if n not in values and f.default is none and f.default_factory is none]
    if missing:
        raise ValueError(f"{place}: missing key {missing[0]!r}")
    hints, found = _hints(kind), {}
    for name, value in values.items():
        inner = f"{section}.{name}" if section else name
        found[name] = _made(hints[name], value, where, inner)
        _check_value(hints[name], found[name], f"{where}: {inner}")
    try:
        return kind(**found)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def shown(value: Any) -> str:
    """A value as an error names it, not too long; whatever it is."""
    try:
        text = " ".join(repr(list(value) if isinstance(value, tuple) else value).split())
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists in lists
        return f"({type(value).__name__})"
    return text if len(text) <= 80 else f"{text[:80]}..."


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _check_value(hint: Any, value: Any, name: str) -> None:
    if fits(hint, value):
        return
    note = ""
    if isinstance(value, str) and "numbers" in describe(hint) and _NUMBER.fullmatch(value):
        note = " (YAML reads 2e-3 as text: write 2.0e-3)"
    raise ValueError(f"{name}={shown(value)}: allowed are {describe(hint)}{note}")


def _made(hint: Any, value: Any, where: str, section: str) -> Any:
    """A value of a file with tuples for lists, and dataclasses and floats where the annotation has them."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is Annotated:
        return _made(arguments[0], value, where, section)
    if kind in (typing.Union, types.UnionType):
        inner = next((a for a in arguments if _holds(a, value)), Any)
        return _made(inner, value, where, section)
    if isinstance(value, list):
        items = arguments[0] if kind is tuple else Any
        return tuple(_made(items, item, where, f"{section}.{i}") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint) and not isinstance(value, typing.cast(type, hint)):
        return read(typing.cast(type, hint), value, where, section)
    return float(value) if hint is float and fits(float, value) else value


def _holds(hint: Any, value: Any) -> bool:
    """Whether a value that a file holds is meant for this part of a union."""
    if dataclasses.is_dataclass(hint):
        return isinstance(value, dict)
    return isinstance(value, list) if typing.get_origin(hint) is tuple else fits(hint, value)
