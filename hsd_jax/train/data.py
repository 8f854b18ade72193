"""From files to packed token rows: reading documents, rendering chats, packing, deterministic batches.

A document is one string. Files are plain text (one document a file), or JSON lines whose objects hold `text`,
`prompt` and `response`, `question` and `answer`, or a conversation as `turns` or `messages` (see `conversation`).
Read next: `loop.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {"User": ("u", "user", "human"), "Assistant": ("s", "assistant", "gpt")}
SPEAKERS = {alias: name for name, aliases in _NAMES.items() for alias in aliases}
CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")
"""GSM8K writes `<<48/2=24>>` before results; they are no text anybody wants to read."""


_TURN_KEYS = (("role", "content"), ("from", "value"))


def text_of(record: dict, field: str, where: str) -> str:
    """A field that must hold text.

    Raises:
      ValueError: naming file, line, field and what it holds, null for example.
    """
    value = record[field]
    if not isinstance(value, str):
        raise ValueError(f"{where}: {field} is {_shown(value)}: expected a text")
    return value


def conversation(record: dict, field: str, where: str) -> list[tuple[str, str]]:
    """Speaker and text of each turn of a field that lists pairs, objects with role and content, or with from and value.

    Raises:
      ValueError: naming file, line and the turn that is something else.
    """
    if not isinstance(record[field], list):
        raise ValueError(f"{where}: {field} is {_shown(record[field])}: expected a list")
    pairs = []
    for number, turn in enumerate(record[field], 1):
        pair = turn
        if isinstance(turn, dict):
            pair = next(([turn[k] for k in keys] for keys in _TURN_KEYS if set(keys) <= set(turn)), None)
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ValueError(
                f"{where}: turn {number} of {field} is {_shown(turn)}: expected the texts [speaker, text], role and"
                " content, or from and value"
            )
        pairs.append((pair[0], pair[1]))
    return pairs


def _shown(value: Any) -> str:
    """A value as it stands in the file, not too long for an error."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def render_turns(turns: Sequence[tuple[str, str]], open_for: str | None = None) -> str:
    """One line a turn, `User: ...` or `Assistant: ...`; `open_for` leaves the next speaker's line open."""
    lines = [f"{SPEAKERS.get(who.lower(), who.capitalize())}: {' '.join(text.split())}" for who, text in turns]
    if open_for is not None:
        lines.append(f"{open_for}:")
    return "\n".join(lines)


def render_record(record: dict, where: str) -> str:
    """The document of one JSON line.

    Raises:
      ValueError: naming file, line and the fields that would do, or the field that holds no text.
    """
    if "text" in record:
        return text_of(record, "text", where)
    for field in ("turns", "messages"):
        if field in record:
            return render_turns(conversation(record, field, where))
    if "question" in record and "answer" in record:
        question, answer = (text_of(record, field, where) for field in ("question", "answer"))
        answer = CALCULATOR_NOTE.sub("", answer).replace("\n#### ", "\nThe answer is ")
        return f"Question: {question.strip()}\nAnswer: {answer.strip()}."
    if "prompt" in record and "response" in record:
        return text_of(record, "prompt", where) + text_of(record, "response", where)
    raise ValueError(
        f"{where}: fields {sorted(record)}; expected text, turns, messages, question and answer, or prompt and response"
    )


def read_documents(path: str | Path) -> list[str]:
    """All documents of one file.

    Raises:
      FileNotFoundError: if the file is missing.
      ValueError: if it is empty, not UTF-8, or holds a line that is no known record; names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such data file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if path.suffix != ".jsonl":
        documents = [text]
    else:
        documents = []
        for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold U+2028
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: a JSON {type(record).__name__}; expected an object")
            documents.append(render_record(record, f"{path}:{number}"))
    documents = [d for d in documents if d.strip()]
    if not documents:
        raise ValueError(f"{path}: holds no document")
    return documents


def pack(documents: Sequence[str], tokenizer, length: int, bos: int | None, eos: int, seed: int) -> np.ndarray:
    """Token rows [num, length + 1]: documents in a seeded order, each closed by `eos`, cut without padding.

    The extra token is the last label. Neighbouring rows share one token, so that no label is lost.
    """
    order = np.random.default_rng(seed).permutation(len(documents))
    encoded = tokenizer.encode_batch([documents[i] for i in order], add_special_tokens=False)
    head = [] if bos is None else [bos]
    stream = np.concatenate([np.asarray([*head, *e.ids, eos], np.int32) for e in encoded])
    num = (len(stream) - 1) // length
    if num < 1:
        raise ValueError(f"the data hold {len(stream)} tokens: fewer than one row of {length + 1}")
    return np.stack([stream[i * length : (i + 1) * length + 1] for i in range(num)])


def batches(rows: np.ndarray, batch: int, seed: int, start_step: int = 0) -> Iterator[np.ndarray]:
    """Endless batches, reshuffled every epoch; batch `i` depends on `seed` and `i` alone, so training resumes.

    Raises:
      ValueError: if there are fewer rows than one batch needs.
    """
    per_epoch = len(rows) // batch
    if per_epoch < 1:
        raise ValueError(f"{len(rows)} rows of text: fewer than one batch of {batch}")
    epoch, first = divmod(start_step, per_epoch)
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(len(rows))
        for i in range(first, per_epoch):
            yield rows[order[i * batch : (i + 1) * batch]]
        epoch, first = epoch + 1, 0
