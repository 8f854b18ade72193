"""Structured outputs: a regular expression, a JSON schema or a choice of texts as a table of states over tokens.

A table goes to the device with its row. There a round looks up which tokens may follow each node of its tree
(`infer/controls.py`), and no round asks the host. The package outlines-core writes a schema as a regular expression,
and this as states over bytes (Willard and Louf, arXiv:2307.09702). Tokens are walked through these states here.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import marshal
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from hsd_jax import grammar_worker
from hsd_jax.config import GRAMMAR_CELLS
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.validation import shown, take

ANY_OBJECT = '{"type": "object"}'
NEVER = -1
KEPT = """type properties required additionalProperties minProperties maxProperties items prefixItems minItems maxItems
enum const anyOf oneOf allOf $ref $defs definitions pattern format minLength maxLength""".split()  # noqa: SIM905
"""Keywords of JSON schema that are kept. outlines-core passes over others in silence."""
FREE = "title description default examples $schema $id $comment deprecated readOnly writeOnly".split()  # noqa: SIM905
"""Those that restrict nothing."""
FORMATS = "date", "date-time", "time", "uuid", "email", "uri"
_KINDS: dict[str, Any] = {"json": dict[str, Any] | str, "json_object": Literal[True], "regex": str}
_KINDS["choice"] = Annotated[list[str], Field(min_length=1)]
MOST_SECONDS = 20
MOST_STATES = 2048


class Table(NamedTuple):
    """The states of a text and the moves between them, as bytes, which processes exchange. A text begins in state 0."""

    classes: bytes
    cells: bytes
    num_classes: int

    @classmethod
    def of(cls, token_class: np.ndarray, moves: np.ndarray) -> Table:
        return cls(token_class.astype("<i2").tobytes(), moves.astype("<i2").tobytes(), moves.shape[1])

    @property
    def token_class(self) -> np.ndarray:
        """int16 [V]: tokens of one class move alike in every state."""
        return np.frombuffer(self.classes, "<i2")

    @property
    def moves(self) -> np.ndarray:
        """int16 [S, C]: the state after a token of a class, or NEVER. The last class is that of end tokens."""
        return np.frombuffer(self.cells, "<i2").reshape(-1, self.num_classes)


def table_of(tokenizer: Tokenizer | None, vocab_size: int, asked: Mapping[str, Any]) -> Table:
    """The table of the setting `structured_outputs`. Raises a ValueError for what cannot be constrained to."""
    if tokenizer is None:
        raise ValueError(f"structured_outputs={shown(asked)}: the checkpoint has no tokenizer")
    ((kind, what),) = asked.items()
    what = take(_KINDS[kind], what, f"structured_outputs.{kind}")
    return _table(tokenizer, vocab_size, kind, what if isinstance(what, str) else json.dumps(what))


@functools.lru_cache(maxsize=64)
def _table(tokenizer: Tokenizer, vocab_size: int, kind: str, what: str) -> Table:
    name = f"structured_outputs: {kind}={shown(what)}"
    try:
        match kind:
            case "regex":
                asked = {"regex": re.sub(r"^\^|(?<!\\)\$$", "", what)}  # the whole text is meant in any case
            case "choice":
                asked = {"regex": "|".join(map(re.escape, json.loads(what)))}
            case _:
                asked = {"schema": ANY_OBJECT if kind == "json_object" else what}
                _check_schema(json.loads(asked["schema"]))
        found = _states_over_bytes(asked)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    next_state, accepts = _smallest(*_over_bytes(*found))
    if len(accepts) > MOST_STATES:
        raise ValueError(f"{name}: it has {len(accepts)} states; at most {MOST_STATES}")
    moves, token_class = _over_tokens(next_state, _token_bytes(tokenizer, vocab_size))
    moves = np.concatenate([moves, np.where(accepts, np.arange(len(accepts)), NEVER)[:-1, None]], 1)
    moves = _without_dead_ends(moves)
    if (moves[0] < 0).all():
        raise ValueError(f"{name}: no text of this vocabulary matches")
    if moves.size > GRAMMAR_CELLS:
        size = f"{len(moves)} states of {moves.shape[1]} classes of tokens"
        raise ValueError(f"{name}: {size}, together {moves.size}; at most {GRAMMAR_CELLS}")
    return Table.of(token_class, moves)


def _check_schema(schema: Any) -> None:
    """Refuses keywords that would be passed over, where they stand as keywords."""
    if not isinstance(schema, dict):
        raise ValueError(f"expected a JSON schema, found {shown(schema)}")
    if wrong := sorted(schema.keys() - {*KEPT, *FREE}):
        raise ValueError(f"the keyword {wrong[0]!r} is not supported; supported are {', '.join(KEPT)}")
    if schema.get("format", "date") not in FORMATS:
        raise ValueError(f"format={shown(schema['format'])}: supported are {', '.join(FORMATS)}")
    for part in _parts_of(schema):
        _check_schema(part)


def _parts_of(schema: dict[str, Any]) -> Iterator[Any]:
    for name in ("properties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "prefixItems"):
        parts = schema.get(name, [])
        yield from parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list) else [parts]
    yield from (schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict))


def _states_over_bytes(asked: dict[str, str]) -> tuple[int, list[int], dict[int, dict[int, int]]]:
    """The first state, those behind a text and its END, and the moves of each state by byte (`grammar_worker.py`)."""
    if importlib.util.find_spec("outlines_core") is None:
        raise ValueError("this needs the package outlines-core (pip install 'hsd_jax[structured]')")
    command = [sys.executable, "-P", str(Path(__file__).with_name("grammar_worker.py"))]
    try:
        done = subprocess.run(command, input=json.dumps(asked).encode(), capture_output=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(f"its states take more than {MOST_SECONDS} s to find") from None
    if done.returncode < 0:
        raise ValueError(f"its states take more memory than {grammar_worker.MOST_BYTES >> 30} GB")
    if done.returncode:
        raise ValueError(done.stderr.decode(errors="replace").strip())
    return marshal.loads(done.stdout)


def _over_bytes(first: int, last: list[int], transitions: dict[int, dict[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The next state [S, 256] of each state after each byte, and whether it may end [S]. State S - 1 never may."""
    numbers = {first: 0}
    for state, after in transitions.items():
        for one in (state, *after.values()):
            numbers.setdefault(one, len(numbers))
    dead = len(numbers)
    next_state, accepts = np.full((dead + 1, 256), dead), np.zeros(dead + 1, bool)
    for state, after in transitions.items():
        for byte, one in after.items():
            if byte < 256:
                next_state[numbers[state], byte] = numbers[one]
    accepts[[numbers[state] for state in last if state in numbers]] = True
    behind = np.arange(dead + 1)
    for byte in grammar_worker.END.encode():
        behind = next_state[behind, byte]
    return next_state, accepts[behind]


