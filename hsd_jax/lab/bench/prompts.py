"""Benchmark prompts from files: dialogues, maths problems, chat questions, plain text.

Dialogues and questions go through the chat template of a checkpoint that has one; else they are lines. A prompt may
know the text that really followed (`rest`), on which the target's bits per byte are measured. Read only: nothing here
is training data. Read next: `experiment.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from hsd_jax.lab.bench.tables import say
from hsd_jax.settings import OneOf, take
from hsd_jax.tokenizer import Tokenizer
from hsd_jax.train.documents import (
    Turns,
    chat_template_of,
    conversation,
    first_question,
    question_prompt,
    read_records,
    render_record,
    render_turns,
    speaker_of,
    text_of,
)

HALVES = ("tune", "report")
"""Half h of a file holds the records with crc32(id) % 2 == h: tune on the first, report on the second."""
Half = Annotated[str, OneOf(HALVES)]
IDS = ("id", "question_id", "task_id", "name")
"""Fields of a record that name it."""
MAX_PROMPT_TOKENS = 200
ASSETS = Path(__file__).parents[2] / "assets"
DEMO, QUESTIONS = ASSETS / "demo_prompts.jsonl", ASSETS / "demo_questions.jsonl"


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """One prompt of a benchmark."""

    name: str
    text: str
    """For the eye; `tokens` are what is decoded."""
    rest: str | None = None
    """The text that follows in the data; behind a conversation of a chat template, what the assistant says next."""
    is_templated: bool = False
    """A chat template has put the start token and the ends of turns into the text."""
    question: str | None = None
    """What was said last, without what a template puts around it."""
    ids: tuple[int, ...] = ()
    """Of a prompt that is cut to a length: the tokens in place of the text."""

    def tokens(self, tokenizer: Tokenizer | None, with_rest: bool = False) -> list[int]:
        """What `decode` takes: token ids, with one start token at most."""
        if self.ids:
            return list(self.ids)
        assert tokenizer is not None, "who reads prompts has asked for one"
        text = self.text + (self.rest or "") if with_rest else self.text
        return tokenizer.encode_rendered(text) if self.is_templated else tokenizer.encode(text)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is decoded to be timed, and how often; the options of that name on the command line."""

    prompts: Sequence[str] | None
    """Files; None: the demo's own."""
    half: str | None
    limit: int | None
    """Prompts of each file."""
    max_new_tokens: int
    seed: int
    repeats: int
    command_line: str
    chat_template: bool = True
    """Conversations and questions through the target's chat template, if it has one."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Workload:
        """Takes its fields from among more options."""
        return cls(**{field.name: options[field.name] for field in dataclasses.fields(cls)})

    @property
    def prompt_files(self) -> list[str]:
        """The files, for records."""
        return [str(path) for path in self.prompts or ["the demo's own"]]

    def read(self, params, files: Sequence[str] | None) -> list[BenchPrompt]:
        """The prompts of some files; raises as `for_checkpoint`."""
        return for_checkpoint(params, files, self.half, self.limit, self.max_new_tokens, self.chat_template)


def joined_contexts(params, found: Sequence[BenchPrompt], length: int, num: int) -> list[list[int]]:
    """`num` prompts of `length` tokens each: one prompt's last tokens, other texts before it where it is too short."""
    texts = [prompt.tokens(params.tokenizer, with_rest=True) for prompt in found]
    contexts = []
    for row in range(num):
        ids, before = found[row % len(found)].tokens(params.tokenizer), row + 1
        while len(ids) < length:
            ids = texts[before % len(texts)] + ids
            before += 1
        contexts.append(ids[-length:])
    return contexts


def for_checkpoint(
    params,
    files: Sequence[str | Path] | None,
    half: str | None,
    limit: int | None,
    max_new_tokens: int,
    chat_template: bool = True,
) -> list[BenchPrompt]:
    """The prompts of all files, or of the demo, that leave room for `max_new_tokens`.

    Args:
      params: whose tokenizer counts; what they cannot decode is left out, with a word on stderr.
      chat_template: False: lines, whatever the checkpoint has.
    Raises:
      FileNotFoundError, ValueError: as `read_prompts`, without a tokenizer, or if no prompt is left.
    """
    tokenizer = params.tokenizer
    if tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer: this command needs text prompts")
    if files:
        chat = tokenizer if chat_template and is_chat(tokenizer) else None
        found = read_prompts(files, lambda text: len(tokenizer.encode(text)), half, limit, chat=chat)
    elif half is not None:
        raise ValueError(f"--half {half}: splits the prompts of files; give --prompts")
    else:
        found = demo_prompts(tokenizer if chat_template else None)[:limit]
    return short_enough(found, tokenizer, params.max_len - max_new_tokens, say)


