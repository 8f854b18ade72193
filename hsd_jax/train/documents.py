"""Turns records into documents: it renders conversations, and finds the responses in a text.

A record holds `text`, `prompt` and `response`, `question` and `answer`, or a conversation as `turns`, `messages` or
`conversations`. A file of text is one document.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hsd_jax.settings import Whole, shown, take
from hsd_jax.tokenizer import Messages
from hsd_jax.train.records import CONVERSATIONS, Record, read_file

_NAMES = {"User": ("u", "user", "human"), "Assistant": ("s", "assistant", "gpt", "chatgpt", "bing", "bard")}
SPEAKERS = {alias: name for name, aliases in _NAMES.items() for alias in aliases}
CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")
"""GSM8K writes notes such as `<<48/2=24>>` before results. They are removed from the text."""

_TURN_KEYS = (("role", "content"), ("from", "value"))
_PAIRS = (("question", "answer"), ("prompt", "response"))
EXPECTED = f"text, {', '.join(CONVERSATIONS)}, question and answer, or prompt and response"

Turns = Sequence[tuple[str, str]]
"""Speaker and text of each turn."""
ChatTemplate = Callable[[Turns, bool], str]
"""`template(turns, is_open) -> text`. With `is_open` the text ends where the assistant's answer begins."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One text of the training data, and the parts of it that are responses."""

    where: str
    """As `Record.where`."""
    text: str
    responses: tuple[tuple[int, int], ...] = ()
    """Character ranges [start, end) of the assistant's turns, ascending. A range includes what closes the turn."""
    is_templated: bool = False
    """Whether a chat template has written the start token and the ends of turns into the text."""
    tokens: tuple[list[int], list[int]] | None = None
    """The sampled tokens of prompt and response. They are used in place of tokens of the text."""


def text_of(record: dict, field: str, where: str) -> str:
    """The value of a field that must hold text."""
    value = record[field]
    if not isinstance(value, str):
        raise ValueError(f"{where}: {field} is {shown(value)}: expected a text")
    return value


def conversation(record: dict, field: str, where: str) -> list[tuple[str, str]]:
    """Speaker and text of each turn of a conversation.

    The field lists pairs, objects with `role` and `content`, or objects with `from` and `value`.
    """
    if not isinstance(record[field], list) or not record[field]:
        raise ValueError(f"{where}: {field} is {shown(record[field])}: expected a list of turns")
    pairs = []
    for number, turn in enumerate(record[field], 1):
        pair = turn
        if isinstance(turn, dict):
            pair = next(([turn[k] for k in keys] for keys in _TURN_KEYS if set(keys) <= set(turn)), None)
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            expected = "the texts [speaker, text], role and content, or from and value"
            raise ValueError(f"{where}: turn {number} of {field} is {shown(turn)}: expected {expected}")
        pairs.append((pair[0], pair[1]))
    return pairs


def first_question(turns: Any) -> str | None:
    """The user's first text if `turns` lists texts of the user only, as in MT-bench and Spec-Bench; otherwise None."""
    return turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], str) else None


def render_turns(turns: Turns, open_for: str | None = None) -> str:
    """One line per turn, `User: ...` or `Assistant: ...`. `open_for` names a speaker whose line is left open at the
    end."""
    lines = [f"{speaker_of(who)}: {' '.join(text.split())}" for who, text in turns]
    if open_for is not None:
        lines.append(f"{open_for}:")
    return "\n".join(lines)


def speaker_of(who: str) -> str:
    """`User` or `Assistant` for any of their names. Another name is returned with a capital."""
    return SPEAKERS.get(who.lower(), who.capitalize())