def _smallest(next_state: np.ndarray, accepts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same language in the fewest states (Moore, 1956). The first one stays the first, a dead one is the last."""
    bytes_of = np.unique(next_state, axis=1, return_inverse=True)[1].reshape(-1)
    firsts = np.unique(bytes_of, return_index=True)[1]
    kind = accepts.astype(int)
    while True:
        found = _rows(np.concatenate([kind[:, None], kind[next_state[:, firsts]]], 1))
        if found.max() == kind.max():
            break
        kind = found
    # States in the order in which they first come, the dead one behind them.
    order = list(dict.fromkeys(kind.tolist()))
    order.remove(kind[-1])
    place = np.empty(len(order) + 1, int)
    place[[*order, kind[-1]]] = np.arange(len(order) + 1)
    one_of = np.unique(kind, return_index=True)[1][[*order, kind[-1]]]
    return place[kind[next_state[one_of]]], accepts[one_of]


def _rows(x: np.ndarray) -> np.ndarray:
    """A number for each row, the same for equal rows."""
    rows = np.ascontiguousarray(x)
    return np.unique(rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel(), return_inverse=True)[1]


def _over_tokens(next_state: np.ndarray, tokens: tuple[bytes, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The state after each class of tokens [S, C], NEVER for the dead one, and the class of each token [V].

    Bytes that move alike in all states are one letter. Tokens that begin alike are walked together, letter by letter.
    """
    letters = _rows(next_state.T)
    moves = next_state[:, np.unique(letters, return_index=True)[1]].astype(np.int16)
    dead, (_, num_letters), lengths = len(next_state) - 1, moves.shape, np.array([len(token) for token in tokens])
    spelled = np.zeros((len(tokens), lengths.max()), np.int32)
    for row, token in zip(spelled, tokens, strict=True):
        row[: len(token)] = letters[list(token)]
    # Of each length: the beginnings of tokens, the state after each of them, and which one a token has.
    state, beginning = np.arange(dead, dtype=np.int16)[:, None], np.zeros(len(tokens), int)
    found, column = [np.full((dead, 1), dead, np.int16)], np.zeros(len(tokens), int)  # tokens without text lead nowhere
    for place in range(spelled.shape[1]):
        here = np.nonzero(lengths > place)[0]
        longer, beginning[here] = np.unique(beginning[here] * num_letters + spelled[here, place], return_inverse=True)
        state = moves[state[:, longer // num_letters], longer % num_letters]
        whole = here[lengths[here] == place + 1]
        ends, number = np.unique(beginning[whole], return_inverse=True)
        column[whole] = number + sum(part.shape[1] for part in found)
        found.append(state[:, ends])
    state = np.concatenate(found, 1)
    classes = _rows(state.T)
    state = state[:, np.unique(classes, return_index=True)[1]]
    return np.where(state == dead, NEVER, state), classes[column]


def _without_dead_ends(moves: np.ndarray) -> np.ndarray:
    """The moves without those to states from which no text ends: bytes lead on from there, and no token does."""
    ends = moves[:, -1] >= 0
    while True:
        reached = ends | (np.where(moves >= 0, ends[moves], False)).any(1)
        if (reached == ends).all():
            return np.where((moves >= 0) & ends[moves], moves, NEVER)
        ends = reached


@functools.lru_cache(maxsize=4)
def _token_bytes(tokenizer: Tokenizer, vocab_size: int) -> tuple[bytes, ...]:
    """The bytes of each token within a text. Special tokens, and numbers without a token, have none."""
    stored = json.loads(tokenizer.raw.to_str())
    kinds = json.dumps(stored.get("decoder"))
    is_bytes, is_pieces = '"ByteLevel"' in kinds, '"ByteFallback"' in kinds or '"Metaspace"' in kinds
    if not is_bytes and not is_pieces:
        raise ValueError(
            f"structured_outputs: the tokenizer's decoder is {kinds}; known are byte-level BPE and SentencePiece"
        )
    added = {token["id"]: token for token in stored.get("added_tokens", [])}
    found = [b""] * vocab_size
    for text, number in tokenizer.raw.get_vocab().items():
        if number >= vocab_size:
            continue
        if number in added:
            found[number] = b"" if added[number]["special"] else text.encode()
        elif is_bytes:
            found[number] = bytes(_byte_letters()[letter] for letter in text if letter in _byte_letters())
        elif byte := re.fullmatch("<0x([0-9A-F]{2})>", text):
            found[number] = bytes([int(byte[1], 16)])
        else:
            found[number] = text.replace("\u2581", " ").encode()
    return tuple(found)


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The byte of each letter in which byte-level tokenizers spell (GPT-2)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}