def is_chat(tokenizer: Tokenizer) -> bool:
    """Whether the checkpoint has a chat template that writes more than `render_turns`.

    That of the bundled target, and of every target of `hsd train target`, writes the same lines: such a target was
    trained on lines, those of questions among them, and is asked in them.
    """
    if not tokenizer.has_chat_template:
        return False
    try:
        asked = tokenizer.encode_chat([{"role": "user", "content": "Now?"}])
    except ValueError:
        return True  # the prompt that it refuses will be named
    return asked != tokenizer.encode(render_turns([("User", "Now?")], open_for="Assistant"))


def demo_prompts(tokenizer: Tokenizer | None = None) -> list[BenchPrompt]:
    """The dozen prompts of the demo, written by hand, in no training file.

    For a chat model questions: chat, maths, code, a summary, a list, a letter and six more. For the bundled pair, or
    None, in the style of its data: eight dialogues open for the assistant, four maths problems open for the answer.

    Raises:
      FileNotFoundError: if the installation is incomplete.
    """
    chat = tokenizer if tokenizer is not None and is_chat(tokenizer) else None
    path = DEMO if chat is None else QUESTIONS
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing from this installation; reinstall hsd_jax")
    if chat is not None:
        return read_prompts([path], lambda text, chat=chat: len(chat.encode(text)), chat=chat)
    lines = path.read_text(encoding="utf-8").splitlines()
    return [BenchPrompt(**json.loads(line)) for line in lines if line.strip()]


def short_enough(
    found: Sequence[BenchPrompt], tokenizer: Tokenizer, room: int, report: Callable[[str], None]
) -> list[BenchPrompt]:
    """The prompts of at most `room` tokens, with a word on how many are left out.

    Raises:
      ValueError: if none is.
    """
    fitting = [prompt for prompt in found if len(prompt.tokens(tokenizer)) <= room]
    if len(fitting) < len(found):
        report(f"{len(found) - len(fitting)} prompts left out: longer than {room} tokens")
    if not fitting:
        raise ValueError(f"no prompt has at most {room} tokens (max_len less --max-new-tokens)")
    return fitting


def read_prompts(
    files: Sequence[str | Path],
    count: Callable[[str], int],
    half: str | None = None,
    limit: int | None = None,
    max_tokens: int = MAX_PROMPT_TOKENS,
    chat: Tokenizer | None = None,
) -> list[BenchPrompt]:
    """The prompts of all files, at most `limit` of each.

    Args:
      count: tokens of a text, to cut dialogues.
      half: "tune" or "report"; None: all.
      chat: renders conversations and questions by its chat template; None: lines, as in `render_turns`.
    Raises:
      FileNotFoundError, ValueError: naming file and line.
    """
    take(Half | None, half, "half")
    prompts = []
    for path in map(Path, files):
        found = []
        for where, key, record in records_of(path):
            if half is None or zlib.crc32(key.encode()) % 2 == HALVES.index(half):
                found.append(prompt_of(record, key, where, count, max_tokens, chat))
            if limit is not None and len(found) >= limit:
                break
        if not found:
            raise ValueError(f"{path}: holds no prompt" + (f" of half {half}" if half else ""))
        prompts.extend(found)
    return prompts


def records_of(path: Path, keys: Sequence[str] = IDS) -> Iterator[tuple[str, str, dict]]:
    """(where, id, record) of every line, its id under one of `keys`; a line of plain text is its own record."""
    records = read_records(path)
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        [(_, whole)] = records
        lines = enumerate(whole["text"].split("\n"), 1)
        records = ((f"{path}:{number}", {"prompt": line}) for number, line in lines if line.strip())
    for where, record in records:
        own = (record[k] for k in keys if k in record)
        yield where, str(next(own, f"{path.stem}-{where.rpartition(':')[2]}")), record


