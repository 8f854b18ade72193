"""The header of a GGUF file: its metadata and the places of its tensors. Every length is checked before it is used.

The package `gguf` also has a reader. It makes an array of each token, which takes three seconds for 49 thousand tokens,
and it does not detect a truncated file. This reader knows no models.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The `struct` format of each of GGUF's kinds of scalar, by GGUF's number."""
_KINDS = {kind.value: kind.name for kind in GGMLQuantizationType}
_FLOAT, _STRING, _LIST = 6, 8, 9


class Place(NamedTuple):
    """The place of a tensor in the file."""

    shape: tuple[int, ...]
    """The shape of the array, rows first. The file has the reverse order."""
    kind_name: str
    """The name of its type, as `F32` or `Q4_1`. `type 99` if the package gguf does not know type number 99."""
    start: int
    """The offset of its first byte from the start of the file."""


class Header:
    """The metadata of a file, the places of its tensors by their names, and the raw metadata of its tokenizer."""

    def __init__(self, path: str | Path):
        self.path, self._at = Path(path), len(MAGIC)
        self.values: dict[str, Any] = {}
        """The metadata: numbers, bools, texts and lists of them. A float32 outside a list is the shortest decimal that
        rounds to it: 1e-05, not 9.999999747378752e-06."""
        self.tokenizer_bytes = b""
        with self.path.open("rb") as opened:
            begin = opened.read(len(MAGIC))
            if begin != MAGIC:
                raise ValueError(f"{path}: not a GGUF file: begins with {begin!r}, expected {MAGIC!r}")
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.places = self._read()
        except struct.error as error:
            raise ValueError(f"{path}: cut short: its header continues after its {len(self._bytes)} bytes") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: holds a name or a text that is not UTF-8 ({error.object[:40]!r})") from error

    def _take(self, form: str) -> tuple[Any, ...]:
        """The next values of a `struct` format. A struct.error if the file ends before."""
        found = struct.unpack_from(form := f"<{form}", self._bytes, self._at)
        self._at += struct.calcsize(form)
        return found

    def _text(self) -> str:
        (length,) = self._take("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._bytes):
            raise struct.error
        return self._bytes[start : self._at].decode()

    def _read(self) -> dict[str, Place]:
        (version,) = self._take("I")
        if version not in VERSIONS:
            raise ValueError(f"{self.path}: GGUF version {version}: allowed are {VERSIONS}, little-endian")
        num_tensors, num_keys = self._take("QQ")
        for _ in range(num_keys):
            start, key = self._at, self._text()
            if key in self.values:
                raise ValueError(f"{self.path}: the metadata has {key} twice")
            self.values[key] = self._value(key, *self._take("I"))
            if key.startswith("tokenizer."):
                self.tokenizer_bytes += self._bytes[start : self._at]
        places: dict[str, Place] = {}
        for _ in range(num_tensors):
            name = self._text()
            (num_axes,) = self._take("I")
            *sizes, kind, offset = self._take(f"{num_axes}QIQ")
            if name in places:
                raise ValueError(f"{self.path}: has tensor {name!r} twice")
            places[name] = Place(tuple(reversed(sizes)), _KINDS.get(kind, f"type {kind}"), offset)
        alignment = self.values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"{self.path}: general.alignment={alignment!r}: expected a number of bytes")
        begin = -(-self._at // alignment) * alignment
        return {name: self._checked(name, place._replace(start=begin + place.start)) for name, place in places.items()}

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            (value,) = self._take(_SCALARS[kind])
            return float(str(np.float32(value))) if kind == _FLOAT else value
        if kind != _LIST:
            raise ValueError(f"{self.path}: {key} has a value of kind {kind}: allowed are 0 to 12")
        inner, count = self._take("IQ")
        if inner == _STRING:
            return [self._text() for _ in range(count)]
        if inner not in _SCALARS:
            raise ValueError(f"{self.path}: {key} is a list of values of kind {inner}")
        return list(self._take(f"{count}{_SCALARS[inner]}"))

    def _checked(self, name: str, place: Place) -> Place:
        if place.kind_name in GGMLQuantizationType.__members__:  # else its size is unknown, and reading it is an error
            per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[place.kind_name]]
            row = place.shape[-1] if place.shape else 1
            if row % per_block:
                raise ValueError(f"{self.path}: tensor {name!r} of {place.kind_name} has rows of {row} numbers")
            if place.start + math.prod(place.shape) // per_block * block_bytes > len(self._bytes):
                raise ValueError(f"{self.path}: cut short: tensor {name!r} is not whole")
        return place
