"""From files to packed token rows: reading documents, rendering chats, packing, deterministic batches.

A document is one string. Files are plain text (one document a file), or JSON lines whose objects hold `text`,
`prompt` and `response`, `question` and `answer`, `messages` (role, content), or `turns` (speaker, text).
Read next: `loop.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

SPEAKERS = dict.fromkeys(("u", "user", "human"), "User") | dict.fromkeys(("s", "assistant", "gpt"), "Assistant")
CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")
"""GSM8K writes `<<48/2=24>>` before results; they are no text anybody wants to read."""


def render_turns(turns: Sequence[tuple[str, str]], open_for: str | None = None) -> str:
    """One line a turn, `User: ...` or `Assistant: ...`; `open_for` leaves the next speaker's line open."""
    lines = [f"{SPEAKERS.get(who.lower(), who.capitalize())}: {' '.join(text.split())}" for who, text in turns]
    if open_for is not None:
        lines.append(f"{open_for}:")
    return "\n".join(lines)


def render_record(record: dict, where: str) -> str:
    """The document of one JSON line.

    Raises:
      ValueError: naming file, line and the fields that would do.
    """
    if "text" in record:
        return record["text"]
    if "turns" in record:
        return render_turns([(turn[0], turn[1]) for turn in record["turns"]])
    if "messages" in record:
        return render_turns([(m["role"], m["content"]) for m in record["messages"]])
    if "question" in record and "answer" in record:
        answer = CALCULATOR_NOTE.sub("", record["answer"]).replace("\n#### ", "\nThe answer is ")
        return f"Question: {record['question'].strip()}\nAnswer: {answer.strip()}."
    if "prompt" in record and "response" in record:
        return record["prompt"] + record["response"]
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
    step, epoch, order = start_step, -1, None
    while True:
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = np.random.default_rng((seed, epoch)).permutation(len(rows))
        i = step % per_epoch
        yield rows[order[i * batch : (i + 1) * batch]]
        step += 1
