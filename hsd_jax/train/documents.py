"""Says what a record holds, and turns records into documents: renders conversations, and finds the responses in a text.

A record holds `text`, `prompt` and `response`, `question` and `answer`, or a conversation as `turns`, `messages` or
`conversations`. A file of text is one document. Prompts are made of the same records, by `content_of`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hsd_jax.tokenizer import Messages
from hsd_jax.train.records import CONVERSATIONS, Record, read_file
from hsd_jax.validation import Whole, shown, take

_NAMES = {"User": ("u", "user", "human"), "Assistant": ("s", "assistant", "gpt", "chatgpt", "bing", "bard")}
SPEAKERS = {alias: name for name, aliases in _NAMES.items() for alias in aliases}
CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")
"""GSM8K writes notes such as `<<48/2=24>>` before results. They are removed from the text."""

_TURN_KEYS = (("role", "content"), ("from", "value"))
ANSWERS = {"question": "answer", "prompt": "response"}

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


def content_of(
    record: dict, fields: Sequence[str] = ("text", *CONVERSATIONS, *ANSWERS), is_answered: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """The first of `fields` that a record has, its text, and speaker and text of each turn: one of the two is empty.

    A conversation lists pairs, objects with `role` and `content`, or objects with `from` and `value`. Of one that lists
    texts of the user only, as in MT-bench and Spec-Bench, the first is the text.

    Args:
      is_answered: whether a question counts only with its answer, and a prompt only with its response.
    """
    partners = ANSWERS if is_answered else {}
    field = next((name for name in fields if name in record and partners.get(name, name) in record), None)
    if field is None:
        expected = [f"{name} and {partners[name]}" if name in partners else name for name in fields]
        raise ValueError(f"fields {shown(sorted(record))}; expected one of: {', '.join(expected)}")
    value = record[field]
    if field not in CONVERSATIONS:
        if not isinstance(value, str):
            raise ValueError(f"{field} is {shown(value)}: expected a text")
        return field, value, []
    if not isinstance(value, list) or not value:
        raise ValueError(f"{field} is {shown(value)}: expected a list of turns")
    if isinstance(value[0], str):
        return field, value[0], []
    turns = []
    for number, turn in enumerate(value, 1):
        pair = turn
        if isinstance(turn, dict):
            pair = next(([turn[k] for k in keys] for keys in _TURN_KEYS if set(keys) <= set(turn)), None)
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            expected = "the texts [speaker, text], role and content, or from and value"
            raise ValueError(f"turn {number} of {field} is {shown(turn)}: expected {expected}")
        turns.append((pair[0], pair[1]))
    return field, "", turns


def render_turns(turns: Turns, is_open: bool = False) -> str:
    """The `ChatTemplate` of targets without one: a line per turn, `User: ...` or `Assistant: ...`."""
    lines = [f"{speaker_of(who)}: {' '.join(text.split())}" for who, text in turns]
    return "\n".join([*lines, "Assistant:"] if is_open else lines)


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
    field, said, turns = content_of(record, is_answered=True)
    if turns:
        return _rendered(turns, where) if template is None else _templated(turns, template, where, find_responses)
    if field == "text":
        return Document(where, said)
    if field in CONVERSATIONS:
        raise ValueError(f"{field} lists texts without speakers: expected turns")
    _, answer, _ = content_of(record, (ANSWERS[field],))
    if field == "question":
        answer = CALCULATOR_NOTE.sub("", answer).replace("\n#### ", "\nThe answer is ")
        said, answer = question_prompt(said), f" {answer.strip()}."
    text = said + answer
    return Document(where, text, ((len(said), len(text)),), tokens=_sampled(record))


def question_prompt(question: str) -> str:
    """A question without its answer."""
    return f"Question: {question.strip()}\nAnswer:"


def _sampled(record: dict) -> tuple[list[int], list[int]] | None:
    """The ids that `hsd generate-data` wrote beside prompt and response."""
    if "response_tokens" not in record:
        return None
    pair = (record.get("prompt_tokens"), record["response_tokens"])
    for name, ids in zip(("prompt_tokens", "response_tokens"), pair, strict=True):
        take(list[Whole], ids, name)
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
    text = template(turns, False)
    responses = []
    for i, (who, said) in enumerate(turns):
        if find_responses and i and speaker_of(who) == "Assistant":
            before, through = template(turns[:i], True), template(turns[: i + 1], False)
            responses.append(_response(text, before, through, said.strip(), f"turn {i + 1}"))
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
    skip: Callable[[str], None] | None = None,
) -> list[Document]:
    """All documents of one file that hold more than white space. `skip` is that of `read_file`."""

    def make(record: Record) -> list[Document]:
        document = to_document(record.fields, record.where, template, find_responses)
        return [document] if document.text.strip() else []

    documents = read_file(path, make, skip)
    if not documents:
        raise ValueError(f"{path}: holds no document")
    return documents
