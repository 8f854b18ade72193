"""Reads files of training data or prompts into records: the one reader of all commands that take such files.

The ending of a name says how a file is read. `.jsonl` and `.json` hold JSON: one object per line, or an array of
objects. `.txt` and names without an ending hold text. Each file may be gzipped and then ends in `.gz`, too. No other
file is read. `documents.py` says what a record means.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hsd_jax.host.files import decoded, parse_json, with_unix_lines

JSON, TEXT = (".jsonl", ".json"), (".txt", "")
"""The endings of each form. The last one of a text is no ending."""
WHOLE, LINES = "whole", "lines"
"""What a record of a text file is: the whole text, `{"text": ...}`, or a line, `{"prompt": ...}`."""
CONVERSATIONS = ("turns", "messages", "conversations")
FIELDS = ("text", *CONVERSATIONS, "question", "answer", "prompt", "response")
"""The fields that documents and prompts are made of. If they hold nothing, as in a converted table, they are absent."""
NUM_SHOWN = 3
"""How many of the records that are skipped in a file are named."""
T = TypeVar("T")


class Record(NamedTuple):
    """One record of a file."""

    path: Path
    where: str
    """Its place for errors: `FILE:LINE`, or `FILE, record N` in an array, or the file alone."""
    number: int
    """Its line, or its place in an array, from 1."""
    index: int
    """Its place among the records of the file, from 0."""
    fields: dict[str, Any]


def check_file(path: str | Path, text: str | None = WHOLE) -> str:
    """Checks that there is a file with an allowed ending. Returns the ending, in small letters and without `.gz`."""
    path = Path(path)
    ending = Path(path.name.lower().removesuffix(".gz")).suffix
    if ending not in JSON and (text is None or ending not in TEXT):
        allowed = ", ".join(JSON) + ("" if text is None else f", {TEXT[0]} and names without an ending")
        raise ValueError(f"{path}: no data are read from such files; allowed are {allowed}, also with .gz")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such data file")
    return ending


@contextlib.contextmanager
def naming(record: Record) -> Iterator[None]:
    """A ValueError in the block begins with the place of the record."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from error


def read_records(path: str | Path, text: str | None = WHOLE) -> Iterator[Record]:
    """The records of a file, whose texts are read as WHOLE or by LINES, or, with None, are not allowed."""
    path = Path(path)
    for index, (where, number, content) in enumerate(_contents(path, text)):
        yield Record(path, where, number, index, _fields(content, where))


def read_file(
    path: str | Path,
    make: Callable[[Record], Sequence[T]],
    skip: Callable[[str], None] | None = None,
    text: str = WHOLE,
    limit: int | None = None,
) -> list[T]:
    """All that `make` makes of the records of a file, at most `limit`.

    If `make` raises a ValueError, its record cannot be used, and the error names its place. With `skip` such records
    are left out, and `skip` is called with the first of them and their number (`--skip-bad-lines`).
    """
    found: list[T] = []
    bad: list[str] = []
    num, path = 0, Path(path)
    for index, (where, number, content) in enumerate(_contents(path, text)):
        num += 1
        try:
            record = Record(path, where, number, index, _fields(content, where))
            with naming(record):
                found += make(record)
        except ValueError as error:
            if skip is None:
                raise ValueError(f"{error}; --skip-bad-lines leaves such records out") from error
            bad.append(str(error))
        if limit is not None and len(found) >= limit:
            break
    if bad and len(bad) == num:
        raise ValueError(f"{path}: none of {num:,} records can be used; the first: {bad[0]}")
    if skip is not None and bad:
        for line in bad[:NUM_SHOWN]:
            skip(f"skipped {line}")
        skip(f"{path}: {len(bad):,} of {num:,} records skipped, because they cannot be used")
    return found[:limit]


def _contents(path: Path, text: str | None) -> Iterator[tuple[str, int, Any]]:
    """`where`, `number` and content of every record. A line of JSON is given as its bytes, everything else as a
    value."""
    ending = check_file(path, text)
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix.lower() == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    content = content.removeprefix(codecs.BOM_UTF8)
    if ending in JSON and content.lstrip().startswith(b"["):
        values = parse_json(decoded(content, str(path)), str(path))
        yield from ((f"{path}, record {number}", number, value) for number, value in enumerate(values, 1))
        return
    if ending in JSON:
        lines = enumerate(content.split(b"\n"), 1)  # not splitlines: JSON strings may hold U+2028
        yield from ((f"{path}:{number}", number, line) for number, line in lines if line.strip())
        return
    whole = with_unix_lines(decoded(content, str(path)))
    if text == WHOLE:
        yield str(path), 1, {"text": whole}
        return
    lines = enumerate(whole.split("\n"), 1)
    yield from ((f"{path}:{number}", number, {"prompt": line}) for number, line in lines if line.strip())


def _fields(content: Any, where: str) -> dict[str, Any]:
    """The fields of a record, given as the bytes of its line or as a value."""
    record = parse_json(decoded(content, where), where) if isinstance(content, bytes) else content
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON {type(record).__name__}; expected an object")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: holds half of a character (a lone surrogate)") from error
    return {name: value for name, value in record.items() if name not in FIELDS or value not in (None, [])}