def to_document(
    record: dict, where: str, template: ChatTemplate | None = None, find_responses: bool = True
) -> Document:
    """The document of one record.

    Args:
      template: renders conversations; None: `render_turns`.
      find_responses: False leaves `responses` of a templated conversation empty and saves two renderings per turn.
    """
    if "text" in record:
        return Document(where, text_of(record, "text", where))
    for field in CONVERSATIONS:
        if field in record:
            turns = conversation(record, field, where)
            if template is None:
                return _rendered(turns, where)
            return _templated(turns, template, where, find_responses)
    for first, second in _PAIRS:
        if first in record and second in record:
            before, after = text_of(record, first, where), text_of(record, second, where)
            if first == "question":
                before, after = question_prompt(before), f" {_answer(after)}"
            text = before + after
            return Document(where, text, ((len(before), len(text)),), tokens=_sampled(record, where))
    raise ValueError(f"{where}: fields {names_of(record)}; expected {EXPECTED}")


def names_of(record: dict) -> str:
    """The names of the fields, cut for an error message."""
    return shown(sorted(record))


def question_prompt(question: str) -> str:
    """A question without its answer."""
    return f"Question: {question.strip()}\nAnswer:"


def _answer(answer: str) -> str:
    answer = CALCULATOR_NOTE.sub("", answer).replace("\n#### ", "\nThe answer is ")
    return f"{answer.strip()}."


def _sampled(record: dict, where: str) -> tuple[list[int], list[int]] | None:
    """The ids that `hsd generate-data` wrote beside prompt and response."""
    if "response_tokens" not in record:
        return None
    pair = (record.get("prompt_tokens"), record["response_tokens"])
    for name, ids in zip(("prompt_tokens", "response_tokens"), pair, strict=True):
        take(list[Whole], ids, f"{where}: {name}")
    return pair  # type: ignore[return-value]


def _rendered(turns: Turns, where: str) -> Document:
    """The document of `render_turns`. A response begins after the colon and includes the end of its line."""
    text = render_turns(turns)
    responses, start = [], 0
    for who, said in turns:
        end = min(start + len(render_turns([(who, said)])) + 1, len(text))
        if speaker_of(who) == "Assistant":
            responses.append((start + len("Assistant:"), end))
        start = end
    return Document(where, text, tuple(responses))


def _templated(turns: Turns, template: ChatTemplate, where: str, find_responses: bool) -> Document:
    """The document of a conversation, rendered by the template. A first turn of the assistant is not a response."""
    try:
        text = template(turns, False)
        responses = []
        for i, (who, said) in enumerate(turns):
            if find_responses and i and speaker_of(who) == "Assistant":
                before, through = template(turns[:i], True), template(turns[: i + 1], False)
                responses.append(_response(text, before, through, said.strip(), f"turn {i + 1}"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Document(where, text, tuple(responses), is_templated=True)


def _response(text: str, before: str, through: str, said: str, turn: str) -> tuple[int, int]:
    """The character range of one turn in the text of the whole conversation.

    `before` and `through` are the conversation up to the turn, and with it. Some templates (Qwen3's) render the last
    turn in another way than earlier turns. Then `said` and what closes it must follow `before` in `text`.
    """
    if text.startswith(before):
        if through.startswith(before) and text.startswith(through):
            return len(before), len(through)
        closed = said + through.rpartition(said)[2]
        if said and text.startswith(closed, len(before)):
            return len(before), len(before) + len(closed)
    raise ValueError(f"the chat template rewrites {turn}: write one response per record (or data.chat_template=false)")


def chat_template_of(render: Callable[[Messages, bool], str]) -> ChatTemplate:
    """Makes a chat template of `render(messages, is_open)`, for example of `Tokenizer.render`."""

    def template(turns: Turns, is_open: bool) -> str:
        return render([{"role": speaker_of(who).lower(), "content": text} for who, text in turns], is_open)

    return template


def load_documents(
    path: str | Path,
    template: ChatTemplate | None = None,
    find_responses: bool = True,
    skip_bad_lines: bool = False,
    report: Callable[[str], None] = print,
) -> list[Document]:
    """All documents of one file that hold more than white space."""

    def make(record: Record) -> list[Document]:
        document = to_document(record.fields, record.where, template, find_responses)
        return [document] if document.text.strip() else []

    documents = read_file(path, make, skip_bad_lines, report)
    if not documents:
        raise ValueError(f"{path}: holds no document")
    return documents