def prompt_of(
    record: dict,
    name: str,
    where: str,
    count: Callable[[str], int],
    max_tokens: int,
    chat: Tokenizer | None = None,
) -> BenchPrompt:
    """The prompt of one record.

    Raises:
      ValueError: naming the place and the fields that would do, or why the chat template refuses the conversation.
    """
    if (first := first_question(record.get("turns"))) is not None:
        return BenchPrompt(name, first) if chat is None else asked(chat, [("User", first)], "", name, where)
    for field in ("turns", "messages"):
        if record.get(field):
            return dialogue_prompt(conversation(record, field, where), name, where, count, max_tokens, chat)
    if "question" in record:
        question = text_of(record, "question", where)
        text = question_prompt(question)
        full = render_record(record, where) if "answer" in record else text
        rest = full.removeprefix(text) if full.startswith(text) and full != text else None
        if chat is None:
            return BenchPrompt(name, text, rest)
        return asked(chat, [("User", question.strip())], (rest or "").strip(), name, where)
    if "prompt" in record:
        return BenchPrompt(name, text_of(record, "prompt", where), record.get("response") or record.get("rest"))
    if "text" in record:
        return text_prompt(text_of(record, "text", where), name, count, max_tokens)
    raise ValueError(f"{where}: fields {sorted(record)}; expected turns, messages, question, prompt or text")


def dialogue_prompt(
    turns: Turns,
    name: str,
    where: str,
    count: Callable[[str], int],
    max_tokens: int,
    chat: Tokenizer | None = None,
) -> BenchPrompt:
    """The first half of the turns at most, and at most `max_tokens`, open for the assistant's next turn.

    Where the assistant says nothing the whole, which ends with the user.
    """
    full = render_turns(turns)
    cuts = [i for i, (speaker, _) in enumerate(turns) if i and speaker_of(speaker) == "Assistant"]
    if not cuts and speaker_of(turns[-1][0]) == "User":
        cuts = [len(turns)]
    if not cuts:
        raise ValueError(f"{where}: no turn of the assistant after one of the user, and none of the user at the end")
    best = None
    for cut in cuts:
        if chat is None:
            text = render_turns(turns[:cut], open_for="Assistant")
            rest = full.removeprefix(text) if full.startswith(text) else None
            found, num_tokens = BenchPrompt(name, text, rest), count(text)
        else:
            said = turns[cut][1] if cut < len(turns) else ""
            found = asked(chat, turns[:cut], said, name, where)
            num_tokens = len(found.tokens(chat))
        if best is not None and (cut > len(turns) / 2 or num_tokens > max_tokens):
            break
        best = found
    assert best is not None
    return best


def asked(chat: Tokenizer, turns: Turns, said: str, name: str, where: str) -> BenchPrompt:
    """A conversation in the words of the chat template, open for the assistant.

    Args:
      said: what the assistant answers in the data, "" if that is not known. Some templates refuse an answer at the end,
        or write it so that what follows the prompt cannot be told; then there is no `rest`.
    Raises:
      ValueError: naming the place, if the template refuses the conversation.
    """
    template, said = chat_template_of(chat.render), said.strip()
    try:
        text = template(turns, True)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    rest = None
    if said:
        with contextlib.suppress(ValueError):
            whole = template([*turns, ("Assistant", said)], False)
            blank, found, _ = whole.removeprefix(text).partition(said)
            if whole.startswith(text) and found and not blank.strip():
                rest = blank + found
    return BenchPrompt(name, text, rest, is_templated=True, question=turns[-1][1])


def text_prompt(text: str, name: str, count: Callable[[str], int], max_tokens: int) -> BenchPrompt:
    """The first words of a text: half of them, or as many as fit. The cut is before a space, never inside a word."""
    spaces = [i for i, c in enumerate(text) if c == " " and 0 < i <= len(text) / 2]
    while len(spaces) > 1 and count(text[: spaces[-1]]) > max_tokens:
        spaces = spaces[: max(1, int(len(spaces) * 0.8))]
    if not spaces:
        return BenchPrompt(name, text)
    return BenchPrompt(name, text[: spaces[-1]], text[spaces[-1] :])
